"""GIN: Y = MLP((1 + eps) X + A X) (Xu et al. 2019, equation 4.1). With self loops in A, a node counts 2 + eps times."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from gnnpar.folds.block import Rows
from gnnpar.folds.sum import Sum
from gnnpar.graph import Graph, Local
from gnnpar.models.gnn import ModelConfig, attributes
from gnnpar.models.initial import Linear


class GINConv(nn.Module):
    """A GIN layer. edge_dim: width of the edge rows that GINE's messages read."""

    degree_powers = (0.0, 0.0)

    def __init__(self, in_dim: int, out_dim: int, *, hidden: int, edge_dim: int = 0) -> None:
        super().__init__()
        self.eps = nn.Parameter(torch.zeros(()))
        self.edges = Linear(edge_dim, in_dim) if edge_dim else None
        self.inside = Linear(in_dim, hidden)
        self.outside = Linear(hidden, out_dim)
        self.edge_dim, self.needs_edge_ids = edge_dim, edge_dim > 0

    def message(self, g: Local, h: Tensor) -> Rows:
        return (h,)

    def total(self, g: Graph, src: Rows, edge: Rows) -> Tensor:
        """Return the sum of the messages, [N, in_dim]."""
        return g.aggregate(Sum(), src)

    def forward(self, g: Graph, h: Tensor) -> Tensor:
        src, edge = g.source(self.message, h), attributes(g, self.edge_dim)
        g, (h,) = g.destinations(h)
        return self.outside(torch.relu(self.inside((1 + self.eps) * h + self.total(g, src, edge))))


@dataclass(frozen=True, kw_only=True)
class GIN(ModelConfig):
    def conv(self, in_dim: int, out_dim: int, *, index: int, aggregate_first: bool) -> nn.Module:
        self.only_order("aggregate_first", "GIN transforms the sum")
        return GINConv(in_dim, out_dim, hidden=self.hidden)
