"""GATv2: out_i = sum_j softmax_j(a . leaky_relu(W_l x_j + W_r x_i)) W_l x_j, per head (Brody et al. 2022)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from gnnpar.folds.block import Rows
from gnnpar.folds.softmax import SoftmaxV2
from gnnpar.graph import Graph, Local
from gnnpar.models.gat import GAT
from gnnpar.models.initial import Linear


class GATv2Conv(nn.Module):
    glorot = ("attention",)

    def __init__(
        self, in_dim: int, out_dim: int, *, heads: int, average: bool, slope: float, attention_dropout: float
    ) -> None:
        super().__init__()
        width = out_dim if average else out_dim // heads
        self.left = Linear(in_dim, heads * width)
        self.right = Linear(in_dim, heads * width)
        self.attention = nn.Parameter(torch.empty(heads, width))
        self.bias = nn.Parameter(torch.zeros(out_dim))
        self.heads, self.average, self.slope, self.p = heads, average, slope, attention_dropout

    @property
    def needs_edge_ids(self) -> bool:
        return self.p > 0

    def message(self, g: Local, h: Tensor) -> Rows:
        return (self.left(h).unflatten(-1, (self.heads, -1)),)

    def forward(self, g: Graph, h: Tensor) -> Tensor:
        agg = SoftmaxV2(self.slope, g.edge_dropout(self.p))
        src = g.source(self.message, h)
        g, (h,) = g.destinations(h)
        dst = (self.right(h).unflatten(-1, (self.heads, -1)),)
        out = g.aggregate(agg, src, dst, shared=(self.attention,))
        return (out.mean(1) if self.average else out.flatten(1)) + self.bias


@dataclass(frozen=True, kw_only=True)
class GATv2(GAT):
    """Configuration of GATv2, with the fields of GAT."""

    def conv(self, in_dim: int, out_dim: int, *, index: int, aggregate_first: bool) -> nn.Module:
        self.only_order("transform_first", "attention scores read the transformed rows")
        heads, average = self.heads_of(out_dim, index)
        return GATv2Conv(
            in_dim, out_dim, heads=heads, average=average, slope=self.slope, attention_dropout=self.attention_dropout
        )
