"""adj_t in the place of edge_index: the same edges, whichever sparse matrix holds them."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch_geometric.data import Data
from torch_geometric.transforms import ToSparseTensor

from data.samples import raw_graph
from gnnpar.data.preprocess import Preprocess, prepare
from gnnpar.data.raw import edge_list_of, edges_of

EDGES = torch.tensor([[0, 2, 3, 3, 4], [1, 1, 0, 4, 2]])  # directed: a transposed reading gives other edges


def matrix(kind: str, value: Tensor | None = None) -> Any:
    if kind == "SparseTensor":
        sparse = pytest.importorskip("torch_sparse", reason="the extra [sparse] is not installed")
        return sparse.SparseTensor(row=EDGES[1], col=EDGES[0], value=value, sparse_sizes=(5, 5))
    weights = torch.ones(EDGES.shape[1]) if value is None else value
    coo = torch.sparse_coo_tensor(EDGES.flip(0), weights, (5, 5))
    return {"coo": coo, "csr": coo.to_sparse_csr(), "csc": coo.to_sparse_csc()}[kind]


def as_set(edge_index: Tensor) -> set[tuple[int, ...]]:
    return set(map(tuple, edge_index.T.tolist()))


KINDS = ["SparseTensor", "coo", "csr", "csc"]


@pytest.mark.parametrize("kind", KINDS)
def test_rows_are_destinations(kind: str) -> None:
    found, data = edge_list_of(matrix(kind))
    assert not data.tensors
    assert (found.dtype, found.shape) == (torch.int64, EDGES.shape)
    assert as_set(found) == as_set(EDGES)
    found, data = edge_list_of(matrix(kind, torch.ones(5)))
    assert as_set(found) == as_set(EDGES)
    assert not data.tensors, "ones are no weights"
    assert edge_list_of(EDGES).edge_index is EDGES


def test_repeated_edges_of_a_coo_matrix_stay() -> None:
    given = torch.sparse_coo_tensor(torch.tensor([[1, 1], [0, 0]]), torch.tensor([2.0, 3.0]), (5, 5))
    edges, data = edge_list_of(given)
    assert edges.tolist() == [[0, 0], [1, 1]]
    assert data.weight is not None
    assert data.weight.tolist() == [2.0, 3.0]
    assert not given.is_coalesced()


def test_what_pyg_makes_of_a_graph_comes_back() -> None:
    layout: Any = torch.sparse_csr  # PyG's own annotation says int
    data = ToSparseTensor(layout=layout)(Data(edge_index=EDGES, num_nodes=5))
    assert "edge_index" not in data
    assert as_set(edges_of(data).edge_index) == as_set(EDGES)
    with pytest.raises(ValueError, match="Data has neither edge_index nor adj_t"):
        edges_of(Data(x=torch.zeros(5, 2)))


def test_a_raw_graph_takes_it() -> None:
    graphs = (EDGES, matrix("csr"), matrix("coo"))
    five: dict[str, Any] = {"x": torch.zeros(5, 2), "y": torch.arange(5), "masks": torch.eye(3, 5).bool().unbind()}
    assert len({prepare(raw_graph(edge_index=g, **five), Preprocess(), seed=0).graph_hash for g in graphs}) == 1


@pytest.mark.parametrize("kind", KINDS)
def test_values_are_weights(kind: str) -> None:
    values = torch.tensor([1.0, 0.5, 0.25, 4.0, 3.0])
    edges, data = edge_list_of(matrix(kind, values))
    assert data.weight is not None
    found = zip(*edges.tolist(), data.weight.tolist(), strict=True)
    assert set(found) == set(zip(*EDGES.tolist(), values.tolist(), strict=True))


@pytest.mark.parametrize(
    ("given", "line"),
    [
        (torch.zeros(3, 4).to_sparse_csr(), r"adj_t is \[3, 4\]; it must be \[nodes, nodes\]"),
        (torch.zeros(2, 2, 2).to_sparse(), r"adj_t is \[2, 2, 2\]; it must be \[nodes, nodes\]"),
        ([[0, 1], [1, 0]], r"the graph is a list; give an edge_index \[2, E\], or an adj_t"),
    ],
)
def test_what_is_no_adjacency_is_one_line(given: Any, line: str) -> None:
    with pytest.raises(ValueError, match=line):
        edge_list_of(given)
