"""R-GCN: Y = X W_root + sum_r D_r^-1 A_r X W_r + b, A_r the edges of type r (Schlichtkrull et al. 2018, equation 2).
W_r is a free matrix, a sum of bases, W_r = sum_b a_rb V_b (equation 3), or block-diagonal (equation 4)."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Annotated, NamedTuple, Self

import torch
from annotated_types import Ge, Le
from torch import Tensor, nn

from gnnpar.files import require_memory
from gnnpar.folds.block import sorted_by_kind
from gnnpar.folds.edge_data import EdgeSizes
from gnnpar.folds.sum import Sum
from gnnpar.graph import Graph, unchanged
from gnnpar.models.gnn import ModelConfig
from gnnpar.models.initial import Linear


def by_relation(rows: Tensor, types: Tensor, weight: Tensor) -> Tensor:
    """Return rows_e W_r, where r is the type of row e, by one product per type. Shapes: rows [..., e, F], types [e],
    weight [..., R, F, F'] -> [..., e, F']."""
    at = rows.ndim - 2
    if weight.shape[at] == 1:
        return rows @ weight.select(at, 0)
    if not rows.shape[at]:  # in a shape trace, `types` is empty too
        return rows.new_zeros(*rows.shape[:-1], weight.shape[-1])
    order, sizes = sorted_by_kind(types, weight.shape[at])
    parts = rows.index_select(at, order).split(sizes, at)
    products = torch.cat([part @ each for part, each in zip(parts, weight.unbind(at), strict=True)], at)
    return torch.empty_like(products).index_copy(at, order, products)


def relational_product(rows: Tensor, weight: Tensor, mixing: Tensor | None = None) -> Tensor:
    """Return sum_r rows_r W_r, as one matrix product for all relations. Shapes: rows [N, R, F]; weight [R, F, F'] of
    free matrices, [B, F, F'] of bases with mixing [R, B], or of blocks [R, C, F / C, F' / C] -> [N, F']."""
    if weight.dim() == 4:
        parts = rows.split(weight.shape[2], dim=2)
        return torch.cat(
            [part.flatten(1) @ each.flatten(0, 1) for part, each in zip(parts, weight.unbind(1), strict=True)], dim=1
        )
    matrices = weight.flatten(1) if mixing is None else mixing @ weight.flatten(1)
    return rows.flatten(1) @ matrices.view(-1, weight.shape[2])


class Matrices(NamedTuple):
    """Matrices of R relations. weight: free matrices [R, F, F'], bases [B, F, F'], or blocks [R, C, F / C, F' / C].
    mixing: [R, B] for bases, else None."""

    weight: nn.Parameter
    mixing: nn.Parameter | None

    @staticmethod
    def drawn(config: Relational, in_dim: int, out_dim: int) -> Matrices:
        """Draw initial matrices. ValueError if `num_blocks` does not divide both widths."""
        relations, bases, blocks = config.relations, config.num_bases, config.num_blocks
        shape = (relations if bases is None else bases, in_dim, out_dim)
        if blocks is not None:
            if in_dim % blocks or out_dim % blocks:
                raise ValueError(
                    f"model.num_blocks={blocks} does not divide the widths of a layer, {in_dim} and {out_dim}; choose "
                    "a divisor of both, or set model.encoder=linear and model.decoder=linear"
                )
            shape = (relations, blocks, in_dim // blocks, out_dim // blocks)
        numbers = math.prod(shape) + relations * (bases or 0)
        require_memory(4 * numbers, f"a layer of {relations} types of edges", "give fewer types, bases or columns")
        weight = nn.Parameter(glorot_uniform(*shape))
        return Matrices(weight, None if bases is None else nn.Parameter(glorot_uniform(relations, bases)))


class RGCNConv(nn.Module):
    """An R-GCN layer. The mean per relation is a sum by edge type, divided by the global in-degrees of that type."""

    degree_powers = (-1.0, 0.0)

    def __init__(self, config: Relational, in_dim: int, out_dim: int) -> None:
        super().__init__()
        self.own = Linear(in_dim, out_dim)
        self.neighbours, self.mixing = Matrices.drawn(config, in_dim, out_dim)
        self.relations = config.relations

    def forward(self, g: Graph, h: Tensor) -> Tensor:
        src = g.source(unchanged, h)
        g, (h,) = g.destinations(h)
        degree = g.type_degree(self.relations).clamp_min(1)
        means = g.aggregate(Sum(types=self.relations), src) * degree.reciprocal()[..., None]  # 0 without in-edges
        return self.own(h) + relational_product(means, self.neighbours, self.mixing)


def glorot_uniform(*shape: int) -> Tensor:
    """Draw matrices [..., in, out], each Glorot-uniform."""
    limit = math.sqrt(6 / (shape[-2] + shape[-1]))
    return torch.empty(*shape).uniform_(-limit, limit)


@dataclass(frozen=True, kw_only=True)
class Typed(ModelConfig):
    """Configuration with edge types. num_relations: number of types; None: that of the dataset, 1 if it has none."""

    num_relations: Annotated[int, Ge(1), Le(10_000)] | None = None
    edge_data = frozenset({"type"})

    @property
    def relations(self) -> int:
        """Number of edge types, 1 if not known."""
        return self.num_relations or 1

    def on(self, sizes: EdgeSizes) -> Self:
        relations = self.num_relations or max(1, sizes.types)
        if sizes.types > relations:
            raise ValueError(
                f"model.num_relations={relations}, but the edges of the dataset have {sizes.types} types; set it to "
                "null, or to as many"
            )
        return replace(self, num_relations=relations)


@dataclass(frozen=True, kw_only=True)
class Relational(Typed):
    """Configuration with matrices per relation. At most one of `num_bases` (the matrices are sums of bases) and
    `num_blocks` (blocks on their diagonals)."""

    num_bases: Annotated[int, Ge(1)] | None = None
    num_blocks: Annotated[int, Ge(1)] | None = None

    def __post_init__(self) -> None:
        if self.num_bases is not None and self.num_blocks is not None:
            raise ValueError(
                f"model.num_bases={self.num_bases} and model.num_blocks={self.num_blocks} exclude each other; leave "
                "one of them null"
            )

    @property
    def matrices(self) -> float:
        return 1 + (self.num_bases or self.relations / (self.num_blocks or 1))


@dataclass(frozen=True, kw_only=True)
class RGCN(Relational):
    """Configuration of R-GCN, with the fields of Relational."""

    def conv(self, in_dim: int, out_dim: int, *, index: int, aggregate_first: bool) -> nn.Module:
        self.only_order("aggregate_first", "a row travels once for all relations, each of which has a matrix")
        return RGCNConv(self, in_dim, out_dim)
