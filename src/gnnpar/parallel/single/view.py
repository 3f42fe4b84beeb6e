"""The whole graph of one device, whose symmetric normalisation is in the weights of its edges: Y = (D^-1/2 A D^-1/2) X.

Scaling rows before and after a sum is two passes over [N, F] in each direction. Ranks that send rows scale them first,
as others read them scaled; one device reads its own.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from gnnpar.folds.block import Rows
from gnnpar.folds.sum import Sum
from gnnpar.graph import Local
from gnnpar.models.gcn import symmetric_norm
from gnnpar.parallel.whole import WholeGraph, fold_block
from gnnpar.precision import is_narrow


@dataclass(eq=False)
class SingleGraph(WholeGraph):
    """See gnnpar.graph.SymmetricSums."""

    def symmetric_sum(self, h: Tensor) -> Tensor:
        scale = symmetric_norm(self)
        if self.cache is not None or is_narrow(h.dtype):  # what is kept is the sum alone; 16-bit weights would round
            return scale * self.aggregate(Sum(weighted=True), self.source(_scaled, h))
        self.next_call()
        return fold_block(Sum(weighted=True), self.shard.inner.scaled(scale[:, 0]), (h,), (), (), ())


def _scaled(g: Local, h: Tensor) -> Rows:
    return (symmetric_norm(g) * h,)
