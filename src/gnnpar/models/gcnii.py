"""GCNII: S = (1 - alpha) D^-1/2 A D^-1/2 X + alpha X0, Y = (1 - beta) S + beta S W (Chen et al. 2020, equation 5)."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated

import torch
from annotated_types import Ge, Gt, Le
from torch import Tensor, nn

from gnnpar.folds.block import Rows
from gnnpar.folds.sum import Sum
from gnnpar.graph import Graph, Local
from gnnpar.models.dense import dense
from gnnpar.models.gcn import Symmetric, scaled


class GCNIIConv(nn.Module):
    """A GCNII layer. It always aggregates first, since the residual sits between aggregation and matrix."""

    glorot = ("weight",)
    degree_powers = (-0.5, -0.5)
    takes_normalised = True

    def __init__(self, dim: int, *, alpha: float, beta: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(dim, dim))
        self.alpha, self.beta = alpha, beta

    @staticmethod
    def message(g: Local, h: Tensor) -> Rows:
        return (scaled(g, h),)

    def forward(self, g: Graph, h: Tensor, first: Tensor) -> Tensor:
        src = g.source(self.message, h)
        g, (first,) = g.destinations(first)
        smooth = scaled(g, g.aggregate(Sum(weighted=True), src))
        smooth = (1 - self.alpha) * smooth + self.alpha * first
        return (1 - self.beta) * smooth + self.beta * dense(smooth, self.weight)


@dataclass(frozen=True, kw_only=True)
class GCNII(Symmetric):
    """Configuration of GCNII. alpha: share of the encoder's output. beta of layer l is ln(theta / l + 1)."""

    alpha: Annotated[float, Ge(0.0), Le(1.0)] = 0.1
    theta: Annotated[float, Gt(0.0)] = 0.5
    carries_first = True

    def conv(self, in_dim: int, out_dim: int, *, index: int, aggregate_first: bool) -> nn.Module:
        self.only_order("aggregate_first", "GCNII adds the initial rows between fold and matrix")
        return GCNIIConv(in_dim, alpha=self.alpha, beta=math.log(self.theta / (index + 1) + 1))
