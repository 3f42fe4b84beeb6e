"""BNS-GCN on one device: edges between parts are left out or weighted, by the masks of the epoch."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor

from gnnpar.folds.aggregator import Aggregator
from gnnpar.folds.block import Block, Rows, chosen
from gnnpar.graph import InEdges
from gnnpar.parallel.bns.sample import kept
from gnnpar.parallel.view import View, edge_order, rows_left
from gnnpar.parallel.whole import fold_block
from gnnpar.partition.shard import edges_by_id


@dataclass(eq=False)
class SampledWhole(View):
    """The whole graph in one block of edges that count once and one of edges that count 1 / rate."""

    part_of: Tensor = field(kw_only=True)  # [N]
    rate: float = field(kw_only=True)

    @cached_property
    def _edges(self) -> tuple[Tensor, Tensor]:
        """Return (edges within a part, edges between parts with a drawn source), [E] bool each."""
        whole = self.shard.inner
        src, dst_part = whole.indices.long(), self.part_of[whole.edge_dst]
        within, drawn = self.part_of[src] == dst_part, torch.zeros_like(dst_part, dtype=torch.bool)
        for reader in range(int(self.part_of.max()) + 1):
            masks = kept(self.shard.node_ids, rate=self.rate, seed=self.run.seed, epoch=self.run.epoch, reader=reader)
            drawn |= (dst_part == reader) & masks[src]
        return within, drawn & ~within

    @property
    def edge_ids(self) -> Tensor:
        ids = self._block(self._edges[0] | self._edges[1]).edge_ids
        assert ids is not None
        return ids.sort().values

    @property
    def in_edges(self) -> InEdges:
        block = self._block(self._edges[0] | self._edges[1])
        return edges_by_id(block.edges, block.indices.long(), block.edge_dst)

    @property
    def edge_attr(self) -> Tensor | None:
        return None if self.shard.edge_attr is None else rows_left(self.shard, self.edge_ids)

    @property
    def edge_type(self) -> Tensor | None:
        return chosen(self.shard.edge_type, torch.searchsorted(edge_order(self.shard), self.edge_ids))

    def aggregate(self, agg: Aggregator, src: Rows, dst: Rows = (), edge: Rows = (), shared: Rows = ()) -> Tensor:
        within, drawn = self._edges
        if not agg.summed:
            return self._fold(agg, within | drawn, src, dst, edge, shared)
        inner = self._fold(agg, within, src, dst, edge, shared)
        return inner + self._fold(agg, drawn, src, dst, edge, shared) / self.rate if bool(drawn.any()) else inner

    def _fold(self, agg: Aggregator, edges: Tensor, src: Rows, dst: Rows, edge: Rows, shared: Rows) -> Tensor:
        block = self._block(edges)
        if edge:
            assert block.edge_ids is not None
            place = torch.searchsorted(self.edge_ids, block.edge_ids)
            edge = tuple(rows[place] for rows in edge)
        return fold_block(agg, block, src, dst, edge, shared)

    def _block(self, edges: Tensor) -> Block:
        whole = self.shard.inner
        return Block.from_edges(
            whole.edge_dst[edges],
            whole.indices[edges],
            num_dst=whole.num_dst,
            num_src=whole.num_src,
            src_ids=self.shard.node_ids,
            edges=whole.edges.at(edges),
        )
