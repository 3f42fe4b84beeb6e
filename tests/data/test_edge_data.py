"""What edges carry enters by every reader as the same graph, stays with its edges, and is refused where it is wrong."""

from functools import partial
from pathlib import Path
from typing import Any

import networkx
import numpy as np
import pytest
import torch
from torch_geometric.data import Data

from gnnpar.data import Preprocess, folder, prepare, stored
from gnnpar.data.folder import Folder
from gnnpar.data.npz import NPZ
from gnnpar.data.raw import RawGraph
from gnnpar.data.saved import PT, write_given
from gnnpar.folds.edge_data import EdgeData

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
    np.savez(tmp_path / "g.npz", **given)  # pyright: ignore[reportArgumentType] - arrays by name
    tensors = {key: torch.from_numpy(value) for key, value in given.items()}
    torch.save(Data(**tensors), tmp_path / "g.pt")
    (tmp_path / "g").mkdir()
    for name, array in {**given, "src": np.array(SRC), "dst": np.array(DST)}.items():
        if name != "edge_index":
            np.save(tmp_path / "g" / f"{name}.npy", array)
    found = [
        NPZ(path=str(tmp_path / "g.npz"), self_loops=False).load(None, 0),
        PT(path=str(tmp_path / "g.pt"), self_loops=False).load(None, 0),
        PT(path=str(write_given(given)), self_loops=False).load(None, 0),
        Folder(path=str(tmp_path / "g"), self_loops=False).load(None, 0),
    ]
    monkeypatch.setattr(stored, "CHUNK_EDGES", 4)
    monkeypatch.setattr(folder, "CHUNK_EDGES", 4)
    monkeypatch.setattr(stored, "canonical_csr", partial(stored.canonical_csr, bucket_edges=3))
    chunked = Folder(path=str(tmp_path / "g"), self_loops=False).stored(None, 0, tmp_path)
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
def test_a_mistake_is_one_clear_line(changes: dict[str, Any], line: str) -> None:
    with pytest.raises(ValueError, match=line) as caught:
        prepare(raw(**changes), NO_LOOPS, seed=0)
    assert "\n" not in str(caught.value)
    assert str(caught.value).startswith("dataset g: ")


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
