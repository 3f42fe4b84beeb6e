"""GIN: Y = MLP((1 + eps) X + A X) (Xu et al. 2019, equation 4.1). With self loops in A, a node counts 2 + eps times."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from gnnpar.folds.block import Rows
from gnnpar.folds.sum import Sum
from gnnpar.graph import Graph, Local
from gnnpar.models.gnn import ModelConfig
from gnnpar.models.initial import Linear


class GINConv(nn.Module):
    degree_powers = (0.0, 0.0)

    def __init__(self, in_dim: int, out_dim: int, *, hidden: int) -> None:
        super().__init__()
        self.eps = nn.Parameter(torch.zeros(()))
        self.inside = Linear(in_dim, hidden)
        self.outside = Linear(hidden, out_dim)

    @staticmethod
    def message(g: Local, h: Tensor) -> Rows:
        return (h,)

    def forward(self, g: Graph, h: Tensor) -> Tensor:
        src = g.source(self.message, h)
        g, (h,) = g.destinations(h)
        out = (1 + self.eps) * h + g.aggregate(Sum(), src)
        return self.outside(torch.relu(self.inside(out)))


@dataclass(frozen=True, kw_only=True)
class GIN(ModelConfig):
    def conv(self, in_dim: int, out_dim: int, *, index: int, aggregate_first: bool) -> nn.Module:
        self.only_order("aggregate_first", "GIN transforms the sum")
        return GINConv(in_dim, out_dim, hidden=self.hidden)
