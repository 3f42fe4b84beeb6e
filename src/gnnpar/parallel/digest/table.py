"""An exchange that keeps the halo rows it took, and hands them out again until the epoch of the next refresh."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence

from gnnpar.comm import CodedExchange, Communicator, Incoming, Outgoing, Posted, RowLike, Site, Wire
from gnnpar.comm.communicator import SavedSite
from gnnpar.folds.block import Rows


class TableExchange(CodedExchange):
    """Rows travel in every `period`-th epoch, from epoch 0 on. `gradients`: so do, in these epochs, their gradients."""

    def __init__(self, comm: Communicator, codec: Wire, *, period: int, gradients: bool) -> None:
        super().__init__(comm, codec)
        self._period, self._gradients = period, gradients
        self._rows: dict[tuple[int, int], dict[int, Rows]] = {}  # (layer, call) -> peer -> its rows

    def refreshes(self, epoch: int) -> bool:
        return epoch % self._period == 0

    def post(
        self,
        outgoing: Mapping[int, Outgoing],
        incoming: Mapping[int, Incoming],
        like: Sequence[RowLike],
        site: Site,
        *,
        counted: Site | None = None,
    ) -> Posted:
        """In an epoch between refreshes: nothing is sent, rows are those of the table, and no gradient comes back."""
        travels = self.refreshes(site.epoch)
        if site.phase == "backward":
            if travels and self._gradients:
                return super().post(outgoing, incoming, like, site, counted=counted)
            return Posted(site, tuple(like), {}, {})
        if travels:
            self._rows[site.layer, site.call] = {}
            return super().post(outgoing, incoming, like, site, counted=counted)
        return Posted(site, tuple(like), incoming, {}, dict(self._rows.get((site.layer, site.call), {})))

    def take(self, posted: Posted, peer: int) -> Rows:
        rows, site = super().take(posted, peer), posted.site
        if site.phase != "backward" and self.refreshes(site.epoch) and self._period > 1:
            self._rows[site.layer, site.call][peer] = rows
        return rows

    @property
    def nbytes(self) -> int:
        """Of the table."""
        rows = (t for table in self._rows.values() for each in table.values() for t in each)
        return super().nbytes + sum(t.numel() * t.element_size() for t in rows)

    def state_dict(self) -> dict[Hashable, tuple[Site, dict[int, Rows]]]:
        """The table, each aggregation's under its site."""
        assert not super().state_dict()
        return {at: (Site(0, *at, "forward"), dict(rows)) for at, rows in self._rows.items()}

    def load_state_dict(self, state: Mapping[Hashable, tuple[SavedSite, Mapping[int, Rows]]]) -> None:
        for site, rows in state.values():
            of = Site(*site)
            self._rows[of.layer, of.call] = dict(rows)
