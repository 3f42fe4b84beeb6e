"""The whole graph on one device, Y = A X, and the fold over one block that every view uses."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from gnnpar.folds.aggregator import Aggregator
from gnnpar.folds.block import Block, Rows
from gnnpar.parallel.blocks import OneBlock, walk
from gnnpar.parallel.view import View


@dataclass(eq=False)
class WholeGraph(View):
    """A shard that needs no remote rows (a single part, or a test's whole graph)."""

    def fold(self, agg: Aggregator, call: int, src: Rows, dst: Rows, edge: Rows, shared: Rows) -> Tensor:
        return fold_all_edges(agg, self.shard.inner, src, dst, edge, shared)


def fold_all_edges(agg: Aggregator, block: Block, src: Rows, dst: Rows, edge: Rows, shared: Rows) -> Tensor:
    """Call `fold_block` on a block with all in-edges of its rows. Rows of `edge` ascend by edge id."""
    if edge and (places := block.edge_places) is not None:
        edge = tuple(rows[places] for rows in edge)
    return fold_block(agg, block, src, dst, edge, shared)


def fold_block(agg: Aggregator, block: Block, src: Rows, dst: Rows, edge: Rows, shared: Rows) -> Tensor:
    """Fold one aggregation over one block, differentiable by the aggregator's own gradient."""
    return walk(OneBlock(block), agg, 0, src, dst, edge, shared)
