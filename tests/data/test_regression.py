"""Real targets: from a file to a split, a shard on disk and a training that equals plain autograd on one device."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import gnnpar
from gnnpar.data.dataset import Dataset
from gnnpar.data.npz import NPZ
from gnnpar.data.stored import Stored
from gnnpar.models.gcn import GCN
from gnnpar.models.sage import SAGE
from gnnpar.parallel.halo.strategy import GraphParallel
from gnnpar.parallel.sequential.strategy import SAR
from gnnpar.parallel.single.strategy import Single
from gnnpar.partition.manifest import read_manifest
from gnnpar.partition.on_disk import open_part, write_shards
from gnnpar.training.result.result import fault
from gnnpar.verify.conformance import small_graph, train_in_threads

NODES, TARGETS = 60, 2


def graph() -> Dataset:
    """Targets that neighbours explain; every seventh node has none, and is in no split."""
    plain = small_graph(num_nodes=NODES)
    gen = torch.Generator().manual_seed(1)
    y = plain.x @ torch.randn(plain.num_features, TARGETS, generator=gen) + 5
    y[::7] = torch.nan
    train, val, test = (m & ~torch.isnan(y[:, 0]) for m in (plain.train_mask, plain.val_mask, plain.test_mask))
    given = {"x": plain.x, "edge_index": plain.edge_index, "masks": (train, val, test)}
    return Dataset.of("small", y=y, num_classes=TARGETS, task="regression", **given)


@pytest.mark.parametrize("strategy", [GraphParallel(), SAR()], ids=["graph_parallel", "sar"])
def test_ranks_train_as_the_single_device(strategy) -> None:
    data, model = graph(), GCN(num_layers=2, hidden=8, dropout=0.0)
    whole = train_in_threads(Single(), model, data, world=1)
    parts = train_in_threads(strategy, model, data, world=3)
    assert len(set(whole.losses)) == len(whole.losses)
    assert parts.losses == pytest.approx(whole.losses, rel=1e-12)


def test_nodes_without_a_target_are_in_no_split(tmp_path: Path) -> None:
    data = graph()
    file = tmp_path / "g.npz"
    np.savez(file, x=data.x.numpy(), y=data.y.numpy()[:, 0], edge_index=data.edge_index.numpy())
    read = NPZ(path=str(file), task="regression", split="random").load(None, 0)
    assert (read.task, read.num_classes, read.y.shape) == ("regression", 1, (NODES, 1))
    chosen = read.train_mask | read.val_mask | read.test_mask
    assert torch.equal(chosen, ~torch.isnan(read.y[:, 0]))
    with pytest.raises(ValueError, match=r"is regression: dataset.split=per_class needs one class a node"):
        NPZ(path=str(file), task="regression", split="per_class").load(None, 0)


@pytest.mark.parametrize(
    ("y", "line"),
    [
        (np.full(NODES, np.nan), "no node has a target"),
        (np.where(np.arange(NODES) == 3, np.inf, 0.5), "1 targets are infinite or beyond float32; scale y"),
        (np.ones((NODES, 2, 2)), r"\[60\] or \[60, targets\], got torch.float64 \[60, 2, 2\]"),
    ],
)
def test_what_is_no_target_is_one_line(y: np.ndarray, line: str, tmp_path: Path) -> None:
    data = graph()
    np.savez(tmp_path / "g.npz", x=data.x.numpy(), y=y, edge_index=data.edge_index.numpy())
    with pytest.raises(ValueError, match=line):
        NPZ(path=str(tmp_path / "g.npz"), task="regression", split="random").load(None, 0)


def test_shards_on_disk_are_those_in_memory(tmp_path: Path) -> None:
    data = graph()
    write_shards(Stored.of(data), torch.arange(NODES) % 2, 2, tmp_path / "shards", edge_ids=False, setup={})
    manifest = read_manifest(tmp_path / "shards")
    assert (manifest.task, manifest.num_classes) == ("regression", TARGETS)
    shard = open_part(tmp_path / "shards", manifest, 1, edge_ids=False)
    torch.testing.assert_close(shard.y, data.y[1::2], rtol=0, atol=0, equal_nan=True)


def test_a_run_explains_the_targets(tmp_path: Path) -> None:
    data = graph()
    masks = {"train_mask": data.train_mask, "val_mask": data.val_mask, "test_mask": data.test_mask}
    given = {"x": data.x, "y": data.y, "edge_index": data.edge_index, **masks}
    how: Any = {"strategy": "graph_parallel", "world_size": 2, "comm": "threads", "epochs": 60, "threads_per_rank": 1}
    how |= {"dataset.task": "regression", "optim.lr": 0.05, "folder": tmp_path / "run"}
    run = gnnpar.train(SAGE(num_layers=2, hidden=16, dropout=0.0), given, **how)
    metric = run.result["metric"]
    assert metric["name"] == "r2"
    assert not fault(run.result)
    assert metric["train"] > 0.5
