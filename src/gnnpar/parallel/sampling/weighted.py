"""Sums in which an in-edge counts as often as its weight says: out_i = sum_j weight_ij x_j."""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor

from gnnpar.folds.aggregator import Aggregator
from gnnpar.folds.block import Block, Rows
from gnnpar.folds.generic import Generic
from gnnpar.folds.sum import Sum
from gnnpar.parallel.whole import fold_block


def fold_weighted(agg: Aggregator, block: Block, src: Rows, dst: Rows, edge: Rows, shared: Rows) -> Tensor:
    """`agg` is `summed`; the block has weights. Shapes: src [N, ...], dst [n, ...], edge [E, ...] -> [n, ...].

    ValueError where the fold is neither Sum nor Generic.
    """
    if isinstance(agg, Sum):  # the engine carries no weights of the graph
        return fold_block(replace(agg, weighted=True), block, src, dst, edge, shared)
    if not isinstance(agg, Generic):
        raise ValueError(
            f"the fold {type(agg).__name__} cannot count an edge more than once, which makes up for edges that were "
            "not drawn: set strategy.normalize=subgraph, or use Sum or Generic"
        )
    value, weights = agg.value, block.weights
    assert weights is not None
    plain = replace(block, edges=replace(block.edges, weight=None))

    def weighted(s: Rows, d: Rows, e: Rows, t: Rows) -> Tensor:
        found = value(s, d, e[:-1], t)
        return found * e[-1].view(-1, *[1] * (found.dim() - 1))

    return fold_block(replace(agg, value=weighted), plain, src, dst, (*edge, weights), shared)
