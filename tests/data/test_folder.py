"""dataset=folder: read whole and in chunks it is the same graph; the bucket sort gives canonical edges."""

import sys
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch

from conftest import Refused
from gnnpar import files
from gnnpar.config.compose import compose
from gnnpar.data import stored
from gnnpar.data.columns import Column, ColumnWriter, load_npy
from gnnpar.data.files import find_folder
from gnnpar.data.folder import Folder
from gnnpar.data.preprocess import Preprocess, canonical_edges
from gnnpar.data.raw import EdgeList
from gnnpar.folds.edge_data import SelfLoops
from outcomes import refused

NODES = 211


def write(folder: Path, *, kind: str = "coo", masks: bool = True, **arrays: np.ndarray) -> Path:
    """A random graph with loops, repeated edges, isolated nodes and a hub."""
    rng = np.random.default_rng(1)
    src, dst = rng.integers(0, 150, size=(2, 1500))
    dst[:200] = 7
    given = {"x": rng.standard_normal((NODES, 5)), "y": rng.integers(-1, 4, size=NODES)}
    if masks:
        given["train_mask"] = (np.arange(NODES) % 3 == 0) & (given["y"] >= 0)
        given["val_mask"] = (np.arange(NODES) % 3 == 1) & (given["y"] >= 0)
    if kind == "coo":
        given |= {"src": src.astype(np.int32), "dst": dst.astype(np.int32)}
    else:
        order = np.argsort(dst, kind="stable")
        given |= {"indptr": np.concatenate([[0], np.bincount(dst, minlength=NODES).cumsum()]), "indices": src[order]}
    folder.mkdir(exist_ok=True)
    for name, array in (given | arrays).items():
        np.save(folder / f"{name}.npy", array)
    return folder


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Many chunks and buckets of a small graph."""
    from gnnpar.data import folder

    for module in (stored, folder):
        monkeypatch.setattr(module, "CHUNK_EDGES", 97)
    monkeypatch.setattr(stored, "CHUNK_ROWS", 13)
    monkeypatch.setattr(stored, "canonical_csr", partial(stored.canonical_csr, bucket_edges=300))


WEIGHTED: list[dict[str, Any]] = [{"drop_duplicates": False}, {"drop_duplicates": False, "self_loops": False}, {}]


@pytest.mark.parametrize("kind", ["coo", "csr"])
@pytest.mark.parametrize(
    ("options", "weights"),
    [
        ({}, False),
        ({"symmetrize": True}, False),
        ({"self_loops": False, "drop_duplicates": False}, False),
        ({"normalize": "row"}, False),
        ({"split": "random", "num_classes": 6}, False),
        *((options, True) for options in (*WEIGHTED, {"self_loops": "keep"})),
    ],
    ids=str,
)
def test_in_chunks_it_is_the_same_graph(tmp_path: Path, kind: str, options: dict, weights: bool) -> None:
    weight = np.random.default_rng(2).uniform(0.1, 2, 1500)
    if options != WEIGHTED[1]:  # then an edge that is there twice has one weight
        src, dst = np.random.default_rng(1).integers(0, 150, size=(2, 1500))
        dst[:200] = 7
        order = np.arange(1500) if kind == "coo" else np.argsort(dst, kind="stable")
        weight = ((src * 151 + dst) % 7 / 4)[order]
    arrays: dict[str, Any] = {"edge_weight": weight} if weights else {}
    config = Folder(path=str(write(tmp_path / "g", kind=kind, **arrays)), **options)
    whole, chunked = config.load(None, 0), config.stored(None, 0, tmp_path)
    assert (chunked.graph_hash, chunked.split_hash) == (whole.graph_hash, whole.split_hash)
    assert torch.equal(chunked.edge_index, whole.edge_index)
    assert torch.equal(chunked.in_degree, whole.in_degree)
    assert chunked.num_classes == whole.num_classes
    assert (chunked.in_weight is not None) == (whole.in_weight is not None) == weights
    if chunked.in_weight is not None and whole.in_weight is not None:
        assert torch.equal(chunked.in_weight, whole.in_weight)
    pieces = list(chunked.edges(50))
    for kept in whole.edges.kinds:
        assert np.array_equal(np.concatenate([p.values[kept] for p in pieces]), whole.edges.tensors[kept].numpy())
    assert np.array_equal(np.concatenate([p.src for p in pieces]), whole.edge_index[0].numpy())
    assert np.array_equal(np.concatenate([p.dst for p in pieces]), whole.edge_index[1].numpy())
    assert [p.first for p in pieces] == list(range(0, whole.num_edges, 50))
    left = sorted(file.name for file in tmp_path.iterdir())
    assert left == ["g", "indices.npy", *(["weight.npy"] if weights else [])], "scratch files are gone"


@pytest.mark.parametrize("nodes", [1, 2, 40])
@pytest.mark.parametrize("edges", [0, 1, 500])
def test_the_bucket_sort_is_canonical(tmp_path: Path, nodes: int, edges: int) -> None:
    pairs = np.random.default_rng(0).integers(0, nodes, size=(2, edges))
    sizes: Any = {"num_nodes": nodes, "num_edges": edges, "bucket_edges": 20}

    def chunks():
        return iter([(*pairs[:, :7], {}), (*pairs[:, 7:], {})])

    cases = [(True, True, True), (False, False, False), (True, False, True), ("keep", True, False)]
    for loops, both, distinct in cast("list[tuple[SelfLoops, bool, bool]]", cases):
        config = Preprocess(symmetrize=both, self_loops=loops, drop_duplicates=distinct)
        want = canonical_edges(EdgeList(torch.from_numpy(pairs)), config, num_nodes=nodes).edge_index
        indptr, indices, _ = stored.canonical_csr(chunks, tmp_path, config, name="g", **sizes)
        assert np.array_equal(indices[0 : len(indices)], want[0].numpy())
        assert np.array_equal(np.repeat(np.arange(nodes), np.diff(indptr)), want[1].numpy())


@pytest.mark.parametrize(
    ("arrays", "said"),
    [
        ({"src": np.array([0, 300]), "dst": np.array([0, 1])}, r"1 of 2 edges point outside nodes 0\.\.210"),
        ({"dst": np.array([1, 2])}, "dst.npy has 2 entries, but 1500 are needed"),
        ({"x": np.full((NODES, 2), np.nan)}, "NaN and 0 infinite values .*first at node 0, feature 0"),
        ({"x": np.zeros(NODES)}, r"must be numbers, \[nodes, features\]"),
        ({"src": np.zeros(1500)}, "must be integers in one row"),
        ({"y": np.zeros(7, dtype=int)}, r"labels of a single_label task must have shape \[211\]"),
        ({"x": np.array([["a"]])}, r"must be numbers"),
        ({"edge_weight": np.ones(7)}, r"edge_weight.npy is float64 \[7\], but it must be one number an edge, \[1500\]"),
        ({"edge_weight": np.where(np.arange(1500) == 900, np.inf, 2)}, "edge_weight of edge 900 is inf"),
        (
            {"edge_weight": np.arange(1500)},
            "has two self loops, of weights .*; add them up",
        ),
    ],
    ids=lambda value: value[:20] if isinstance(value, str) else "",
)
def test_what_is_wrong_is_one_line(tmp_path: Path, arrays: dict, said: str) -> None:
    config = Folder(path=str(write(tmp_path / "g", **arrays)))
    with refused(said):
        config.stored(None, 0, tmp_path)


def test_what_is_missing_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"dataset\.path is not set"):
        Folder().load(None, 0)
    with pytest.raises(ValueError, match=r"there is no folder .*nowhere"):
        Folder(path="nowhere").load(tmp_path, 0)
    write(tmp_path / "g")
    with pytest.raises(ValueError, match="standard needs all features in memory"):
        Folder(path="g", normalize="standard").stored(tmp_path, 0, tmp_path)
    (tmp_path / "g" / "y.npy").unlink()
    with pytest.raises(ValueError, match=r"has no y\.npy \(it holds dst, src, train_mask, val_mask, x\); add it"):
        Folder(path="g").load(tmp_path, 0)


def test_a_file_that_was_cut_is_noticed(tmp_path: Path) -> None:
    with ColumnWriter(tmp_path / "a.npy", np.float32, (3,)) as out:
        for rows in (2, 0, 5):
            out.write(np.full((rows, 3), rows))
    whole = (tmp_path / "a.npy").read_bytes()
    assert np.array_equal(np.load(tmp_path / "a.npy"), Column(tmp_path / "a.npy")[0:7])
    assert Column(tmp_path / "a.npy")[1:3][:, 0].tolist() == [2.0, 5.0]
    for damaged in (whole[:-4], whole[:20], b"", whole + b"x"):
        (tmp_path / "a.npy").write_bytes(damaged)
        with pytest.raises(ValueError, match=r"a\.npy"):
            Column(tmp_path / "a.npy")


def test_two_folders_of_one_dataset_are_refused(tmp_path: Path) -> None:
    (tmp_path / "Tolokers").mkdir()
    assert find_folder(tmp_path, "tolokers") == tmp_path / "Tolokers"
    (tmp_path / "TOLOKERS").mkdir()
    with pytest.raises(ValueError, match="has TOLOKERS and Tolokers; rename the one that is to be read to tolokers"):
        find_folder(tmp_path, "tolokers")
    (tmp_path / "tolokers").mkdir()
    assert find_folder(tmp_path, "tolokers") == tmp_path / "tolokers"


def test_folder_found_in_two_places_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for place in (tmp_path / "here" / "h", tmp_path / "data" / "h"):
        place.mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "here")
    with pytest.raises(ValueError, match="there are two folders h"):
        compose(["dataset=folder", "dataset.path=h", f"data_dir={tmp_path}/data"]).load_dataset()


def test_wide_rows_are_read_in_smaller_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stored, "CHUNK_ROWS", 7)
    monkeypatch.setattr(stored, "CHUNK_VALUES", 50)
    for width, most in ((1, 7), (10, 5), (1000, 1)):
        chunks = list(stored.row_chunks(np.zeros((20, width))))
        assert [row for rows in chunks for row in range(20)[rows]] == list(range(20))
        assert max(rows.stop - rows.start for rows in chunks) == most


def test_a_graph_larger_than_the_disk_is_refused_by_partition(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, refused: Refused
) -> None:
    ring = np.arange(40)
    arrays = {"x": np.zeros((40, 100_000), np.float32), "y": ring % 2, "src": ring, "dst": np.roll(ring, 1)}
    (folder := tmp_path / "g").mkdir()
    for name, array in arrays.items():
        np.save(folder / f"{name}.npy", array)
    monkeypatch.setattr(files.shutil, "disk_usage", lambda place: SimpleNamespace(free=10_000_000))
    graph = ("dataset=folder", f"dataset.path={folder}", "dataset.split=random", "world_size=2")
    refused("GiB of disk at least", "partition", *graph, "out=o")
    assert not (tmp_path / "o").exists()
    assert Folder(name="g", path=str(folder), split="random").load(None, 0).num_nodes == 40


def test_two_lists_of_edges_are_refused(tmp_path: Path) -> None:
    arrays = {"src": [0, 1], "dst": [1, 0], "indices": [1, 0], "indptr": [0, 1, 2], "y": [0, 1], "x": [[1.0], [2.0]]}
    for name, array in arrays.items():
        np.save(tmp_path / f"{name}.npy", np.array(array))
    with pytest.raises(ValueError, match=r"edges are src and dst, or indices and indptr; remove indices\.npy"):
        Folder(name="g", path=str(tmp_path)).load(None, 0)


class Circle:
    """Ends by collection: Python runs, and threads change, while numpy parses."""

    def __init__(self) -> None:
        self.itself = self

    def __del__(self) -> None:
        for _ in range(50):
            pass


def nested(depth: int, call: Callable[[], None]) -> None:
    call() if depth == 0 else nested(depth - 1, call)


def test_threads_at_different_depths_of_the_stack_read_what_was_saved(tmp_path: Path) -> None:
    file, expected = tmp_path / "rows.npy", np.arange(5)
    np.save(file, expected)
    errors: list[BaseException] = []

    def read() -> None:
        try:
            for _ in range(2000):
                for _ in range(20):
                    Circle()
                assert np.array_equal(load_npy(file), expected)
        except BaseException as error:
            errors.append(error)

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        threads = [threading.Thread(target=nested, args=(depth, read)) for depth in (0, 20, 50, 100)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(interval)
    assert not errors
