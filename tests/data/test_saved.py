"""PyG's `Data` in a file: what was saved is what is loaded, and each mistake is one clear line."""

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
from torch_geometric.data import Batch, Data, InMemoryDataset

from conftest import Run
from data.samples import hetero, raw_graph
from gnnpar.config.compose import compose
from gnnpar.data import Preprocess, prepare
from gnnpar.data.saved import PT, as_data, write_given
from gnnpar.data.saved import raw_graph as raw_of
from gnnpar.parallel.objective import SPLITS
from gnnpar.training.result.result import dataset_name


def data(**changes: Any) -> Data:
    raw = raw_graph()
    assert raw.masks is not None
    train, val, test = (mask.bool() for mask in raw.masks)
    fields = {"x": raw.x, "y": raw.y, "edge_index": raw.edge_index}
    fields |= {"train_mask": train, "val_mask": val, "test_mask": test}
    return Data(**{key: value for key, value in (fields | changes).items() if value is not None})


def saved(folder: Path, what: object) -> str:
    torch.save(what, folder / "my.pt")
    return str(folder / "my.pt")


def test_round_trip(tmp_path):
    expected = prepare(raw_graph(), Preprocess(), seed=0)
    found = PT(path=saved(tmp_path, data())).load(None, 0)
    assert (found.graph_hash, found.split_hash) == (expected.graph_hash, expected.split_hash)
    assert PT(path="my.pt").load(tmp_path, 0).graph_hash == expected.graph_hash, "in data_dir"
    more = PT(path=saved(tmp_path, data(num_classes=3, title="a graph"))).load(None, 0)
    assert more.graph_hash == expected.graph_hash


def test_a_sparse_adjacency_and_missing_masks(tmp_path):
    raw = raw_graph()
    adj_t = torch.sparse_coo_tensor(raw.edge_index.flip(0), torch.ones(5), (6, 6))
    path = saved(tmp_path, data(edge_index=None, adj_t=adj_t, val_mask=None, test_mask=None))
    found = PT(path=path).load(None, 0)
    assert torch.equal(found.edge_index, prepare(raw, Preprocess(), seed=0).edge_index)
    assert [int(mask.sum()) for mask in (found.train_mask, found.val_mask, found.test_mask)] == [3, 0, 0]
    with pytest.raises(ValueError, match="has no split of its own"):
        PT(path=saved(tmp_path, data(train_mask=None, val_mask=None, test_mask=None))).load(None, 0)


TRAIN = torch.arange(6) < 3


@pytest.mark.parametrize(
    ("what", "line"),
    [
        (data(edge_weight=torch.rand(4)), r"edge_weight must be \[5\], one number an edge, got \[4\]"),
        (data(edge_weight=torch.tensor([1, 2, torch.nan, 1, 1])), r"edge_weight of edge 2 is nan \(1 such\)"),
        (
            data(edge_label=torch.ones(5, 2), node_type=torch.zeros(6)),
            "holds edge_label, node_type, which models do no",
        ),
        ([data(), data()], "there are 2 graphs; give one Data"),
        ({"x": torch.ones(6, 2)}, "there is a dict, not a torch_geometric.data.Data"),
        (data(y=None), r"the Data has no y \(it holds .*x.*\); add it"),
        (data(x=None), "the Data has no x"),
        (data(edge_index=None), "neither edge_index nor adj_t"),
        (data(adj_t=torch.eye(6).to_sparse()), "has both edge_index and adj_t"),
        (data(num_nodes=60), "num_nodes is 60, and x has 6 rows"),
        (data(y=torch.tensor([0.5, 1, 2, 0, 1, 0])), "1 labels are not whole numbers; set dataset.task=regression"),
        (data(y=torch.rand(6, 2)), "entries are neither 0 nor 1; set dataset.task=regression"),
        (data(y=torch.zeros(6, 0)), r"labels are \[6, 0\], without a class|must have shape"),
        (data(edge_type=torch.full((5,), torch.inf)), "edge_type is torch.float32; number the types"),
        (data(train_mask=None), "there is a val_mask, and no train_mask; give it, too"),
        *((data(**{name: TRAIN}), f"{name} is not read; call it val_mask") for name in ("valid_mask", "dev_mask")),
        (data(validation_mask=TRAIN), "validation_mask is not read; call it val_mask"),
        *((data(**{f"{part}_mask": [True] * 6}), f"{part}_mask is a list; give a tensor") for part in SPLITS),
    ],
)
def test_a_mistake_is_one_clear_line(what, line):
    with pytest.raises(ValueError, match=line) as caught:
        prepare(raw_of("given", what), PT(), seed=0)
    assert "\n" not in str(caught.value)
    assert str(caught.value).startswith("dataset given: ")


class OwnData(Data):
    pass


@pytest.mark.parametrize("count", [1, 2])
def test_a_processed_file_is_the_graph_or_the_batch_of_all(tmp_path, count):
    graphs = [data() for _ in range(count)]
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
    batch = Batch.from_data_list([data(), data()])
    plain = Data(**{key: batch[key] for key in data().to_dict()})
    wanted = PT(path=str(write_given(plain))).load(None, 0).graph_hash
    assert PT(path=str(write_given(batch))).load(None, 0).graph_hash == wanted
    own = PT(path=str(write_given(OwnData(**data().to_dict())))).load(None, 0)
    assert own.graph_hash == PT(path=saved(tmp_path, data())).load(None, 0).graph_hash
    with pytest.raises(ValueError, match=r"cannot be read as a saved Data .*Data.from_dict\(data.to_dict\(\)\)"):
        PT(path=saved(tmp_path, batch)).load(None, 0)


class Evil:
    def __reduce__(self):
        return (print, ("code of the file ran",))


@pytest.mark.parametrize("content", [b"", b"no archive", None])
def test_a_file_that_is_no_data_is_one_line_and_runs_nothing(tmp_path, content, capsys):
    (tmp_path / "bad.pt").write_bytes(content or b"")
    if content is None:
        torch.save(data(title=Evil()), tmp_path / "bad.pt")
    with pytest.raises(ValueError, match=r"bad\.pt cannot be read as a saved Data") as caught:
        PT(path=str(tmp_path / "bad.pt")).load(None, 0)
    assert "\n" not in str(caught.value)
    assert capsys.readouterr().out == ""


def test_the_command_reads_it_and_refuses_rows_on_edges_in_one_line(run_here: Run, tmp_path):
    command = ("train", "dataset=pt", "dataset.path=my.pt", "dataset.self_loops=false", "strategy=single", "epochs=1")
    saved(tmp_path, data(edge_attr=torch.ones(5, 2)))
    done = run_here(*command)
    assert done.returncode != 0
    assert "dataset pt has attributes on edges, which model=gcn does not read; remove edge_attr" in done.stderr
    saved(tmp_path, data())
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
    torch.save(data(x=torch.nn.Parameter(torch.ones(6, 4))), tmp_path / "g.pt")
    assert not PT(path=str(tmp_path / "g.pt"), split="random").load(None, 0).x.requires_grad
