"""GATv2: out_i = sum_j softmax_j(a . leaky_relu(W_l x_j + W_r x_i)) W_l x_j, per head (Brody et al. 2022)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Unpack

import torch
from torch import Tensor, nn

from gnnpar.folds.block import Rows
from gnnpar.folds.softmax import SoftmaxV2
from gnnpar.graph import Graph, Local
from gnnpar.models.gat import GAT, Headed, HeadedConv
from gnnpar.models.initial import Linear


class GATv2Conv(HeadedConv):
    glorot = ("attention",)

    def __init__(self, in_dim: int, out_dim: int, *, slope: float, **headed: Unpack[Headed]) -> None:
        super().__init__(out_dim, **headed)
        self.slope = slope
        self.left = Linear(in_dim, self.heads * self.width)
        self.right = Linear(in_dim, self.heads * self.width)
        self.attention = nn.Parameter(torch.empty(self.heads, self.width))
        self.bias = nn.Parameter(torch.zeros(out_dim))

    def message(self, g: Local, h: Tensor) -> Rows:
        return (self.by_head(self.left(h)),)

    def forward(self, g: Graph, h: Tensor) -> Tensor:
        agg = SoftmaxV2(self.slope, g.edge_dropout(self.p))
        src = g.source(self.message, h)
        g, (h,) = g.destinations(h)
        dst = (self.by_head(self.right(h)),)
        out = g.aggregate(agg, src, dst, shared=(self.attention,))
        return self.joined(out) + self.bias


@dataclass(frozen=True, kw_only=True)
class GATv2(GAT):
    """Configuration of GATv2, with the fields of GAT."""

    layer = GATv2Conv
