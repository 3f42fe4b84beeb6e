"""GINE: Y = MLP((1 + eps) X + sum_j relu(x_j + W e_ij + b)), with edge attributes e_ij (Hu et al. 2020, section 5).
Without edge attributes, the sum is over relu(x_j)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gnnpar.folds.block import Rows
from gnnpar.folds.generic import Generic
from gnnpar.folds.sum import Sum
from gnnpar.graph import Graph, Local
from gnnpar.models.edge_attr import ReadsAttributes, attributes
from gnnpar.models.initial import Linear


def rectified(src: Rows, dst: Rows, edge: Rows, shared: Rows) -> Tensor:
    """Return relu(x_j + W e_ij + b). Called per chunk of edges, so the encoded rows of all edges never exist."""
    return torch.relu(src[0] + F.linear(edge[0], *shared))


class GINEConv(nn.Module):
    degree_powers = (0.0, 0.0)

    def __init__(self, in_dim: int, out_dim: int, *, hidden: int, edge_dim: int) -> None:
        super().__init__()
        self.eps = nn.Parameter(torch.zeros(()))
        self.edges = Linear(edge_dim, in_dim) if edge_dim else None
        self.inside = Linear(in_dim, hidden)
        self.outside = Linear(hidden, out_dim)
        self.edge_dim, self.needs_edge_ids = edge_dim, edge_dim > 0

    def message(self, g: Local, h: Tensor) -> Rows:
        return (h if self.edges is not None else torch.relu(h),)

    def forward(self, g: Graph, h: Tensor) -> Tensor:
        src, edge = g.source(self.message, h), attributes(g, self.edge_dim)
        g, (h,) = g.destinations(h)
        if self.edges is None:
            total = g.aggregate(Sum(), src)
        else:
            total = g.aggregate(Generic(value=rectified), src, (), edge, (self.edges.weight, self.edges.bias))
        return self.outside(torch.relu(self.inside((1 + self.eps) * h + total)))


@dataclass(frozen=True, kw_only=True)
class GINE(ReadsAttributes):
    """Configuration of GINE: the fields of GIN, and edge_dim."""

    def conv(self, in_dim: int, out_dim: int, *, index: int, aggregate_first: bool) -> nn.Module:
        self.only_order("aggregate_first", "GINE transforms the sum")
        return GINEConv(in_dim, out_dim, hidden=self.hidden, edge_dim=self.edge_dim or 0)
