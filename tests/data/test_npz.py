"""A user's own graph: what was saved is what is loaded, and each mistake in the file is one clear line."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import gnnpar
from data.samples import npz_arrays, raw_graph
from gnnpar.data import Preprocess, prepare
from gnnpar.data.npz import NPZ
from gnnpar.parallel.objective import SPLITS


def saved(folder: Path, *, name: str = "my.npz", **changes: Any) -> str:
    arrays: dict[str, Any] = npz_arrays(**changes)
    np.savez(folder / name, **arrays)
    return str(folder / name)


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
    masks = dict.fromkeys(("train_mask", "val_mask", "test_mask"))
    path = saved(tmp_path, **masks)
    data = NPZ(path=path, symmetrize=True, split="random").load(None, 0)
    src, dst = data.edge_index
    assert {(a, b) for a, b in zip(src.tolist(), dst.tolist(), strict=True)} == {
        (b, a) for a, b in zip(src.tolist(), dst.tolist(), strict=True)
    }
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


def test_mistakes_are_one_line(tmp_path):
    def fails(match, **fields):
        with pytest.raises(ValueError, match=match) as caught:
            NPZ(**fields).load(tmp_path, 0)
        assert "\n" not in str(caught.value)

    (tmp_path / "text.npz").write_text("hello")
    (tmp_path / "empty.npz").write_bytes(b"")
    saved(tmp_path, name="names.npz", y=np.array(list("abcabc")))
    saved(tmp_path, name="objects.npz", y=np.array([None] * 6))
    whole = Path(saved(tmp_path)).read_bytes()
    (tmp_path / "cut.npz").write_bytes(whole[: len(whole) // 2])
    fails("dataset.path is not set")
    fails("there is no file .*nothing.npz", path="nothing.npz")
    for name in ("text", "empty", "objects", "cut"):
        fails("cannot be read as .npz", path=f"{name}.npz")
    fails("y has dtype <U1; store numbers", path="names.npz")
    fails("has no edge_index", path=saved(tmp_path, edge_index=None))
    fails("has no y", path=saved(tmp_path, y=None))
    nan = npz_arrays()["x"].copy()
    nan[3, 1] = np.nan
    fails("features hold 1 NaN .*node 3, feature 1", path=saved(tmp_path, x=nan))


@pytest.mark.parametrize("key", ["edge_color", "node_type"])
def test_what_no_model_reads_is_refused(tmp_path, key):
    changes: dict[str, Any] = {key: np.ones(5)}
    with pytest.raises(ValueError, match=f"dataset npz: it holds {key}, which models do not read") as caught:
        NPZ(path=saved(tmp_path, **changes)).load(None, 0)
    assert "\n" not in str(caught.value)


def test_a_path_with_other_letters_than_ascii_is_read(tmp_path: Path) -> None:
    (folder := tmp_path / "données").mkdir()
    ring = np.arange(9)
    masks = {f"{split}_mask": ring % 3 == i for i, split in enumerate(SPLITS)}
    x = np.ones((9, 2), np.float32)
    np.savez(folder / "g.npz", x=x, y=ring % 3, edge_index=np.stack([ring, np.roll(ring, 1)]), **masks)
    done = gnnpar.train("gcn", folder / "g.npz", strategy="single", epochs=1, folder=tmp_path / "run")
    assert done.result["status"] == "completed"
