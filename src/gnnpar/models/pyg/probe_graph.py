"""The small graph on which a PyG model is checked before training."""

from __future__ import annotations

import torch
from torch import Tensor

from gnnpar.folds.aggregator import Aggregator, EdgeDropout
from gnnpar.folds.block import Block, Operands, Rows
from gnnpar.folds.edge_data import EdgeData
from gnnpar.graph import InEdges, OneView
from gnnpar.models.pyg.substitutes import LAST_TAG

Ends = tuple[Tensor, Tensor, Tensor]
"""Sources, destinations and types of edges, each [E], sorted by destination."""


class ProbeGraph(OneView):
    """A graph of n nodes with a self loop each, or with edges `ends`. Shapes: like [n, ...]; in_weight [n]; edge_attr
    [E, D]. training: draw masks; row masks keep everything. last_tag: tag of the last dropout so far."""

    def __init__(
        self,
        like: Tensor,
        in_weight: Tensor | None = None,
        edge_attr: Tensor | None = None,
        *,
        ends: Ends | None = None,
        training: bool = False,
    ) -> None:
        self.node_ids, self.num_nodes = torch.arange(len(like), device=like.device), len(like)
        source, destination, types = ends or (self.node_ids, self.node_ids, torch.zeros_like(self.node_ids))
        self.in_degree = torch.bincount(destination, minlength=len(like)).to(like.dtype)
        self.in_weight, self.edge_attr, self.training = in_weight, edge_attr, training
        self.edge_ids, self.last_tag = torch.arange(len(source), device=like.device), LAST_TAG
        self.edge_type = types
        weight = None if in_weight is None else in_weight.new_ones(len(source))
        self._block = Block.from_edges(
            destination,
            source,
            num_dst=len(like),
            num_src=len(like),
            src_ids=self.node_ids,
            edges=EdgeData(ids=self.edge_ids, weight=weight, type=types),
        )

    def dropout(self, x: Tensor, p: float, *, tag: int = 0) -> Tensor:
        if not self.training:
            return x
        self.last_tag = tag
        return x.clone()

    @property
    def in_edges(self) -> InEdges:
        return InEdges(self._block.indices.long(), self._block.edge_dst, self._block.weights, self._block.types)

    def type_degree(self, types: int) -> Tensor:
        return self.in_degree[:, None].expand(-1, types)

    def edge_dropout(self, p: float, *, tag: int = 0) -> EdgeDropout | None:
        if not self.training or p == 0:
            return None
        self.last_tag = max(self.last_tag, tag)
        return EdgeDropout(p, 0)

    def aggregate(self, agg: Aggregator, src: Rows, dst: Rows = (), edge: Rows = (), shared: Rows = ()) -> Tensor:
        x = Operands(src, dst, edge, shared)
        if agg.whole_neighborhood:  # torch differentiates it
            return agg.update((), self._block, x)[0]
        with torch.no_grad():
            out = agg.finish(agg.update(agg.init(len(self.node_ids), x), self._block, x))[0]
        wanted = torch.is_grad_enabled() and any(t.requires_grad for rows in x for t in rows)
        return out.requires_grad_().clone() if wanted else out
