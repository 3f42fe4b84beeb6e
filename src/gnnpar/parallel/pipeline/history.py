"""Source rows of this epoch and of an earlier one, and gradient rows of this epoch and the last, by aggregation.

The snapshot is frozen for `refresh` epochs (GNNPipe's second technique): taken at the end of epochs R - 1, 2R - 1, ...,
zeros before the first. Taking it copies nothing: the two halves of a table change places.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from gnnpar.comm import RowLike
from gnnpar.files import StateDict
from gnnpar.folds.block import Rows

Call = tuple[int, int]
"""(layer, number of the aggregation in it)."""


class History:
    """Tables of one rank. `rows`: T of the part's table, `own`: its owned rows; `halves`: 1 where nothing is stale;
    `remembers`: keep the last epoch's gradient rows too (lambda-mix)."""

    def __init__(self, rows: int, own: int, *, refresh: int, halves: int = 2, remembers: bool = False) -> None:
        self.rows, self.own, self.refresh, self.halves, self.remembers = rows, own, refresh, halves, remembers
        self._sources: dict[Call, Rows] = {}
        self._gradients: dict[Call, Tensor] = {}
        self._pushed: dict[Call, Rows] = {}
        self._flipped: int = 0
        self._turned: int = 0
        self.taken_after: int | None = None  # the epoch whose rows the snapshot holds
        self._finished: int = -1  # the last epoch that ended

    @property
    def fresh(self) -> int:
        """First row of this epoch's half."""
        return self._flipped * self.rows * (self.halves - 1)

    @property
    def stale(self) -> int:
        """First row of the snapshot."""
        return (1 - self._flipped) * self.rows * (self.halves - 1)

    def sources(self, call: Call, like: Sequence[RowLike]) -> Rows:
        """Return both halves of every operand's rows, zeros at first. Shapes: [halves * T, ...]."""
        if call not in self._sources:
            self._sources[call] = tuple(each.empty(self.halves * self.rows).zero_() for each in like)
        return self._sources[call]

    def write(self, call: Call, rows: Rows, at: slice | Tensor) -> Rows:
        """Write source rows of this epoch; return `sources`. `at`: their rows in the table of the part."""
        tables = self.sources(call, RowLike.of(rows))
        for table, each in zip(tables, rows, strict=True):
            table[self.fresh : self.fresh + self.rows][at] = each
        return tables

    def pushed(self, call: Call, like: Sequence[RowLike]) -> Rows:
        """Return the table of gradients that wait for their sources' turn, of folds that push. Shapes: [T, ...]."""
        if call not in self._pushed:
            self._pushed[call] = tuple(each.empty(self.rows).zero_() for each in like)
        return self._pushed[call]

    def gradients(self, call: Call, like: RowLike) -> Tensor:
        """Return this epoch's gradient rows of an aggregation's result, weighted once a slot is over, and a row of
        zeros. Shapes: [N + 1, ...]."""
        return self._gradient_halves(call, like)[self._turned if self.remembers else 0]

    def last_gradients(self, call: Call, like: RowLike) -> Tensor | None:
        """Return the gradient rows of the last epoch; None before the first, or if they are not remembered."""
        return self._gradient_halves(call, like)[1 - self._turned] if self.remembers and self._finished >= 0 else None

    def _gradient_halves(self, call: Call, like: RowLike) -> Tensor:
        if call not in self._gradients:
            both = like.empty((1 + self.remembers) * (self.own + 1)).zero_()
            self._gradients[call] = both.view(1 + self.remembers, self.own + 1, *like.shape)
        return self._gradients[call]

    def end_epoch(self, epoch: int, *, take: bool = True) -> None:
        """End an epoch, and take the snapshot if it is due. `take`: False where exact passes take snapshots."""
        self._finished = epoch
        if self.remembers:
            self._turned = 1 - self._turned
        if take and self.halves == 2 and (epoch + 1) % self.refresh == 0:
            self.take(epoch)

    def take(self, epoch: int) -> None:
        """Make the rows written since the last call the snapshot, which is of `epoch`."""
        self._flipped, self.taken_after = 1 - self._flipped, epoch

    @property
    def nbytes(self) -> int:
        tables = [t for rows in (*self._sources.values(), *self._pushed.values()) for t in rows]
        return sum(t.numel() * t.element_size() for t in (*tables, *self._own_gradients().values()))

    def _own_gradients(self) -> dict[Call, Tensor]:
        """Return gradient tables without the rows of zeros. Shapes: [halves, N, ...]."""
        return {call: both[:, : self.own] for call, both in self._gradients.items()}

    def drain(self) -> None:
        """Nothing is in flight."""

    def state_dict(self) -> StateDict:
        return {
            "_sources": self._sources,
            "_gradients": {call: both.contiguous() for call, both in self._own_gradients().items()},
            "_flipped": self._flipped,
            "_turned": self._turned,
            "taken_after": self.taken_after,
            "_finished": self._finished,
        }

    def load_state_dict(self, state: StateDict) -> None:
        self._sources = {call: tuple(t.clone() for t in rows) for call, rows in state["_sources"].items()}
        zero = {call: t.new_zeros(len(t), 1, *t.shape[2:]) for call, t in state["_gradients"].items()}
        self._gradients = {call: torch.cat([t, zero[call]], 1) for call, t in state["_gradients"].items()}
        self._flipped, self._turned = state["_flipped"], state["_turned"]
        self.taken_after, self._finished = state["taken_after"], state["_finished"]
