"""What DIGEST computes, on one device: rows of other parts are constants of the last refresh."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor

from gnnpar.folds.aggregator import Aggregator
from gnnpar.folds.block import Rows
from gnnpar.parallel.oracle import PartByPart


@dataclass(eq=False)
class RefreshedWhole(PartByPart):
    """`gradients`: in an epoch that refreshes, rows of other parts are no constants."""

    period: int = field(kw_only=True)
    gradients: bool = field(kw_only=True)
    table: dict[tuple[int, int], Rows] = field(default_factory=dict[tuple[int, int], Rows])  # (layer, call) -> rows

    def aggregate(self, agg: Aggregator, src: Rows, dst: Rows = (), edge: Rows = (), shared: Rows = ()) -> Tensor:
        at, refreshes = (self.layer, self.next_call()), self.run.epoch % self.period == 0
        if refreshes:
            self.table[at] = tuple(t.detach().clone() for t in src)
        others = src if refreshes and self.gradients else self.table[at]
        return self.fold_parts(agg, src, others, dst, edge, shared)
