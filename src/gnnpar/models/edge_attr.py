"""What models that read rows of attributes of edges share."""

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
    """`edge_dim`: the width of edge_attr; None: that of the dataset's. 0: edges have none, and layers do without."""

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
    """Edge operands: the attributes of the in-edges, or none where `width` is 0. Shapes: ([E, width],)."""
    if not width:
        return ()
    if g.edge_attr is None or g.edge_attr.shape[1] != width:
        has = "none" if g.edge_attr is None else f"rows of {g.edge_attr.shape[1]}"
        raise ValueError(f"the model reads {width} attributes of each edge, and the graph has {has}")
    return (g.edge_attr,)
