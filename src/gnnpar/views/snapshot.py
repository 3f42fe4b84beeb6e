"""An exact pass that leaves its source rows as the history: the remedy for zeros at first and for old snapshots."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor

from gnnpar.codecs.codec import RowLike
from gnnpar.ops.aggregator import Aggregator
from gnnpar.ops.block import Rows
from gnnpar.views.chunk import Way
from gnnpar.views.halo import HaloGraph


@dataclass(eq=False)
class Snapshot:
    """An exact view whose aggregations also write what they read into the way's tables."""

    view: Any
    way: Way
    _calls: int = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self.view, name)

    def at(self, layer: int) -> Self:
        return type(self)(self.view.at(layer), self.way)

    def aggregate(self, agg: Aggregator, src: Rows, dst: Rows = (), edge: Rows = (), shared: Rows = ()) -> Tensor:
        call, self._calls = self._calls, self._calls + 1
        way, like = self.way, RowLike.of(src)
        history, chunks = way.history, way.chunks
        tables = history.sources((self.view.layer, call), like)
        for table, rows in zip(tables, src, strict=True):
            table[history.fresh : history.fresh + chunks.num_own] = rows[chunks.order]
        if isinstance(self.view, HaloGraph):
            site = self.view.site(call=call, phase="forward")
            theirs = self.view.receive(self.view.send(src, site), like, site)
            for p, operands in theirs.items():
                for table, rows in zip(tables, operands, strict=True):
                    table[history.fresh + chunks.halo_rows[p]] = rows
        return self.view.aggregate(agg, src, dst, edge, shared)


@torch.no_grad()
def take_snapshot(snapshot: Snapshot, run: Callable[[Any], object], epoch: int) -> None:
    """Run one pass through the recording view; what it wrote is the history from now on."""
    run(snapshot)
    snapshot.way.history.take(epoch - 1)
