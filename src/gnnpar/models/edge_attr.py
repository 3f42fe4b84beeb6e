"""Shared parts of models that read edge attributes."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Annotated, Self

from annotated_types import Ge, Le

from gnnpar.folds.block import Rows
from gnnpar.folds.edge_data import EdgeKind, EdgeSizes
from gnnpar.graph import Graph
from gnnpar.models.gnn import ModelConfig


@dataclass(frozen=True, kw_only=True)
class ReadsAttributes(ModelConfig):
    """Configuration of a model that reads edge attributes. edge_dim: width of edge_attr. None: that of the dataset. 0:
    layers without edge attributes."""

    edge_dim: Annotated[int, Ge(0), Le(1_000_000)] | None = None

    @property
    def edge_data(self) -> frozenset[EdgeKind]:
        return frozenset({"attr"})

    def on(self, sizes: EdgeSizes) -> Self:
        if self.edge_dim not in (None, sizes.attr):
            raise ValueError(
                f"model.edge_dim={self.edge_dim}, but edge_attr of the dataset has width {sizes.attr}; set it to null"
            )
        return replace(self, edge_dim=sizes.attr)


def attributes(g: Graph, width: int) -> Rows:
    """Return the edge operands: attributes of the in-edges, empty if `width` is 0. Shapes: ([E, width],)."""
    if not width:
        return ()
    if g.edge_attr is None or g.edge_attr.shape[1] != width:
        has = "none" if g.edge_attr is None else f"rows of {g.edge_attr.shape[1]}"
        raise ValueError(f"the model reads {width} attributes of each edge, and the graph has {has}")
    return (g.edge_attr,)
