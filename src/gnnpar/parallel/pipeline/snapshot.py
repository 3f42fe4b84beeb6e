"""An exact pass that leaves its source rows as the history: the remedy for zeros at first and for old snapshots."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Self

import torch
from torch import Tensor

from gnnpar.comm import Site
from gnnpar.folds.aggregator import Aggregator
from gnnpar.folds.block import Rows
from gnnpar.parallel.halo_graph import HaloGraph
from gnnpar.parallel.pipeline.chunk import Part


@dataclass(eq=False)
class Snapshot:
    """An exact view whose aggregations also write what they read into the part's tables."""

    view: Any
    part: Part
    _calls: int = 0

    @staticmethod
    def of(view: Any, part: Part) -> Snapshot:
        """What other parts send is written as the view receives it, and sent once."""
        if isinstance(view, HaloGraph):
            view = replace(view, exchange=view.exchange.observed(partial(_keep, part)))
        return Snapshot(view, part)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.view, name)

    def at(self, layer: int) -> Self:
        return type(self)(self.view.at(layer), self.part)

    def aggregate(self, agg: Aggregator, src: Rows, dst: Rows = (), edge: Rows = (), shared: Rows = ()) -> Tensor:
        call, self._calls = self._calls, self._calls + 1
        history, chunks = self.part.history, self.part.chunks
        tables = history.sources((self.view.layer, call), src)
        for table, rows in zip(tables, src, strict=True):
            table[history.fresh : history.fresh + chunks.num_own] = rows[chunks.order]
        return self.view.aggregate(agg, src, dst, edge, shared)


def _keep(part: Part, site: Site, peer: int, operands: Rows) -> None:
    """Halo rows of an aggregation, into its table."""
    tables = part.history.sources((site.layer, site.call), operands)
    for table, rows in zip(tables, operands, strict=True):
        table[part.history.fresh + part.chunks.halo_rows[peer]] = rows


@torch.no_grad()
def take_snapshot(snapshot: Snapshot, run: Callable[[Any], object], epoch: int) -> None:
    """Run one pass through the recording view; what it wrote is the history from now on."""
    run(snapshot)
    snapshot.part.history.take(epoch - 1)
