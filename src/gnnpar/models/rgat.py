"""RGAT: Y_i = sum_j alpha_ij x_j W_r + b, with r the type of edge j -> i (Busbridge et al. 2019, arXiv 1904.05811).

alpha_ij = softmax_j(leaky_relu(x_i W_r Q + x_j W_r K)) per head, over all in-edges of a row (across relations, equation
9) or over the in-edges of one type (within relations, equation 8). The scores are the additive ones of section 2, over
the rows of all heads, as in PyG's RGATConv: the paper has a query and a key per relation and head, here they are
products of W_r with Q and K. There is no self term; model.residual adds one.

A row is sent once for all relations; the destination multiplies it by the matrix of each edge's relation.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Annotated, Literal

import torch
import torch.nn.functional as F
from annotated_types import Ge
from torch import Tensor, nn

from gnnpar.folds.block import Rows
from gnnpar.folds.generic import Generic
from gnnpar.graph import Graph, unchanged
from gnnpar.models.gat import HeadedConv, Heads
from gnnpar.models.rgcn import Matrices, Relational, by_relation


def value(src: Rows, dst: Rows, edge: Rows, shared: Rows) -> Tensor:
    """Return the values. Shapes: rows [e, F], types [e], matrices [R, F, H D] and of keys [R, F, H] -> [e, H, D]."""
    matrices, keys = shared
    return by_relation(src[0], edge[0], matrices).unflatten(-1, (keys.shape[2], -1))


def score(src: Rows, dst: Rows, edge: Rows, shared: Rows, *, slope: float) -> Tensor:
    """Return the scores. Shapes: as `value`, queries of each relation [e, R, H] -> [e, H]."""
    types = edge[0]
    query = dst[0].gather(1, types[:, None, None].expand(-1, 1, dst[0].shape[2])).squeeze(1)
    return F.leaky_relu(query + by_relation(src[0], types, shared[1]), slope)


class RGATConv(HeadedConv):
    glorot = ("query", "key")

    def __init__(self, config: RGAT, in_dim: int, out_dim: int, *, index: int) -> None:
        super().__init__(out_dim, **config.headed(out_dim, index))
        heads, width = self.heads, self.heads * self.width
        self.neighbours, self.mixing = Matrices.drawn(config, in_dim, width)
        self.query = nn.Parameter(torch.empty(width, heads))
        self.key = nn.Parameter(torch.empty(width, heads))
        self.bias = nn.Parameter(torch.zeros(out_dim))
        self.slope, self.relations, self.within = config.slope, config.relations, config.attention == "within"

    def forward(self, g: Graph, h: Tensor) -> Tensor:
        src = g.source(unchanged, h)
        g, (h,) = g.destinations(h)
        matrices = self._matrices()
        queries = (h @ (matrices @ self.query).transpose(0, 1).flatten(1)).unflatten(-1, (self.relations, -1))
        fold = Generic(
            value=value,
            score=partial(score, slope=self.slope),
            dropout=g.edge_dropout(self.p),
            types=self.relations,
            within=self.within,
        )
        out = g.aggregate(fold, src, (queries,), (), (matrices, matrices @ self.key))
        out = out.sum(1) if self.within else out
        return self.joined(out) + self.bias

    def _matrices(self) -> Tensor:
        """Return the matrices of relations, [R, F, H D]."""
        if self.mixing is not None:
            return torch.tensordot(self.mixing, self.neighbours, 1)
        if self.neighbours.dim() == 4:
            return torch.stack([torch.block_diag(*blocks) for blocks in self.neighbours.unbind(0)])
        return self.neighbours


@dataclass(frozen=True, kw_only=True)
class RGAT(Heads, Relational):
    """Configuration of RGAT: the fields of Heads and Relational. attention: softmax over the in-edges of all relations,
    or of each. slope: of the leaky relu of scores."""

    attention: Literal["across", "within"] = "across"
    slope: Annotated[float, Ge(0.0)] = 0.2
    activation = F.elu

    @property
    def matrices(self) -> float:
        return super().matrices * (self.out_heads if self.decoder == "none" else 1)

    def conv(self, in_dim: int, out_dim: int, *, index: int, aggregate_first: bool) -> nn.Module:
        self.only_order("aggregate_first", "a row travels once for all relations, each of which has a matrix")
        return RGATConv(self, in_dim, out_dim, index=index)
