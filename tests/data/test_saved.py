"""Graphs of the user's own, .npz, .pt and adj_t: what was saved is loaded, each mistake is one clear line."""

# attributes of torch and PyG, and JSON, have no types here
# pyright: reportArgumentType=false, reportAttributeAccessIssue=false

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import scipy.sparse
import torch
from scipy.sparse import coo_array
from torch import Tensor
from torch_geometric.data import Batch, Data, InMemoryDataset
from torch_geometric.transforms import ToSparseTensor

import gnnpar
from conftest import Run
from data.samples import hetero, npz_arrays, pyg_data, raw_graph
from gnnpar import files
from gnnpar.config.compose import compose
from gnnpar.data import Preprocess, prepare
from gnnpar.data.npz import NPZ
from gnnpar.data.raw import edge_list_of, edges_of
from gnnpar.data.saved import PT, as_data, write_given
from gnnpar.data.saved import raw_graph as raw_of
from gnnpar.parallel.objective import SPLITS
from gnnpar.training.result.result import dataset_name
from outcomes import refused


def saved_npz(folder: Path, **changes: Any) -> str:
    arrays: dict[str, Any] = npz_arrays(**changes)
    np.savez(folder / "my.npz", **arrays)
    return str(folder / "my.npz")


def test_arrays_that_were_saved_are_those_loaded(tmp_path):
    data = NPZ(path=saved_npz(tmp_path)).load(None, 0)
    expected = prepare(raw_graph(), Preprocess(), seed=0)
    assert (data.graph_hash, data.split_hash, data.task) == (expected.graph_hash, expected.split_hash, "single_label")
    assert NPZ(path="my.npz").load(tmp_path, 0).graph_hash == expected.graph_hash


@pytest.mark.parametrize("dtype", [np.int32, np.uint32, np.uint8, np.int16])
def test_any_integer_type_will_do(tmp_path, dtype):
    path = saved_npz(tmp_path, edge_index=npz_arrays()["edge_index"].astype(dtype), y=npz_arrays()["y"].astype(dtype))
    assert NPZ(path=path).load(None, 0).graph_hash == prepare(raw_graph(), Preprocess(), seed=0).graph_hash


def test_symmetrize_and_missing_masks(tmp_path):
    path = saved_npz(tmp_path, **dict.fromkeys(("train_mask", "val_mask", "test_mask")))
    ends = NPZ(path=path, symmetrize=True, split="random").load(None, 0).edge_index.T.tolist()
    assert sorted(ends) == sorted([b, a] for a, b in ends)
    with pytest.raises(ValueError, match="has no split of its own"):
        NPZ(path=path).load(None, 0)
    only_train = NPZ(path=saved_npz(tmp_path, val_mask=None, test_mask=None)).load(None, 0)
    assert [int(m.sum()) for m in (only_train.train_mask, only_train.val_mask, only_train.test_mask)] == [3, 0, 0]


def test_pairs_numbered_splits_and_binary_labels(tmp_path):
    """The layout of the heterophilous collections: edges [E, 2] undirected, masks [splits, N]."""
    masks: dict[str, Any] = {
        f"{part}_masks": np.roll(np.eye(6, dtype=bool), shift, 0)[:2]
        for shift, part in enumerate(("train", "val", "test"))
    }
    arrays = npz_arrays()
    np.savez(
        tmp_path / "h.npz",
        node_features=arrays["x"],
        node_labels=arrays["y"] % 2,
        edges=np.array([[0, 1], [1, 2], [4, 3]]),
        **masks,
    )
    data = NPZ(path="h.npz", task="binary", split_index=1, self_loops=False).load(tmp_path, 0)
    assert data.edge_index.tolist() == [[1, 0, 2, 1, 4, 3], [0, 1, 1, 2, 3, 4]]
    assert (data.task, data.num_classes, int(data.train_mask.nonzero())) == ("binary", 2, 1)


def test_features_made_from_the_graph(tmp_path):
    path = saved_npz(tmp_path, x=None)
    assert torch.equal(NPZ(path=path, features="identity").load(None, 0).x, torch.eye(6))
    degree = NPZ(path=path, features="degree").load(None, 0).x  # in-degrees 1 1 2 1 0 0 of the file
    assert degree.argmax(1).tolist() == [1, 1, 1, 1, 0, 0]
    with pytest.raises(ValueError, match=r"has no x .it holds .*; add it; or set dataset.features=identity or degree"):
        NPZ(path=path).load(None, 0)


def test_many_columns_of_labels_are_multi_label(tmp_path):
    data = NPZ(path=saved_npz(tmp_path, y=np.eye(6, 4, dtype=np.uint8))).load(None, 0)
    assert (data.task, data.num_classes, data.y.dtype) == ("multi_label", 4, torch.float32)


def spoiled(key: str, place: tuple[int, ...], value: float) -> dict[str, np.ndarray]:
    array = npz_arrays()[key].copy()
    array[place] = value
    return {key: array}


@pytest.mark.parametrize(
    ("content", "line"),
    [
        (b"hello", "cannot be read as .npz"),
        (b"", "cannot be read as .npz"),
        (b"PK\x03\x04cut", "cannot be read as .npz"),
        ({"y": np.array([None] * 6)}, "cannot be read as .npz"),
        ({"y": np.array(list("abcabc"))}, "y has dtype <U1; store numbers"),
        ({"edge_index": None}, "has no edge_index"),
        ({"y": None}, "has no y"),
        (spoiled("x", (3, 1), np.nan), "features hold 1 NaN .*node 3, feature 1"),
        (spoiled("y", (3,), 10**9), "the largest label, 1000000000, gives .*; number the classes"),
        ({"y": np.array([0, 1, 2, 0, 2**63, 2], dtype=np.uint64)}, rf"the number {2**63}, beyond 2\^63"),
        ({"y": np.array([0, 1, 2, 0, 2**64 - 1, 2], dtype=np.uint64)}, rf"the number {2**64 - 1}, beyond 2\^63"),
        ({"edge_color": np.ones(5)}, "dataset npz: it holds edge_color, which models do not read"),
        ({"node_type": np.ones(5)}, "dataset npz: it holds node_type, which models do not read"),
        ({"node_features": npz_arrays()["x"]}, r"has both .* and .*; leave one of them out"),
        ({"train_masks": npz_arrays()["train_mask"]}, r"has both .* and .*; leave one of them out"),
        ({"edges": npz_arrays()["edge_index"].T}, r"has both .* and .*; leave one of them out"),
    ],
)
def test_mistake_in_a_file_is_one_line(tmp_path, content, line):
    if isinstance(content, bytes):
        (tmp_path / "my.npz").write_bytes(content)
    else:
        saved_npz(tmp_path, **content)
    with refused(line):
        NPZ(path="my.npz").load(tmp_path, 0)


@pytest.mark.parametrize(("path", "line"), [(None, "dataset.path is not set"), ("a.npz", "there is no file .*a.npz")])
def test_missing_file_is_one_line(tmp_path, path, line):
    with pytest.raises(ValueError, match=line):
        NPZ(path=path).load(tmp_path, 0)


def test_a_path_with_other_letters_than_ascii_is_read(tmp_path: Path) -> None:
    (folder := tmp_path / "données").mkdir()
    done = gnnpar.train("gcn", saved_npz(folder), strategy="single", epochs=1, folder=tmp_path / "run")
    assert done.result["status"] == "completed"


def test_outputs_beyond_memory_are_refused(run_here: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every node a class of its own: what a model gives for them has the square of their number."""
    ring = np.arange(400)
    masks = {f"{split}_mask": ring % 3 == i for i, split in enumerate(SPLITS)}
    edges = np.stack([ring, np.roll(ring, 1)])
    np.savez(tmp_path / "g.npz", x=np.ones((400, 2), np.float32), y=ring, edge_index=edges, **masks)
    monkeypatch.setattr(files, "memory_bytes", lambda: 24 * 400**2 - 1)
    done = run_here("train", "dataset=npz", "dataset.path=g.npz", "strategy=single", "epochs=1")
    assert done.returncode != 0
    assert "400 nodes of a rank with 400 outputs each needs" in done.stderr


def saved(folder: Path, what: object) -> str:
    torch.save(what, folder / "my.pt")
    return str(folder / "my.pt")


def test_data_that_was_saved_is_that_loaded(tmp_path):
    expected = prepare(raw_graph(), Preprocess(), seed=0)
    found = PT(path=saved(tmp_path, pyg_data())).load(None, 0)
    assert (found.graph_hash, found.split_hash) == (expected.graph_hash, expected.split_hash)
    assert PT(path="my.pt").load(tmp_path, 0).graph_hash == expected.graph_hash, "in data_dir"
    more = PT(path=saved(tmp_path, pyg_data(num_classes=3, title="a graph"))).load(None, 0)
    assert more.graph_hash == expected.graph_hash


def test_a_sparse_adjacency_and_missing_masks(tmp_path):
    raw = raw_graph()
    adj_t = torch.sparse_coo_tensor(raw.edge_index.flip(0), torch.ones(5), (6, 6))
    path = saved(tmp_path, pyg_data(edge_index=None, adj_t=adj_t, val_mask=None, test_mask=None))
    found = PT(path=path).load(None, 0)
    assert torch.equal(found.edge_index, prepare(raw, Preprocess(), seed=0).edge_index)
    assert [int(mask.sum()) for mask in (found.train_mask, found.val_mask, found.test_mask)] == [3, 0, 0]
    with pytest.raises(ValueError, match="has no split of its own"):
        PT(path=saved(tmp_path, pyg_data(train_mask=None, val_mask=None, test_mask=None))).load(None, 0)


TRAIN = torch.arange(6) < 3


@pytest.mark.parametrize(
    ("what", "line"),
    [
        (pyg_data(edge_weight=torch.rand(4)), r"edge_weight must be \[5\], one number an edge, got \[4\]"),
        (pyg_data(edge_weight=torch.tensor([1, 2, torch.nan, 1, 1])), r"edge_weight of edge 2 is nan \(1 such\)"),
        (
            pyg_data(edge_label=torch.ones(5, 2), node_type=torch.zeros(6)),
            "holds edge_label, node_type, which models do no",
        ),
        ([pyg_data(), pyg_data()], "there are 2 graphs; give one Data"),
        ({"x": torch.ones(6, 2)}, "there is a dict, not a torch_geometric.data.Data"),
        (pyg_data(y=None), r"the Data has no y \(it holds .*x.*\); add it"),
        (pyg_data(x=None), "the Data has no x"),
        (pyg_data(edge_index=None), "neither edge_index nor adj_t"),
        (pyg_data(adj_t=torch.eye(6).to_sparse()), "has both edge_index and adj_t"),
        (pyg_data(num_nodes=60), "num_nodes is 60, and x has 6 rows"),
        (pyg_data(y=torch.tensor([0.5, 1, 2, 0, 1, 0])), "1 labels are not whole numbers; set dataset.task=regression"),
        (pyg_data(y=torch.rand(6, 2)), "entries are neither 0 nor 1; set dataset.task=regression"),
        (pyg_data(y=torch.zeros(6, 0)), r"labels are \[6, 0\], without a class|must have shape"),
        (pyg_data(edge_type=torch.full((5,), torch.inf)), "edge_type is torch.float32; number the types"),
        (pyg_data(train_mask=None), "there is a val_mask, and no train_mask; give it, too"),
        *((pyg_data(**{name: TRAIN}), f"{name} is not read; call it val_mask") for name in ("valid_mask", "dev_mask")),
        (pyg_data(validation_mask=TRAIN), "validation_mask is not read; call it val_mask"),
        *((pyg_data(**{f"{part}_mask": [True] * 6}), f"{part}_mask is a list; give a tensor") for part in SPLITS),
    ],
)
def test_a_mistake_is_one_clear_line(what, line):
    with refused(f"^dataset given: .*(?:{line})"):
        prepare(raw_of("given", what), PT(), seed=0)


class OwnData(Data):
    pass


@pytest.mark.parametrize("count", [1, 2])
def test_a_processed_file_is_the_graph_or_the_batch_of_all(tmp_path, count):
    graphs = [pyg_data() for _ in range(count)]
    InMemoryDataset.save(graphs, str(tmp_path / "data.pt"))
    found = PT(path=str(tmp_path / "data.pt"), self_loops="keep", drop_duplicates=False).load(None, 0)
    whole = Batch.from_data_list(graphs)
    ends = whole.edge_index[:, torch.argsort(whole.edge_index[1] * 6 * count + whole.edge_index[0])]
    assert torch.equal(found.x, whole.x)
    assert torch.equal(found.y, whole.y)
    assert torch.equal(found.edge_index, ends)


def test_a_processed_file_of_typed_graphs_is_their_batch(tmp_path):
    graph = hetero()
    graph["venue"].x = torch.ones(4, 1)
    InMemoryDataset.save([graph, graph], str(tmp_path / "data.pt"))
    found = PT(path=str(tmp_path / "data.pt"), self_loops=False).load(None, 0)
    wanted = PT(path=str(write_given(Batch.from_data_list([graph, graph]))), self_loops=False).load(None, 0)
    assert (found.num_nodes, found.graph_hash) == (2 * 21, wanted.graph_hash)


@pytest.mark.parametrize("kind", ["pt", "npz", "folder"])
def test_a_given_name_is_that_of_the_results(kind):
    assert dataset_name(compose([f"dataset={kind}", "dataset.path=g"])) == kind
    assert dataset_name(compose([f"dataset={kind}", "dataset.path=g", "dataset.name=mine"])) == "mine"


def test_a_batch_and_a_subclass_are_read_as_their_fields(tmp_path):
    batch = Batch.from_data_list([pyg_data(), pyg_data()])
    plain = Data(**{key: batch[key] for key in pyg_data().to_dict()})
    wanted = PT(path=str(write_given(plain))).load(None, 0).graph_hash
    assert PT(path=str(write_given(batch))).load(None, 0).graph_hash == wanted
    own = PT(path=str(write_given(OwnData(**pyg_data().to_dict())))).load(None, 0)
    assert own.graph_hash == PT(path=saved(tmp_path, pyg_data())).load(None, 0).graph_hash
    with pytest.raises(ValueError, match=r"cannot be read as a saved Data .*Data.from_dict\(data.to_dict\(\)\)"):
        PT(path=saved(tmp_path, batch)).load(None, 0)


@pytest.mark.parametrize("content", [b"", b"no archive"])
def test_a_file_that_is_no_data_is_one_line(tmp_path, content):
    (tmp_path / "bad.pt").write_bytes(content)
    with refused(r"bad\.pt cannot be read as a saved Data"):
        PT(path=str(tmp_path / "bad.pt")).load(None, 0)


def test_the_command_reads_it_and_refuses_rows_on_edges_in_one_line(run_here: Run, tmp_path):
    command = ("train", "dataset=pt", "dataset.path=my.pt", "dataset.self_loops=false", "strategy=single", "epochs=1")
    saved(tmp_path, pyg_data(edge_attr=torch.ones(5, 2)))
    done = run_here(*command)
    assert done.returncode != 0
    assert "dataset pt has attributes on edges, which model=gcn does not read; remove edge_attr" in done.stderr
    saved(tmp_path, pyg_data())
    done = run_here(*command)
    assert done.returncode == 0, done.stderr


def test_repeated_weights_of_a_matrix_are_refused() -> None:
    row, col, weight = [0, 0, 1, 2], [1, 1, 2, 0], np.array([0.5, 0.5, 2.0, 1.0])
    data = {"x": np.ones((3, 1)), "y": np.array([0, 1, 0])}
    matrix = coo_array((weight, (row, col)), shape=(3, 3))
    with pytest.raises(ValueError, match=r"adjacency has 1 repeated weight, .*: call its sum_duplicates\(\)"):
        as_data({**data, "adjacency": matrix})
    matrix.sum_duplicates()
    found = raw_of("given", as_data({**data, "adjacency": matrix}))
    assert found.edges.weight is not None and sorted(found.edges.weight.tolist()) == [1.0, 1.0, 2.0]


@pytest.mark.parametrize("kind", [np.asarray, list])
def test_adjacency_of_another_size_is_refused(kind: Callable[[np.ndarray], object]) -> None:
    matrix = scipy.sparse.coo_array(([1, 1], ([0, 1], [1, 2])), shape=(160, 160))
    with pytest.raises(ValueError, match=r"adjacency is \[160, 160\], and x has 40 rows"):
        as_data({"adjacency": matrix, "x": kind(np.ones((40, 3))), "y": np.zeros(40, dtype=np.int64)})


def test_parameters_are_read_as_data(tmp_path: Path) -> None:
    torch.save(pyg_data(x=torch.nn.Parameter(torch.ones(6, 4))), tmp_path / "g.pt")
    assert not PT(path=str(tmp_path / "g.pt"), split="random").load(None, 0).x.requires_grad


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
