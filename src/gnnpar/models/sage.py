"""GraphSAGE: Y = X W_self + agg(X) W_neigh + b with the mean or the maximum of in-neighbours (Hamilton et al. 2017)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from gnnpar.folds.block import Rows
from gnnpar.folds.max import Max
from gnnpar.folds.sum import Sum
from gnnpar.graph import Graph, Local
from gnnpar.models.dense import dense
from gnnpar.models.gnn import ModelConfig
from gnnpar.models.initial import Linear


class SAGEConv(nn.Module):
    """A GraphSAGE layer. The mean is a sum divided by the global in-degree."""

    glorot = ("neighbours",)
    degree_powers = (-1.0, 0.0)

    def __init__(self, in_dim: int, out_dim: int, *, aggregator: Literal["mean", "max"], aggregate_first: bool) -> None:
        super().__init__()
        self.own = Linear(in_dim, out_dim)
        self.neighbours = nn.Parameter(torch.empty(out_dim, in_dim))
        self.aggregator, self.aggregate_first = aggregator, aggregate_first

    def message(self, g: Local, h: Tensor) -> Rows:
        return (h if self.aggregate_first else dense(h, self.neighbours),)

    def forward(self, g: Graph, h: Tensor) -> Tensor:
        src = g.source(self.message, h)
        g, (h,) = g.destinations(h)
        if self.aggregator == "max":
            out = g.aggregate(Max(), src)
        else:
            out = g.aggregate(Sum(), src) * g.in_degree.clamp_min(1).reciprocal()[:, None]
        own = self.own(h)
        return dense(out, self.neighbours, add=own) if self.aggregate_first else own + out


@dataclass(frozen=True, kw_only=True)
class SAGE(ModelConfig):
    aggregator: Literal["mean", "max"] = "mean"

    def conv(self, in_dim: int, out_dim: int, *, index: int, aggregate_first: bool) -> nn.Module:
        if self.aggregator == "max":
            self.only_order("aggregate_first", "a maximum does not commute with a matrix")
            aggregate_first = True
        return SAGEConv(in_dim, out_dim, aggregator=self.aggregator, aggregate_first=aggregate_first)
