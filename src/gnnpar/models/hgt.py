"""HGT: attention by types of nodes and edges (Hu et al. 2020, arXiv 2003.01332, equations 2 to 5).

out_i = A_t( gelu( sum_j alpha_ij V_s(x_j) M_r ) ),   alpha_ij = softmax_j( K_s(x_j) W_r . Q_t(x_i) p_r / sqrt(D) )

per head of width D, over the in-edges of all relations. s and t are the types of nodes j and i, r is the type of the
edge. K, Q, V and A are dense layers per node type. W_r, M_r [D, D] and p_r are per head and edge type. Where widths are
equal, the layer mixes in its input: sigmoid(skip_t) out_i + (1 - sigmoid(skip_t)) x_i. PyG's HGTConv is the same.

Keys and values are sent once for all relations, 2 F elements per row; the destination multiplies them by the matrices
of each edge's relation.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated

import torch
import torch.nn.functional as F
from annotated_types import Ge, Le
from torch import Tensor, nn

from gnnpar.folds.block import Rows
from gnnpar.folds.generic import Generic
from gnnpar.graph import Graph, Local
from gnnpar.models.gnn import Probability
from gnnpar.models.rgcn import Typed, by_relation, glorot_uniform


def value(src: Rows, dst: Rows, edge: Rows, shared: Rows) -> Tensor:
    """Return the values. Shapes: keys and values [e, H, D], types [e], matrices [H, R, D, D] -> [e, H, D]."""
    return by_relation(src[1].transpose(0, 1), edge[0], shared[1]).transpose(0, 1)


def score(src: Rows, dst: Rows, edge: Rows, shared: Rows) -> Tensor:
    """Return the scores. Shapes: as `value`, queries [e, H, D], priors [H, R] -> [e, H]."""
    keys = by_relation(src[0].transpose(0, 1), edge[0], shared[0]).transpose(0, 1)
    return (keys * dst[0]).sum(-1) * shared[2].t()[edge[0]] / math.sqrt(keys.shape[2])


class TypedLinear(nn.Module):
    """A dense layer per node type. Shapes: [N, F], one-hot types [N, T] -> [N, F']. A single type needs no `types`."""

    def __init__(self, types: int, in_dim: int, out_dim: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(glorot_uniform(types, in_dim, out_dim))
        self.bias = nn.Parameter(torch.zeros(types, out_dim))

    def forward(self, x: Tensor, kinds: Tensor | None) -> Tensor:
        if kinds is None:
            return x @ self.weight[0] + self.bias[0]
        out = kinds @ self.bias
        for t, weight in enumerate(self.weight.unbind(0)):
            out = out + kinds[:, t : t + 1] * (x @ weight)
        return out


class HGTConv(nn.Module):
    def __init__(self, config: HGT, in_dim: int, out_dim: int) -> None:
        super().__init__()
        width, heads, kinds, relations = config.hidden, config.heads, config.num_node_types, config.relations
        side = width // heads
        self.key, self.query, self.value = (TypedLinear(kinds, in_dim, width) for _ in range(3))
        self.out = TypedLinear(kinds, width, out_dim)
        self.attend = nn.Parameter(glorot_uniform(heads, relations, side, side))
        self.pass_on = nn.Parameter(glorot_uniform(heads, relations, side, side))
        self.prior = nn.Parameter(torch.ones(heads, relations))
        self.skip = nn.Parameter(torch.ones(kinds)) if in_dim == out_dim else None
        self.heads, self.relations, self.p = heads, relations, config.attention_dropout
        self.needs_edge_ids = self.p > 0

    def message(self, g: Local, h: Tensor, kinds: Tensor | None = None) -> Rows:
        return tuple(layer(h, kinds).unflatten(-1, (self.heads, -1)) for layer in (self.key, self.value))

    def forward(self, g: Graph, h: Tensor, kinds: Tensor | None = None) -> Tensor:
        rows = (h,) if kinds is None else (h, kinds)
        src = g.source(self.message, *rows)
        g, (h, *kept) = g.destinations(*rows)
        kinds = kept[0] if kept else None
        queries = self.query(h, kinds).unflatten(-1, (self.heads, -1))
        fold = Generic(value=value, score=score, dropout=g.edge_dropout(self.p), types=self.relations, by_heads=True)
        out = g.aggregate(fold, src, (queries,), (), (self.attend, self.pass_on, self.prior))
        out = self.out(F.gelu(out.flatten(1)), kinds)
        if self.skip is None:
            return out
        gate = self.skip.sigmoid() if kinds is None else (kinds @ self.skip.sigmoid())[:, None]
        return gate * out + (1 - gate) * h


@dataclass(frozen=True, kw_only=True)
class HGT(Typed):
    """Configuration of HGT. hidden: width of all heads together. num_node_types: number of one-hot columns at the end
    of the features that give the node's type, as in the features of a HeteroData; 1: all nodes are of one type."""

    heads: Annotated[int, Ge(1), Le(1024)] = 4
    attention_dropout: Probability = 0.0
    num_node_types: Annotated[int, Ge(1), Le(10_000)] = 1
    activation = nn.Identity()

    @property
    def matrices(self) -> float:
        return 4.0 * self.num_node_types

    @property
    def square_matrices(self) -> float:
        return 2 * self.relations / self.heads

    @property
    def carried_columns(self) -> int:
        return self.num_node_types if self.num_node_types > 1 else 0

    def conv(self, in_dim: int, out_dim: int, *, index: int, aggregate_first: bool) -> nn.Module:
        self.only_order("transform_first", "attention scores read the transformed rows")
        if self.hidden % self.heads:
            raise ValueError(
                f"model.hidden={self.hidden} does not divide into model.heads={self.heads} heads: "
                f"use hidden={-(-self.hidden // self.heads) * self.heads}."
            )
        return HGTConv(self, in_dim, out_dim)
