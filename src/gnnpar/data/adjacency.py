"""Graphs given as a transposed adjacency matrix: PyG's `adj_t`, of ToSparseTensor or OGB, instead of `edge_index`.

Row i of `adj_t` lists the sources of i's in-edges, so it is read as (row = destination, column = source). It is a
torch_sparse.SparseTensor, or a tensor in one of torch's sparse layouts. Its values are edge weights.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from gnnpar.folds.edge_data import EdgeData


class EdgeList(NamedTuple):
    """Edges (sources, destinations) [2, E] and their data."""

    edge_index: Tensor
    data: EdgeData = EdgeData()


def edges_of(data: object) -> EdgeList:
    """Return the edges of a PyG `Data`: edge_index, else adj_t, with edge_weight, edge_type and edge_attr."""
    names = ("edge_index", "adj_t", "edge_weight", "edge_type", "edge_attr")
    edge_index, adj_t, *held = (getattr(data, name, None) for name in names)  # PyG's Data or the like
    graph = adj_t if edge_index is None else edge_index
    if graph is None:
        raise ValueError(f"{type(data).__name__} has neither edge_index nor adj_t; give it one of them")
    edges = edge_list_of(graph)
    weight, kind, attr = (value if isinstance(value, Tensor) else None for value in held)
    weight = edges.data.weight if weight is None else _flat(weight)
    return EdgeList(edges.edge_index, EdgeData(weight=weight, type=kind, attr=attr))


def edge_list_of(given: Any) -> EdgeList:  # Any: a tensor, or a SparseTensor, which has no types
    """Return the edges of an edge_index, unchanged, or of an adj_t; its values are weights unless all are 1."""
    if isinstance(given, Tensor) and given.layout == torch.strided:
        return EdgeList(given)
    from torch_geometric.typing import SparseTensor  # pyright: ignore[reportAttributeAccessIssue]
    from torch_geometric.utils import to_edge_index

    if not isinstance(given, Tensor | SparseTensor):
        raise ValueError(f"the graph is a {type(given).__name__}; give an edge_index [2, E], or an adj_t")
    shape = list(given.shape if isinstance(given, Tensor) else given.sizes())
    if len(shape) != 2 or shape[0] != shape[1]:
        raise ValueError(f"adj_t is {shape}; it must be [nodes, nodes]")
    # PyG marks a COO matrix as coalesced, which keeps repeated edges; detach leaves the caller's unchanged
    (rows, columns), values = to_edge_index(given.detach())
    weight = None if bool((values == 1).all()) else _flat(values)
    return EdgeList(torch.stack([columns, rows]), EdgeData(weight=weight))


def _flat(weight: Tensor) -> Tensor:
    return weight[:, 0] if weight.ndim == 2 and weight.shape[1] == 1 else weight
