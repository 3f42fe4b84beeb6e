"""An exchange that hands out what was posted `staleness` epochs ago, so that messages travel beside whole epochs."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass

from gnnpar.comm import CodedExchange, Communicator, Incoming, Outgoing, Posted, RowLike, Site, Wire
from gnnpar.comm.communicator import Phase, SavedSite
from gnnpar.folds.block import Rows
from gnnpar_kernels.csr import accumulate_dtype

_MEAN = "mean"


@dataclass(eq=False)
class NotYet(Posted):
    """In the first epochs, and after a checkpoint of another run: rows of zeros."""


class LateExchange(CodedExchange):
    """`smooth`: phases whose rows are running means, decay x mean + (1 - decay) x new, the first rows at first."""

    def __init__(
        self, comm: Communicator, codec: Wire, *, staleness: int, smooth: frozenset[Phase], decay: float
    ) -> None:
        super().__init__(comm, codec)
        self._staleness, self._smooth, self._decay = staleness, smooth, decay
        self._means: dict[tuple[Phase, int, int], dict[int, Rows]] = {}  # (phase, layer, call) -> peer -> rows

    def post(
        self,
        outgoing: Mapping[int, Outgoing],
        incoming: Mapping[int, Incoming],
        like: Sequence[RowLike],
        site: Site,
        *,
        counted: Site | None = None,
    ) -> Posted:
        """Sends rows of this epoch, and returns the message of an earlier one."""
        at = site.phase, site.layer, site.call
        self.store((*at, site.epoch), super().post(outgoing, incoming, like, site, counted=counted))
        late = self.retrieve((*at, site.epoch - self._staleness))
        if late is not None:
            return late
        zeros = {p: tuple(each.empty(part.num_rows).zero_() for each in like) for p, part in incoming.items()}
        return NotYet(site, tuple(like), incoming, {}, zeros)

    def take(self, posted: Posted, peer: int) -> Rows:
        rows, site = super().take(posted, peer), posted.site
        if site.phase not in self._smooth or isinstance(posted, NotYet):
            return rows
        means = self._means.setdefault((site.phase, site.layer, site.call), {})
        if peer not in means:
            means[peer] = tuple(t.to(accumulate_dtype(t.dtype), copy=True) for t in rows)
        else:
            for mean, new in zip(means[peer], rows, strict=True):
                mean.lerp_(new.to(mean.dtype), 1 - self._decay)
        return tuple(mean.to(t.dtype) for mean, t in zip(means[peer], rows, strict=True))

    @property
    def nbytes(self) -> int:
        """Of rows that wait, of buffers in flight as the rows that they will be, and of means."""
        flying = sum(
            each.nbytes(posted.incoming[p].num_rows)
            for posted in self._stored.values()
            for p in posted.pending
            for each in posted.like
        )
        means = (t for by_peer in self._means.values() for rows in by_peer.values() for t in rows)
        return super().nbytes + flying + sum(t.numel() * t.element_size() for t in means)

    def state_dict(self) -> dict[Hashable, tuple[Site, dict[int, Rows]]]:
        """The stored messages, and means under the site that they are of."""
        means = {(_MEAN, *key): (Site(0, key[1], key[2], key[0]), dict(rows)) for key, rows in self._means.items()}
        return super().state_dict() | means

    def load_state_dict(self, state: Mapping[Hashable, tuple[SavedSite, Mapping[int, Rows]]]) -> None:
        messages: dict[Hashable, tuple[SavedSite, Mapping[int, Rows]]] = {}
        for key, (site, rows) in state.items():
            if isinstance(key, tuple) and key[0] == _MEAN:
                of = Site(*site)
                self._means[of.phase, of.layer, of.call] = dict(rows)
            else:
                messages[key] = (site, rows)
        super().load_state_dict(messages)
