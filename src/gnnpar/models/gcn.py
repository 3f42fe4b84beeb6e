"""GCN: Y = D^-1/2 A D^-1/2 X W + b (Kipf and Welling 2017, equation 2). A includes self loops and edge weights."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from gnnpar.folds.block import Rows
from gnnpar.folds.sum import Sum
from gnnpar.graph import Graph, Local
from gnnpar.models.dense import dense
from gnnpar.models.gnn import ModelConfig


def inverse_root(in_degree: Tensor, in_weight: Tensor | None) -> Tensor:
    """Return d^-1/2 per in-degree, [N]. With edge weights, d is the sum of weights, and 0^-1/2 is 0."""
    if in_weight is not None:
        return torch.where(in_weight > 0, in_weight, torch.inf).rsqrt()
    return in_degree.clamp_min(1).rsqrt()


def scaled(g: Local, rows: Tensor) -> Tensor:
    """Return rows [N, ...] times d^-1/2 of the global in-degree; unchanged if edge weights include the factor."""
    return rows if g.normalised else inverse_root(g.in_degree, g.in_weight)[:, None] * rows


class GCNConv(nn.Module):
    glorot = ("weight",)
    degree_powers = (-0.5, -0.5)  # exponents of the in-degrees of an edge's destination and source
    takes_normalised = True

    def __init__(self, in_dim: int, out_dim: int, *, aggregate_first: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(out_dim, in_dim))
        self.bias = nn.Parameter(torch.zeros(out_dim))
        self.aggregate_first = aggregate_first

    def message(self, g: Local, h: Tensor) -> Rows:
        return (scaled(g, h if self.aggregate_first else dense(h, self.weight)),)

    def forward(self, g: Graph, h: Tensor) -> Tensor:
        src = g.source(self.message, h)
        g, _ = g.destinations()
        out = scaled(g, g.aggregate(Sum(weighted=True), src))
        return dense(out, self.weight, self.bias) if self.aggregate_first else out + self.bias


@dataclass(frozen=True, kw_only=True)
class Symmetric(ModelConfig):
    """Configuration of models that sum by D^-1/2 A D^-1/2 with edge weights."""

    takes_root = True
    edge_data = frozenset({"weight"})


@dataclass(frozen=True, kw_only=True)
class GCN(Symmetric):
    def conv(self, in_dim: int, out_dim: int, *, index: int, aggregate_first: bool) -> nn.Module:
        return GCNConv(in_dim, out_dim, aggregate_first=aggregate_first)
