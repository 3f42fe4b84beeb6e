"""GAT: out_i = sum_j softmax_j(leaky_relu(a_src.Wx_j + a_dst.Wx_i)) W x_j, per head (Velickovic et al. 2018)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, ClassVar, TypedDict, Unpack

import torch
import torch.nn.functional as F
from annotated_types import Ge, Le
from torch import Tensor, nn

from gnnpar.folds.block import Rows
from gnnpar.folds.softmax import Softmax
from gnnpar.graph import Graph, Local
from gnnpar.models.dense import dense
from gnnpar.models.gnn import ModelConfig, Probability


def head_scores(x: Tensor, attend: Tensor) -> Tensor:
    """Return <attend_h, x_h> for each head as one matrix product, without a [N, H, D] temporary.

    Use a dense layer with H outputs, since the gradient of its weights is grad^T x. For x @ matrix, autograd computes
    x^T grad, which takes ten times as long for a narrow matrix (50,000 x 128, 8 columns: 32 against 3 ms).

    Shapes: x [N, H, D], attend [H, D] -> [N, H].
    """
    heads = torch.eye(len(attend), dtype=attend.dtype, device=attend.device)
    return dense(x.flatten(1), (heads[:, :, None] * attend[None, :, :]).flatten(1))


class Headed(TypedDict):
    """Arguments of `HeadedConv`."""

    heads: int
    average: bool
    attention_dropout: float


class HeadedConv(nn.Module):
    """Base of layers that concatenate their heads, or with `average` take their mean (the last layer)."""

    def __init__(self, out_dim: int, *, heads: int, average: bool, attention_dropout: float) -> None:
        super().__init__()
        self.heads, self.average, self.p = heads, average, attention_dropout
        self.width = out_dim if average else out_dim // heads
        self.needs_edge_ids = attention_dropout > 0

    def by_head(self, rows: Tensor) -> Tensor:
        """Split columns by head. Shapes: [N, H D] -> [N, H, D]."""
        return rows.unflatten(-1, (self.heads, -1))

    def joined(self, out: Tensor) -> Tensor:
        """Join the heads. Shapes: [N, H, D] -> [N, D] or [N, H D]."""
        return out.mean(1) if self.average else out.flatten(1)


class GATConv(HeadedConv):
    glorot = ("weight", "attend_src", "attend_dst")

    def __init__(self, in_dim: int, out_dim: int, *, slope: float, **headed: Unpack[Headed]) -> None:
        super().__init__(out_dim, **headed)
        self.slope = slope
        self.weight = nn.Parameter(torch.empty(self.heads * self.width, in_dim))
        self.attend_src = nn.Parameter(torch.empty(self.heads, self.width))
        self.attend_dst = nn.Parameter(torch.empty(self.heads, self.width))
        self.bias = nn.Parameter(torch.zeros(out_dim))

    def message(self, g: Local, h: Tensor) -> Rows:
        x = self.by_head(dense(h, self.weight))
        return x, head_scores(x, self.attend_src)

    def forward(self, g: Graph, h: Tensor) -> Tensor:
        src = g.source(self.message, h)
        g, (x,) = g.destinations(src[0])
        dst = (head_scores(x, self.attend_dst),)
        out = g.aggregate(Softmax(self.slope, g.edge_dropout(self.p)), src, dst)
        return self.joined(out) + self.bias


@dataclass(frozen=True, kw_only=True)
class Heads(ModelConfig):
    """Configuration of models with heads. hidden: width of all heads together. Without a decoder, the last layer
    averages `out_heads` heads."""

    heads: Annotated[int, Ge(1), Le(1024)] = 4
    out_heads: Annotated[int, Ge(1), Le(1024)] = 1
    attention_dropout: Probability = 0.0

    def headed(self, out_dim: int, index: int) -> Headed:
        """Return the arguments of a layer's HeadedConv."""
        if index == self.num_layers - 1 and self.decoder == "none":
            return {"heads": self.out_heads, "average": True, "attention_dropout": self.attention_dropout}
        if out_dim % self.heads:
            raise ValueError(
                f"model.hidden={out_dim} does not divide into model.heads={self.heads} heads: "
                f"use hidden={-(-out_dim // self.heads) * self.heads}."
            )
        return {"heads": self.heads, "average": False, "attention_dropout": self.attention_dropout}


@dataclass(frozen=True, kw_only=True)
class GAT(Heads):
    """Configuration of GAT. slope: of the leaky relu of scores."""

    slope: Annotated[float, Ge(0.0)] = 0.2
    activation = F.elu
    layer: ClassVar[Callable[..., nn.Module]] = GATConv

    def conv(self, in_dim: int, out_dim: int, *, index: int, aggregate_first: bool) -> nn.Module:
        self.only_order("transform_first", "attention scores read the transformed rows")
        return type(self).layer(in_dim, out_dim, slope=self.slope, **self.headed(out_dim, index))
