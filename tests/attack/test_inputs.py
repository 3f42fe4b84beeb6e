"""Graphs that somebody may hand in: what is accepted can be trained on and is the same by every reader, all else is
refused in one line, before memory is asked for."""

from __future__ import annotations

import contextlib
import random
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch_geometric.data import Data

import gnnpar
from attack.fuzzing import Counts, Silent, attempt
from attack.inputs import graph, targets
from checkpoints import train
from gnnpar.cli.main import run
from gnnpar.data.dataset import MATRICES, Dataset
from gnnpar.data.folder import Folder
from gnnpar.data.npz import NPZ
from gnnpar.data.saved import PT
from gnnpar.data.synthetic import SBM
from gnnpar.folds.edge_data import EdgeSizes
from gnnpar.models.hgt import HGT
from gnnpar.models.rgcn import RGCN

Arrays = dict[str, Any]  # Any: as numpy types the arrays of an archive
FEW, MANY = 150, 2000

TYPES = ("i8", "i4", "u8", "u4", "u2", "u1", "f8", "f4", "f2", "b1", "c8", "O", "U3", ">i4", "m8[s]")
NUMBERS = (0, 1, -1, 2, 3, 39, 40, 41, 255, 10**9, 2**31, 2**40, 2**62, 0.5, 1e300, float("nan"), float("inf"), -np.inf)


def changed(arrays: Arrays, rng: random.Random) -> Arrays:
    """One array of another type, shape or content, renamed or lost."""
    arrays = {name: array.copy() for name, array in arrays.items()}
    name = rng.choice(list(arrays))
    array = arrays[name]
    kind = rng.randrange(9)
    with np.errstate(all="ignore"):
        if kind == 0:
            del arrays[name]
        elif kind == 1:
            arrays[rng.choice(("x", "y", "edges", "node_labels", "train_masks", "z"))] = arrays.pop(name)
        elif kind == 2:
            dtype = rng.choice(TYPES)
            arrays[name] = array.astype("i8" if dtype.startswith("m") else dtype).astype(dtype)
        elif kind == 3:
            shapes = [(-1,), (-1, 1), (1, -1), (-1, 1, 1), *([(-1, 2)] if array.size % 2 == 0 else [])]
            arrays[name] = array[:0] if rng.random() < 0.2 else array.reshape(rng.choice(shapes))
        elif kind == 4:
            arrays[name] = array[: rng.randrange(len(array) + 1)]
        elif kind == 5:
            arrays[name] = array.T.copy() if rng.random() < 0.5 else np.concatenate([array, array])
        else:
            array = array if rng.random() < 0.5 else array.astype(rng.choice(["f8", "i8", "u8"]))
            flat = array.reshape(-1)
            for _ in range(rng.choice((1, 1, 5)) if flat.size else 0):
                flat[rng.randrange(flat.size)] = np.array(rng.choice(NUMBERS)).astype(array.dtype)
            arrays[name] = flat.reshape(array.shape)
    return arrays


def options(rng: random.Random) -> dict[str, Any]:
    """Fields of the dataset that a user might set beside it."""
    every: dict[str, list[Any]] = {
        "split": ["public", "random", "per_class"],
        "normalize": ["none", "row", "standard"],
        "task": ["auto", "single_label", "binary", "multi_label", "regression"],
        "symmetrize": [True, False],
        "self_loops": [True, False],
        "drop_duplicates": [True, False],
        "train_per_class": [1, 5, 10**6],
        "val_per_class": [0, 3],
        "train_fraction": [0.001, 0.5, 0.99],
        "val_fraction": [0.0, 0.5, 0.99],
        "split_index": [0, 1, 2**40],
    }
    return {key: rng.choice(values) for key, values in every.items() if rng.random() < 0.2}


def check(data: Dataset) -> None:
    """Silent where it cannot be trained on."""
    chosen = data.train_mask | data.val_mask | data.test_mask
    if data.task in MATRICES:
        rows, bounded = data.y[chosen], data.task == "multi_label"
        if data.y.shape != (data.num_nodes, data.num_classes) or bool(torch.isinf(rows).any()):
            raise Silent("a target that is no number")
        if bool(data.y[data.train_mask].isnan().all()):
            raise Silent("a training split without a label")
        if bounded and not bool(((rows == 0) | (rows == 1) | rows.isnan()).all()):
            raise Silent("a label that is neither 0 nor 1")
    else:
        if not -1 <= int(data.y.min()) <= int(data.y.max()) < data.num_classes:
            raise Silent("a label of no class")
        if not bool((data.y[chosen] >= 0).all()):
            raise Silent("a node of a split that has no label")
        if data.num_classes > max(2, data.num_nodes):
            raise Silent(f"{data.num_classes} classes of {data.num_nodes} nodes")
    if data.num_edges and not 0 <= int(data.edge_index.min()) <= int(data.edge_index.max()) < data.num_nodes:
        raise Silent("an edge of no node")
    if not torch.equal(torch.bincount(data.edge_index[1], minlength=data.num_nodes), data.in_degree):
        raise Silent("degrees are not those of the edges")
    if data.edges.type is not None and not 0 <= int(data.edges.type.min()) <= int(data.edges.type.max()) < (
        data.edge_sizes.types
    ):
        raise Silent("an edge of no type")
    if not bool(torch.isfinite(data.x).all()):
        raise Silent("a feature that is not finite")
    masks = torch.stack([data.train_mask, data.val_mask, data.test_mask])
    if int(masks.sum(0).max()) > 1 or not bool(masks[0].any()):
        raise Silent("a split that is empty or overlaps")


def case(number: int) -> tuple[Arrays, dict[str, Any]]:
    """The arrays of case `number`, and what is set beside them."""
    rng = random.Random(f"input/{number}")
    arrays: Arrays = dict(graph())
    if rng.random() < 0.2:
        arrays["y"] = (np.arange(120).reshape(40, 3) % 2).astype(rng.choice(["i8", "f4", "b1"]))
    fields: dict[str, Any] = {}
    if number % 7 == 6:
        arrays["y"] = targets(rng, 40)
        fields["task"] = "regression"
    if number % 5 == 4:  # self loops that are added would have neither
        arrays |= {"edge_type": np.arange(120) % 4, "edge_attr": np.ones((120, 3), dtype=np.float32)}
        fields["self_loops"] = False
    for _ in range(rng.choice((0, 1, 1, 1, 2, 3))):
        with contextlib.suppress(ValueError, TypeError, IndexError, OverflowError):  # of numpy: this one cannot be made
            arrays = changed(arrays, rng)
    return arrays, options(rng) | fields


def from_npz(arrays: Arrays, fields: dict[str, Any], place: Path, features: str) -> None:
    np.savez(place / "g.npz", **arrays)
    config: dict[str, Any] = fields | {"path": str(place / "g.npz"), "features": features}
    check(NPZ(**config).load(None, seed=0))


def from_folder(arrays: Arrays, fields: dict[str, Any], place: Path) -> None:
    """Whole and in chunks: both accept the same graph, or one of them says why not."""
    folder = place / "g"
    folder.mkdir(exist_ok=True)
    for file in folder.iterdir():
        file.unlink()
    for name, array in arrays.items():
        if name == "edge_index" and array.ndim > 1 and len(array) == 2:
            np.save(folder / "src.npy", array[0])
            np.save(folder / "dst.npy", array[1])
        np.save(folder / f"{name}.npy", array)
    config = Folder(path=str(folder), **fields)
    data = config.load(None, seed=0)
    check(data)
    if config.normalize != "standard":
        stored = config.stored(None, 0, place)
        if (stored.graph_hash, stored.split_hash) != (data.graph_hash, data.split_hash):
            raise Silent("read in chunks it is another graph")


def fuzz(numbers: range, place: Path, counts: Counts) -> None:
    for number in numbers:
        arrays, fields = case(number)
        if number % 2:
            read = partial(from_folder, arrays, fields, place)
        else:
            read = partial(from_npz, arrays, fields, place, ("file", "file", "identity", "degree")[number // 2 % 4])
        counts.add(f"input {number}", *attempt(read))


def test_an_input_is_accepted_as_it_is_or_refused_in_one_line(tmp_path: Path) -> None:
    counts = Counts()
    fuzz(range(FEW), tmp_path, counts)
    assert not counts.findings, "\n".join(counts.findings)
    assert counts.ended["accepted"] > FEW // 10
    assert counts.ended["refused"] > FEW // 10


@pytest.mark.slow
def test_many_inputs_are_accepted_as_they_are_or_refused_in_one_line(tmp_path: Path) -> None:
    counts = Counts()
    fuzz(range(FEW, MANY), tmp_path, counts)
    assert not counts.findings, "\n".join(counts.findings[:20])


def refusal(case: Any) -> str:
    ending, what = attempt(case)
    assert ending == "refused", (ending, what)
    return what


def test_a_label_of_a_billion_is_a_line_about_labels(tmp_path: Path) -> None:
    """It asked for 14.9 GiB and advised strategy=sar; `gnnpar partition` asked for 256 GB."""
    arrays = graph()
    arrays["y"][3] = 10**9
    np.savez(tmp_path / "g.npz", **arrays)
    line = refusal(lambda: NPZ(path=str(tmp_path / "g.npz")).load(None, seed=0))
    assert "the largest label, 1000000000, asks for 1000000001 classes of 40 nodes" in line
    assert "number the classes 0, 1, 2, ... without gaps" in line


@pytest.mark.parametrize("label", [2**63, 2**64 - 1])
def test_labels_beyond_63_bits_do_not_wrap(tmp_path: Path, label: int) -> None:
    """2^64 - 1 was read as -1, unlabelled."""
    arrays = graph()
    arrays["y"] = arrays["y"].astype(np.uint64)
    arrays["y"][4] = label
    arrays["train_mask"][4] = arrays["val_mask"][4] = arrays["test_mask"][4] = False
    np.savez(tmp_path / "g.npz", **arrays)
    assert f"the number {label} is beyond 2^63" in refusal(lambda: NPZ(path=str(tmp_path / "g.npz")).load(None, seed=0))


@pytest.mark.parametrize(
    ("fields", "line"),
    [
        ({"num_classes": 10**12}, "dataset.num_classes=1000000000000 is more than the 3000 nodes: lower it"),
        ({"num_communities": 10**12}, "dataset.num_communities=1000000000000 is more than the 3000 nodes"),
        ({"num_nodes": 10**12}, "dataset sbm with 1,000,000,000,000 nodes needs"),
        ({"num_features": 10**12}, "lower dataset.num_nodes or num_features"),
        ({"scale": 1e12}, "dataset sbm with 3,000,000,000,000,000 nodes needs"),
        ({"avg_degree": 1e12}, "is more than the 2999 others of a node: lower it"),
    ],
)
def test_a_graph_beyond_the_machine_is_refused_before_it_is_drawn(fields: dict[str, Any], line: str) -> None:
    assert line in refusal(lambda: SBM(**fields).load(None, seed=0))


def test_edges_that_a_file_only_repeats_are_refused_before_they_are_counted(tmp_path: Path) -> None:
    """A file of 1 kB names 2^40 edges."""
    x, y = torch.ones(3, 2), torch.arange(3)
    torch.save(Data(x=x, y=y, edge_index=torch.zeros(2, 1).long().expand(2, 1 << 40)), tmp_path / "g.pt")
    assert "dataset pt needs 65,536 GiB at least" in refusal(lambda: PT(path=str(tmp_path / "g.pt")).load(None, seed=0))


def test_an_archive_that_unpacks_beyond_memory_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    np.savez_compressed(tmp_path / "g.npz", **graph(), more=np.zeros(10**7))
    monkeypatch.setattr("gnnpar.files.memory_bytes", lambda: 10**7)
    line = refusal(lambda: NPZ(path=str(tmp_path / "g.npz")).load(None, seed=0))
    assert "its arrays needs 0 GiB at least" in line or "GiB at least, this machine has" in line


def test_more_clusters_than_nodes_are_refused_before_any_rank_starts(tmp_path: Path) -> None:
    clusters = ("strategy=minibatch", "strategy.sampler=cluster", "strategy.clusters=1000000000000")
    with pytest.raises(ValueError, match=r"strategy\.clusters=1000000000000, but the graph has 200 nodes: give"):
        train(tmp_path / "run", *clusters)
    assert not (tmp_path / "run" / "result.json").exists()


def test_matrices_of_relations_beyond_memory_are_refused_before_they_are_drawn() -> None:
    for config, types in ((RGCN(hidden=64), 1 << 32), (HGT(hidden=1 << 18, num_layers=2), 4)):
        with pytest.raises(ValueError, match=r"a model with model\.hidden=\d+, .* needs .* GiB at least"):
            config.on(EdgeSizes(types=types)).build(100, 3, seed=0)


@pytest.mark.parametrize("model", ["hgt", "rgat", "rgcn"])
def test_a_trained_model_refuses_types_of_edges_that_it_has_not_seen(tmp_path: Path, model: str) -> None:
    overrides = ["debug=tiny", "strategy=single", f"model={model}", "dataset=sbm_typed", "epochs=1", "model.hidden=8"]
    assert run("train", [*overrides, f"hydra.run.dir={tmp_path}"]) == 0
    trained = gnnpar.load(tmp_path)
    edges, types = torch.tensor([[0, 1], [1, 2]]), trained.edges.sizes.types
    assert trained(torch.zeros(3, trained.model.in_dim), edges, edge_type=torch.tensor([0, types - 1])).shape[0] == 3
    with pytest.raises(ValueError, match=rf"edge_type of edge 1 is {types}, outside 0\.\.{types - 1}"):
        trained(torch.zeros(3, trained.model.in_dim), edges, edge_type=torch.tensor([0, types]))
