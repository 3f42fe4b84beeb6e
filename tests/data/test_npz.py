"""A user's own graph: what was saved is what is loaded, and each mistake in the file is one clear line."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import gnnpar
from conftest import Run
from data.samples import npz_arrays, raw_graph
from gnnpar import files
from gnnpar.data import Preprocess, prepare
from gnnpar.data.npz import NPZ
from gnnpar.parallel.objective import SPLITS


def saved(folder: Path, **changes: Any) -> str:
    arrays: dict[str, Any] = npz_arrays(**changes)
    np.savez(folder / "my.npz", **arrays)
    return str(folder / "my.npz")


def test_round_trip(tmp_path):
    data = NPZ(path=saved(tmp_path)).load(None, 0)
    expected = prepare(raw_graph(), Preprocess(), seed=0)
    assert (data.graph_hash, data.split_hash, data.task) == (expected.graph_hash, expected.split_hash, "single_label")
    assert NPZ(path="my.npz").load(tmp_path, 0).graph_hash == expected.graph_hash


@pytest.mark.parametrize("dtype", [np.int32, np.uint32, np.uint8, np.int16])
def test_any_integer_type_will_do(tmp_path, dtype):
    path = saved(tmp_path, edge_index=npz_arrays()["edge_index"].astype(dtype), y=npz_arrays()["y"].astype(dtype))
    assert NPZ(path=path).load(None, 0).graph_hash == prepare(raw_graph(), Preprocess(), seed=0).graph_hash


def test_symmetrize_and_missing_masks(tmp_path):
    path = saved(tmp_path, **dict.fromkeys(("train_mask", "val_mask", "test_mask")))
    ends = NPZ(path=path, symmetrize=True, split="random").load(None, 0).edge_index.T.tolist()
    assert sorted(ends) == sorted([b, a] for a, b in ends)
    with pytest.raises(ValueError, match="has no split of its own"):
        NPZ(path=path).load(None, 0)
    only_train = NPZ(path=saved(tmp_path, val_mask=None, test_mask=None)).load(None, 0)
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
    path = saved(tmp_path, x=None)
    assert torch.equal(NPZ(path=path, features="identity").load(None, 0).x, torch.eye(6))
    degree = NPZ(path=path, features="degree").load(None, 0).x  # in-degrees 1 1 2 1 0 0 of the file
    assert degree.argmax(1).tolist() == [1, 1, 1, 1, 0, 0]
    with pytest.raises(ValueError, match=r"has no x .it holds .*; add it; or set dataset.features=identity or degree"):
        NPZ(path=path).load(None, 0)


def test_many_columns_of_labels_are_multi_label(tmp_path):
    data = NPZ(path=saved(tmp_path, y=np.eye(6, 4, dtype=np.uint8))).load(None, 0)
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
        saved(tmp_path, **content)
    with pytest.raises(ValueError, match=line) as caught:
        NPZ(path="my.npz").load(tmp_path, 0)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(("path", "line"), [(None, "dataset.path is not set"), ("a.npz", "there is no file .*a.npz")])
def test_missing_file_is_one_line(tmp_path, path, line):
    with pytest.raises(ValueError, match=line):
        NPZ(path=path).load(tmp_path, 0)


def test_file_cut_in_half_is_one_line(tmp_path):
    whole = Path(saved(tmp_path)).read_bytes()
    (tmp_path / "my.npz").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ValueError, match=r"cannot be read as \.npz"):
        NPZ(path="my.npz").load(tmp_path, 0)


def test_a_path_with_other_letters_than_ascii_is_read(tmp_path: Path) -> None:
    (folder := tmp_path / "données").mkdir()
    done = gnnpar.train("gcn", saved(folder), strategy="single", epochs=1, folder=tmp_path / "run")
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
