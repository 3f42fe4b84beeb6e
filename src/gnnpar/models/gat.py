"""GAT: out_i = sum_j softmax_j(leaky_relu(a_src.Wx_j + a_dst.Wx_i)) W x_j, per head (Velickovic et al. 2018)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

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

    It is a dense layer of H outputs because the gradient of its weights is grad^T x. Autograd computes x^T grad for x @
    matrix, which takes ten times as long for a narrow matrix (50,000 x 128, 8 columns: 32 against 3 ms).

    Shapes: x [N, H, D], attend [H, D] -> [N, H].
    """
    heads = torch.eye(len(attend), dtype=attend.dtype, device=attend.device)
    return dense(x.flatten(1), (heads[:, :, None] * attend[None, :, :]).flatten(1))


class GATConv(nn.Module):
    """A GAT layer that concatenates its heads, or with `average` takes their mean (the last layer)."""

    glorot = ("weight", "attend_src", "attend_dst")

    def __init__(
        self, in_dim: int, out_dim: int, *, heads: int, average: bool, slope: float, attention_dropout: float
    ) -> None:
        super().__init__()
        width = out_dim if average else out_dim // heads
        self.weight = nn.Parameter(torch.empty(heads * width, in_dim))
        self.attend_src = nn.Parameter(torch.empty(heads, width))
        self.attend_dst = nn.Parameter(torch.empty(heads, width))
        self.bias = nn.Parameter(torch.zeros(out_dim))
        self.heads, self.average, self.slope, self.p = heads, average, slope, attention_dropout

    @property
    def needs_edge_ids(self) -> bool:
        return self.p > 0

    def message(self, g: Local, h: Tensor) -> Rows:
        x = dense(h, self.weight).unflatten(-1, (self.heads, -1))
        return x, head_scores(x, self.attend_src)

    def forward(self, g: Graph, h: Tensor) -> Tensor:
        src = g.source(self.message, h)
        g, (x,) = g.destinations(src[0])
        dst = (head_scores(x, self.attend_dst),)
        out = g.aggregate(Softmax(self.slope, g.edge_dropout(self.p)), src, dst)
        return (out.mean(1) if self.average else out.flatten(1)) + self.bias


@dataclass(frozen=True, kw_only=True)
class Heads(ModelConfig):
    """Configuration of models with heads. hidden: width of all heads together. Without a decoder, the last layer
    averages `out_heads` heads."""

    heads: Annotated[int, Ge(1), Le(1024)] = 4
    out_heads: Annotated[int, Ge(1), Le(1024)] = 1
    attention_dropout: Probability = 0.0

    def heads_of(self, out_dim: int, index: int) -> tuple[int, bool]:
        """Return the number of heads of a layer, and whether it averages them."""
        if index == self.num_layers - 1 and self.decoder == "none":
            return self.out_heads, True
        if out_dim % self.heads:
            raise ValueError(
                f"model.hidden={out_dim} does not divide into model.heads={self.heads} heads: "
                f"use hidden={-(-out_dim // self.heads) * self.heads}."
            )
        return self.heads, False


@dataclass(frozen=True, kw_only=True)
class GAT(Heads):
    """Configuration of GAT. slope: of the leaky relu of scores."""

    slope: Annotated[float, Ge(0.0)] = 0.2
    activation = F.elu

    def conv(self, in_dim: int, out_dim: int, *, index: int, aggregate_first: bool) -> nn.Module:
        self.only_order("transform_first", "attention scores read the transformed rows")
        heads, average = self.heads_of(out_dim, index)
        return GATConv(
            in_dim, out_dim, heads=heads, average=average, slope=self.slope, attention_dropout=self.attention_dropout
        )
