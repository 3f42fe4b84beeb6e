"""Typed nodes and edges and what edges carry enter by every reader as one graph; mistakes are one line."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import networkx
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch_geometric.data import Data, HeteroData

import gnnpar
from data.samples import hetero, sources
from gnnpar.data import Preprocess, folder, prepare, stored
from gnnpar.data.dataset import TaskName
from gnnpar.data.folder import Folder
from gnnpar.data.raw import RawGraph
from gnnpar.data.saved import PT, raw_graph, write_given
from gnnpar.folds.edge_data import EdgeData, Schema
from gnnpar.models.rgcn import RGCN
from gnnpar.parallel.halo.strategy import GraphParallel
from gnnpar.verify.conformance import check
from outcomes import refused


def test_nodes_and_edges_of_all_types_are_one_graph() -> None:
    given = hetero()
    raw = raw_graph("given", given)
    assert isinstance(raw.edge_index, torch.Tensor)
    kinds = F.one_hot(torch.tensor([0] * 12 + [1] * 5 + [2] * 4))
    own = torch.block_diag(given["paper"].x, given["author"].x, torch.zeros(4, 0))
    assert torch.equal(raw.x, torch.cat([own, kinds], 1)), "an encoder of x is one for each type"
    assert raw.y.tolist() == [*given["paper"].y.tolist(), *[-1] * 9]
    assert raw.masks is not None
    assert int(raw.masks[0].sum()) == 6
    assert raw.edges.type is not None
    assert torch.bincount(raw.edges.type).tolist() == [20] * 5
    written = raw.edge_index[:, raw.edges.type == 0]
    assert torch.equal(written - torch.tensor([[12], [0]]), given["author", "writes", "paper"].edge_index)
    venues = raw.edge_index[1, raw.edges.type == 2]
    assert 17 <= int(venues.min()) <= int(venues.max()) <= 20


def test_it_trains_from_a_file_as_on_one_device(tmp_path) -> None:
    torch.save(hetero(), tmp_path / "hetero.pt")
    dataset = PT(path=str(tmp_path / "hetero.pt"), self_loops=False).load(None, 0)
    assert dataset.edge_sizes.types == 5
    config = RGCN(hidden=8, encoder="linear", num_bases=2)
    (case,) = check(GraphParallel(), {"rgcn": config}, worlds=(2,), dataset=dataset)
    assert case.passed, case


@pytest.mark.parametrize("dtype", [torch.bool, torch.uint8, torch.int64, torch.float32])
@pytest.mark.parametrize("task", ["single_label", "multi_label", "regression"])
def test_nodes_of_other_types_have_no_label(task: TaskName, dtype: torch.dtype) -> None:
    data, numbers = hetero(), torch.arange(12)
    classes = (numbers[:, None] + torch.arange(3)) % 2
    data["paper"].y = (classes if task == "multi_label" else classes[:, 0]).to(dtype)
    found = prepare(raw_graph("given", data, task), PT(split="random", self_loops=False), seed=0)
    chosen = found.train_mask | found.val_mask | found.test_mask
    assert chosen.tolist() == [True] * 12 + [False] * 9
    assert torch.equal(found.y[chosen].flatten(), data["paper"].y.flatten().to(found.y.dtype))


WRITES, CITES, EVERY = ("author", "writes", "paper"), ("paper", "cites", "paper"), ("every",)


@pytest.mark.parametrize(
    ("place", "key", "value", "line"),
    [
        ("venue", "num_nodes", [4], "nothing says how many nodes of type venue there are"),
        ("venue", "num_nodes", -4, "nothing says how many nodes of type venue there are"),
        ("author", "x", torch.zeros(5, 2, dtype=torch.complex64), "x of type author is torch.complex64"),
        ("author", "x", torch.full((5, 2), 1e300, dtype=torch.float64), "0 NaN and 10 infinite values"),
        ("author", "x", torch.full((5, 2), torch.nan), "10 NaN and 0 infinite values"),
        ("author", "y", torch.zeros(5).long(), "2 types of nodes have y: paper, author; give labels to one type"),
        ("paper", "x", torch.ones(11, 3), r"of type paper"),
        (CITES, "edge_index", torch.full((2, 5), 0.5), r"edge_index of \(paper, cites, paper\) is torch.float32; node"),
        (CITES, "edge_label", torch.ones(20), "holds edge_label, which models do not read"),
        (WRITES, "edge_weight", torch.ones(20), r"edge_weight must be of every type of edges and of one width \(auth"),
        (
            WRITES,
            "edge_index",
            5 * torch.eye(2, 20).long(),
            r"1 of 20 edges \(author, writes, paper\) name a node of t",
        ),
        (EVERY, "edge_weight", torch.full((20,), torch.inf), "edge_weight of edge 0 is inf"),
        (EVERY, "edge_attr", torch.zeros(19, 2), r"edge_attr must be \[100, width\], one row an edge, got \[95, 2\]"),
        (EVERY, "edge_attr", torch.zeros(20, 2, 2), r"edge_attr must be \[100, width\], one row an edge, got \[100, 2"),
    ],
)
def test_a_mistake_in_a_typed_graph_is_one_clear_line(place: Any, key: str, value: object, line: str) -> None:
    data = hetero()
    for each in data.edge_types if place == EVERY else [place]:
        setattr(data[each], key, value)
    with refused(f"^dataset given.*(?:{line})"):
        _ = gnnpar.homogeneous(data), raw_graph("given", data)


# what PyG's to_hetero writes between quotation marks into the code of a forward
EVIL = 'x",[getattr(__import__("os"),"system")("touch PWNED")]and"y'


def test_a_name_that_could_be_code_is_refused_by_every_reader(tmp_path: Path) -> None:
    data = hetero()
    data["paper", EVIL, "paper"].edge_index = torch.zeros(2, 1, dtype=torch.long)
    torch.save(data, tmp_path / "evil.pt")
    readers: list[Callable[[], object]] = [
        lambda: raw_graph("given", data),
        lambda: gnnpar.homogeneous(data),
        lambda: PT(path=str(tmp_path / "evil.pt"), self_loops="keep").load(None, 0),
        lambda: Schema.of('[[["a", 1]], [["a", "x\\"", "a"]], null]'),
    ]
    for read in readers:
        with pytest.raises(ValueError, match=r"the type 'x\".* has more in it than letters, digits, spaces and _ - \."):
            read()


@pytest.mark.parametrize("given", [None, Data()])
def test_what_is_no_typed_graph_is_named(given: HeteroData) -> None:
    with pytest.raises(ValueError, match=f"there is a {type(given).__name__}, not a torch_geometric.data.HeteroData"):
        gnnpar.homogeneous(given)


N = 7
SRC = [0, 0, 0, 1, 1, 2, 3, 6, 6, 0, 4]
DST = [1, 1, 1, 2, 2, 3, 0, 5, 5, 1, 4]
TYPE = [2, 0, 2, 1, 0, 1, 1, 0, 1, 1, 0]  # 0 -> 1 has types 0, 1 and 2, the last one twice
ATTR = [[1, 1], [2, 2], [1, 1], [4, 0], [5, 0], [6, 0], [7, 0], [8, 0], [9, 0], [10, 0], [11, 0]]
NO_LOOPS = Preprocess(self_loops=False)


def fields(**changes: Any) -> dict[str, np.ndarray]:
    rng, nodes = np.random.default_rng(0), np.arange(N)
    given = {"x": rng.standard_normal((N, 3)).astype(np.float32), "y": nodes % 3}
    given |= {"edge_index": np.array([SRC, DST]), "edge_type": np.array(TYPE), "edge_attr": np.array(ATTR, np.float32)}
    given |= {"train_mask": nodes < 4, "val_mask": nodes == 4, "test_mask": nodes > 4}
    return {key: np.asarray(value) for key, value in (given | changes).items() if value is not None}


def raw(**changes: Any) -> RawGraph:
    tensors = {key: torch.from_numpy(value) for key, value in fields(**changes).items()}
    kinds = [kind for kind in ("type", "attr", "weight") if f"edge_{kind}" in tensors]
    given: Any = {key: tensors[key] for key in ("x", "y", "edge_index")}
    given |= {"edges": EdgeData(**{kind: tensors[f"edge_{kind}"] for kind in kinds}), "task": "single_label"}
    given["masks"] = tuple(tensors[f"{part}_mask"] for part in ("train", "val", "test"))
    return RawGraph(name="g", **given)


def test_edges_of_two_types_are_two_edges_and_a_repeated_one_is_one() -> None:
    data = prepare(raw(), NO_LOOPS, seed=0)
    assert data.edges.type is not None and data.edges.attr is not None
    listed = zip(*data.edge_index.tolist(), data.edges.type.tolist(), data.edges.attr[:, 0].tolist(), strict=True)
    want = [(3, 0, 1, 7), (0, 1, 0, 2), (0, 1, 1, 10), (0, 1, 2, 1), (1, 2, 0, 5), (1, 2, 1, 4)]
    assert list(listed) == [*want, (2, 3, 1, 6), (6, 5, 0, 8), (6, 5, 1, 9)]
    assert data.edge_sizes == (3, 2, ((0, 2), (1, 2), (2, 2), (3, 1)), None, False)
    assert data.in_degree.tolist() == [1, 3, 2, 1, 0, 2, 0]


def test_edges_that_stay_repeated_come_in_one_order_however_they_were_listed() -> None:
    config = Preprocess(self_loops=False, drop_duplicates=False, symmetrize=True)
    attr = np.array(ATTR, dtype=np.float32)
    attr[2] = [1, 0]
    first = prepare(raw(edge_attr=attr), config, seed=0)
    order = np.random.default_rng(3).permutation(len(SRC))
    mixed = {"edge_index": np.array([SRC, DST])[:, order], "edge_type": np.array(TYPE)[order], "edge_attr": attr[order]}
    assert prepare(raw(**mixed), config, seed=0).graph_hash == first.graph_hash
    assert prepare(raw(**(mixed | {"edge_attr": attr})), config, seed=0).graph_hash != first.graph_hash


def test_every_reader_gives_the_same_graph(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    given = fields()
    want = prepare(raw(), NO_LOOPS, seed=0)
    *_, in_files = configs = sources(tmp_path, given, self_loops=False)
    found = [config.load(None, 0) for config in configs]
    monkeypatch.setattr(stored, "CHUNK_EDGES", 4)
    monkeypatch.setattr(folder, "CHUNK_EDGES", 4)
    monkeypatch.setattr(stored, "canonical_csr", partial(stored.canonical_csr, bucket_edges=3))
    chunked = in_files.stored(None, 0, tmp_path)
    assert [each.graph_hash for each in (*found, chunked)] == [want.graph_hash] * 5
    assert chunked.edge_sizes == want.edge_sizes
    for kind in want.edges.kinds:
        rows = np.concatenate([piece.values[kind] for piece in chunked.edges(4)])
        assert np.array_equal(rows, want.edges.tensors[kind].numpy())


def test_attributes_of_networkx_edges_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    graph = networkx.MultiDiGraph()
    given = fields()
    for i in range(N):
        graph.add_node(i, x=given["x"][i], y=int(given["y"][i]), train_mask=bool(given["train_mask"][i]))
    for a, b, kind, attr in zip(SRC, DST, TYPE, ATTR, strict=True):
        graph.add_edge(a, b, edge_type=kind, edge_attr=np.array(attr, dtype=np.float32))
    found = PT(path=str(write_given(graph)), self_loops=False).load(None, 0)
    want = prepare(raw(), NO_LOOPS, seed=0)
    assert torch.equal(found.edge_index, want.edge_index)
    assert all(torch.equal(found.edges.tensors[kind], want.edges.tensors[kind]) for kind in ("type", "attr"))


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        ({"edge_type": TYPE[1:]}, r"edge_type must be \[11\], one number an edge, got \[10\]"),
        ({"edge_type": np.ones(11)}, r"edge_type is torch.float64; number the types 0, 1, 2, \.\.\. as int64"),
        ({"edge_type": [-1, *TYPE[1:]]}, r"edge_type of edge 0 is -1, outside 0\.\.10 \(1 such\)"),
        ({"edge_type": [*TYPE[1:], 11]}, r"edge_type of edge 10 is 11, outside 0\.\.10 \(1 such\)"),
        ({"edge_attr": ATTR[1:]}, r"edge_attr must be \[11, width\], one row an edge, got \[10, 2\]"),
        ({"edge_attr": np.ones(11)}, r"edge_attr must be \[11, width\], .*edge_weight"),
        ({"edge_attr": np.where(np.array(ATTR) == 5, np.nan, 0)}, "edge_attr of edge 4 is nan in column 0"),
        ({"edge_attr": [*ATTR[:2], [3, 3], *ATTR[3:]]}, "edge 0 -> 1 has two rows of attributes; merge them"),
    ],
    ids=lambda value: value[:24] if isinstance(value, str) else "",
)
def test_a_mistake_in_edge_data_is_one_clear_line(changes: dict[str, Any], line: str) -> None:
    with refused(f"^dataset g: .*(?:{line})"):
        prepare(raw(**changes), NO_LOOPS, seed=0)


def test_self_loops_have_no_type_and_no_attributes() -> None:
    with pytest.raises(
        ValueError, match=r"its edges have attributes and types, which self loops .*self_loops=keep, or false"
    ):
        prepare(raw(), Preprocess(), seed=0)
    with pytest.raises(ValueError, match=r"its edges have types, which self loops"):
        prepare(raw(edge_attr=None), Preprocess(), seed=0)


@pytest.mark.parametrize("name", ["edge_type", "edge_attr"])
def test_a_file_of_another_length_is_one_line(tmp_path: Path, name: str) -> None:
    arrays = fields(edge_index=None) | {"src": np.array(SRC), "dst": np.array(DST)}
    arrays[name] = arrays[name][1:]
    for key, array in arrays.items():
        np.save(tmp_path / f"{key}.npy", array)
    with pytest.raises(ValueError, match=rf"{name}.npy is .*, but it must be one (integer|row) an edge, \[11"):
        Folder(path=str(tmp_path), self_loops=False).load(None, 0)
