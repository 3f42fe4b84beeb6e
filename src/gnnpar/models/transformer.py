"""Graph transformer: attention among in-neighbours, q_i . (k_j + W e_ij) / sqrt(D) (Shi et al. 2021, equations 3 to 5).

Y = sum_j softmax_j(score_ij) (v_j + W e_ij) + W_skip x_i per head, or a gate between the two terms.

A row e_ij is never multiplied by W: q . W e is (q W) . e, and the sum of a_j W e_j is W times the sum of a_j e_j. An
edge thus costs as many elements as it has attributes.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Unpack

import torch
from torch import Tensor, nn

from gnnpar.folds.block import Rows
from gnnpar.folds.softmax import SoftmaxDot
from gnnpar.graph import Graph, Local
from gnnpar.models.gat import Headed, HeadedConv, Heads
from gnnpar.models.gnn import ReadsAttributes, attributes
from gnnpar.models.initial import Linear


def attend(g: Graph, src: Rows, query: Tensor, edge: Rows, matrix: Tensor | None, p: float) -> Tensor:
    """Return sum_j softmax_j(q_i . (k_j + W e_ij) / sqrt(D)) (v_j + W e_ij). p: attention dropout.

    Shapes: src (k, v), [M, H, D] each, query [N, H, D], edge (e [E, A],) with matrix [H D, A], or () -> [N, H, D].
    """
    heads, width = query.shape[1:]
    query = query / math.sqrt(width)
    fold = SoftmaxDot(g.edge_dropout(p), bool(edge), any(rows.requires_grad for rows in edge))
    if matrix is None:
        return g.aggregate(fold, src, (query,))
    matrices = matrix.unflatten(0, (heads, width))
    out = g.aggregate(fold, src, (query, torch.einsum("nhd,hda->nha", query, matrices)), edge)
    values, sums = out.split([width, matrix.shape[1]], dim=-1)
    return values + torch.einsum("nha,hda->nhd", sums, matrices)


class TransformerConv(HeadedConv):
    """A graph transformer layer. Keys have no bias, since it would cancel in the softmax."""

    def __init__(self, in_dim: int, out_dim: int, *, gated: bool, edge_dim: int, **headed: Unpack[Headed]) -> None:
        super().__init__(out_dim, **headed)
        inner = self.heads * self.width
        self.key = Linear(in_dim, inner, bias=False)
        self.query = Linear(in_dim, inner)
        self.value = Linear(in_dim, inner)
        self.skip = Linear(in_dim, out_dim)
        self.gate = Linear(3 * out_dim, 1, bias=False) if gated else None
        self.edges = Linear(edge_dim, inner, bias=False) if edge_dim else None
        self.edge_dim = edge_dim
        self.needs_edge_ids = self.p > 0 or edge_dim > 0

    def message(self, g: Local, h: Tensor) -> Rows:
        return self.by_head(self.key(h)), self.by_head(self.value(h))

    def forward(self, g: Graph, h: Tensor) -> Tensor:
        src, edge = g.source(self.message, h), attributes(g, self.edge_dim)
        g, (h,) = g.destinations(h)
        matrix = None if self.edges is None else self.edges.weight
        out = attend(g, src, self.by_head(self.query(h)), edge, matrix, self.p)
        out, own = self.joined(out), self.skip(h).to(out.dtype)
        if self.gate is None:
            return out + own
        return torch.lerp(out, own, self.gate(torch.cat([out, own, out - own], dim=1)).to(out.dtype).sigmoid())


@dataclass(frozen=True, kw_only=True)
class Transformer(Heads, ReadsAttributes):
    """Configuration of the graph transformer. beta: combine attention and the node's own row by a gate, not a sum."""

    beta: bool = True

    def conv(self, in_dim: int, out_dim: int, *, index: int, aggregate_first: bool) -> nn.Module:
        self.only_order("transform_first", "attention reads the transformed rows")
        return TransformerConv(
            in_dim, out_dim, gated=self.beta, edge_dim=self.edge_dim or 0, **self.headed(out_dim, index)
        )
