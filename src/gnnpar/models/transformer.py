"""Graph transformer: attention among in-neighbours, q_i . (k_j + W e_ij) / sqrt(D) (Shi et al. 2021, equations 3 to 5).

Y = sum_j softmax_j(score_ij) (v_j + W e_ij) + W_skip x_i per head, or a gate between the two terms.

A row e_ij is never multiplied by W: q . W e is (q W) . e, and the sum of a_j W e_j is W times the sum of a_j e_j. An
edge thus costs as many elements as it has attributes.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from gnnpar.folds.block import Rows
from gnnpar.folds.generic import Generic
from gnnpar.graph import Graph, Local
from gnnpar.models.edge_attr import ReadsAttributes, attributes
from gnnpar.models.gat import Heads
from gnnpar.models.initial import Linear


def score(src: Rows, dst: Rows, edge: Rows, shared: Rows) -> Tensor:
    """Return the scores. Shapes: keys, queries [e, H, D], attribute queries [e, H, A], attributes [e, A] -> [e, H]."""
    alike = (src[0] * dst[0]).sum(-1)
    return alike + (dst[1] * edge[0][:, None]).sum(-1) if edge else alike


def value(src: Rows, dst: Rows, edge: Rows, shared: Rows) -> Tensor:
    """Return the source's value and, beside it, the edge attributes. Shapes: [e, H, D], [e, A] -> [e, H, D + A]."""
    if not edge:
        return src[1]
    return torch.cat([src[1], edge[0][:, None].expand(-1, src[1].shape[1], -1)], dim=-1)


class TransformerConv(nn.Module):
    """A graph transformer layer. Keys have no bias, since it would cancel in the softmax."""

    def __init__(
        self,
        in_dim: int,
        out_dim: int,
        *,
        heads: int,
        average: bool,
        attention_dropout: float,
        gated: bool,
        edge_dim: int,
    ) -> None:
        super().__init__()
        width = out_dim if average else out_dim // heads
        self.key = Linear(in_dim, heads * width, bias=False)
        self.query = Linear(in_dim, heads * width)
        self.value = Linear(in_dim, heads * width)
        self.skip = Linear(in_dim, out_dim)
        self.gate = Linear(3 * out_dim, 1, bias=False) if gated else None
        self.edges = Linear(edge_dim, heads * width, bias=False) if edge_dim else None
        self.heads, self.average, self.p, self.edge_dim = heads, average, attention_dropout, edge_dim

    @property
    def needs_edge_ids(self) -> bool:
        return self.p > 0 or self.edge_dim > 0

    def message(self, g: Local, h: Tensor) -> Rows:
        return self._by_head(self.key(h)), self._by_head(self.value(h))

    def forward(self, g: Graph, h: Tensor) -> Tensor:
        src, edge = g.source(self.message, h), attributes(g, self.edge_dim)
        g, (h,) = g.destinations(h)
        query = self._by_head(self.query(h))
        width = query.shape[-1]
        query = query / math.sqrt(width)
        dst, matrices = (query,), None
        if self.edges is not None:
            matrices = self.edges.weight.unflatten(0, (self.heads, width))
            dst = (query, torch.einsum("nhd,hda->nha", query, matrices))
        fold = Generic(value=value, score=score, dropout=g.edge_dropout(self.p), by_heads=not edge)
        out = g.aggregate(fold, src, dst, edge)
        if matrices is not None:
            out, sums = out.split([width, self.edge_dim], dim=-1)
            out = out + torch.einsum("nha,hda->nhd", sums, matrices)
        out, own = out.mean(1) if self.average else out.flatten(1), self.skip(h).to(out.dtype)
        if self.gate is None:
            return out + own
        return torch.lerp(out, own, self.gate(torch.cat([out, own, out - own], dim=1)).to(out.dtype).sigmoid())

    def _by_head(self, rows: Tensor) -> Tensor:
        return rows.unflatten(-1, (self.heads, -1))


@dataclass(frozen=True, kw_only=True)
class Transformer(Heads, ReadsAttributes):
    """Configuration of the graph transformer. beta: combine attention and the node's own row by a gate, not a sum."""

    beta: bool = True

    def conv(self, in_dim: int, out_dim: int, *, index: int, aggregate_first: bool) -> nn.Module:
        self.only_order("transform_first", "attention reads the transformed rows")
        heads, average = self.heads_of(out_dim, index)
        return TransformerConv(
            in_dim,
            out_dim,
            heads=heads,
            average=average,
            attention_dropout=self.attention_dropout,
            gated=self.beta,
            edge_dim=self.edge_dim or 0,
        )
