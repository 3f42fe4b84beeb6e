"""Graphs given as a transposed adjacency matrix: PyG's `adj_t`, of ToSparseTensor or OGB, instead of `edge_index`.

Row i of `adj_t` lists the sources of i's in-edges, so it is read as (row = destination, column = source). It is a
torch_sparse.SparseTensor, known by its method `csr` (nothing is imported), or a tensor in one of torch's sparse
layouts. Its values are weights of edges.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol, runtime_checkable

import torch
from torch import Tensor

from gnnpar.folds.edge_data import EdgeData

_COMPRESSED = (torch.sparse_csr, torch.sparse_csc)


@runtime_checkable
class _SparseTensor(Protocol):
    """torch_sparse's, which need not be installed."""

    def csr(self) -> tuple[Tensor, Tensor, Tensor | None]: ...
    def sizes(self) -> list[int]: ...


class EdgeList(NamedTuple):
    """Edges (sources, destinations) [2, E] and what they carry."""

    edge_index: Tensor
    data: EdgeData = EdgeData()


def edges_of(data: object) -> EdgeList:
    """Of a PyG `Data`: its edge_index, else its adj_t, with edge_weight, edge_type and edge_attr."""
    names = ("edge_index", "adj_t", "edge_weight", "edge_type", "edge_attr")
    edge_index, adj_t, *held = (getattr(data, name, None) for name in names)  # PyG's, or whatever else has them
    graph = adj_t if edge_index is None else edge_index
    if graph is None:
        raise ValueError(f"{type(data).__name__} has neither edge_index nor adj_t; give it one of them")
    edges = edge_list_of(graph)
    weight, kind, attr = (value if isinstance(value, Tensor) else None for value in held)
    weight = edges.data.weight if weight is None else _flat(weight)
    return EdgeList(edges.edge_index, EdgeData(weight=weight, type=kind, attr=attr))


def edge_list_of(given: object) -> EdgeList:
    """The edges of an edge_index, which stays as it is, or of an adj_t, whose values are weights unless all are 1."""
    if isinstance(given, Tensor) and given.layout == torch.strided:
        return EdgeList(given)
    rows, columns, values, shape = _entries(given)
    if len(shape) != 2 or shape[0] != shape[1]:
        raise ValueError(f"adj_t is {list(shape)}; it must be [nodes, nodes]")
    edge_index = torch.stack([columns.long(), rows.long()])
    weight = None if values is None or bool((values == 1).all()) else _flat(values)
    return EdgeList(edge_index, EdgeData(weight=weight))


def _flat(weight: Tensor) -> Tensor:
    return weight[:, 0] if weight.ndim == 2 and weight.shape[1] == 1 else weight


def _entries(given: object) -> tuple[Tensor, Tensor, Tensor | None, tuple[int, ...]]:
    """(rows, columns, values, shape) of a sparse matrix."""
    if not isinstance(given, Tensor):
        if not isinstance(given, _SparseTensor):
            raise ValueError(f"the graph is a {type(given).__name__}; give an edge_index [2, E], or an adj_t")
        ends, columns, values = given.csr()
        return _expanded(ends), columns, values, tuple(given.sizes()[:2])
    shape = tuple(given.shape)
    if given.layout in _COMPRESSED and len(shape) == 2:
        if given.layout == torch.sparse_csr:
            return _expanded(given.crow_indices()), given.col_indices(), given.values(), shape
        return given.row_indices(), _expanded(given.ccol_indices()), given.values(), shape
    if given.layout == torch.sparse_coo and given.sparse_dim() == 2:
        rows, columns = given._indices()  # not coalesced: repeated edges stay, with their own values
        return rows, columns, given._values(), shape
    raise ValueError(f"adj_t is {list(shape)} in layout {given.layout}; give a SparseTensor, CSR, CSC or COO matrix")


def _expanded(ends: Tensor) -> Tensor:
    """CSR's row pointers -> the row of every entry."""
    return torch.arange(len(ends) - 1, device=ends.device).repeat_interleave(ends.diff())
