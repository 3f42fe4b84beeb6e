"""What a twenty-sixth attack found, on the mends of the twenty-fifth: processes and folders that outlive their end,
counts that many share, YAML in processes that a launcher starts."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from torch_geometric.data import Data, HeteroData

from checkpoints import train
from conftest import Run, environment
from gnnpar.cli.main import run
from gnnpar.codecs.adaptive.codec import Adaptive, AdaptiveRows
from gnnpar.data import hetero, saved
from gnnpar.files import file_hash, read_checked_json, write_checked_json

TINY = ("dataset=sbm", "dataset.num_nodes=60", "strategy=single", "epochs=1", "threads_per_rank=1")
"""The number of another user."""


# --- jobs of sweeps


# --- what ends, and what it leaves


def test_a_command_that_is_told_to_end_leaves_nothing(tmp_path: Path) -> None:
    """SIGTERM of `gnnpar partition` left what was written so far beside its folder."""
    command = [sys.executable, "-m", "gnnpar", "partition", "dataset=sbm", "dataset.num_nodes=400000", "world_size=4"]
    process = subprocess.Popen(
        [*command, "dataset.num_features=16", "partition=random", f"out={tmp_path}/shards"],
        cwd=tmp_path,
        env=environment() | {"GNNPAR_CACHE": str(tmp_path / "cache")},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        deadline = time.monotonic() + 120
        while not list(tmp_path.glob(".shards.*")) and time.monotonic() < deadline and process.poll() is None:
            time.sleep(0.02)
        process.send_signal(signal.SIGTERM)
        _, err = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == 1, err
    assert "Traceback" not in err
    assert not list(tmp_path.glob(".shards.*")) and not (tmp_path / "shards").exists()


# --- counts that a file gives once, and many share


def test_edges_of_all_types_are_asked_for_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each type was within bounds; 5 kB of a file took 5.7 GiB."""
    data, asked = HeteroData(), list[float]()
    data["a"].x, data["a"].y, data["a"].train_mask = torch.ones(4, 2), torch.arange(4) % 2, torch.ones(4).bool()
    for kind in range(3):
        data["a", str(kind), "a"].edge_index = torch.zeros(1, 1, dtype=torch.long).expand(2, 1000)
    monkeypatch.setattr(hetero, "require_memory", lambda nbytes, *_: asked.append(nbytes))
    hetero.flattened("given", hetero.stores_of("given", data))
    assert asked[0] == 4 * 8 * 2 * 3000


def test_a_typed_graph_asks_for_its_memory(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    """It ended in an error of numpy, or at the hands of the kernel."""
    assert run("train", ["dataset=sbm_typed", "dataset.num_nodes=100000000000", "model=rgcn", "strategy=single"]) == 1
    assert "GiB at least, this machine has" in capsys.readouterr().err


def test_masks_of_parts_are_bounded(capsys: pytest.CaptureFixture[str]) -> None:
    masks = ["strategy=cofree", "strategy.drop_edge=0.5", "strategy.masks=1001"]
    assert run("train", [*TINY[:2], *masks, "world_size=2"]) == 2
    assert "strategy.masks=1001" in capsys.readouterr().err


@pytest.mark.parametrize(("warmup", "period", "ahead"), [(1, 1, 1), (2, 20, 3), (5, 4, 2), (3, 7, 30)])
def test_epochs_that_trace_are_counted_without_counting(warmup: int, period: int, ahead: int) -> None:
    """A plan's trace_epochs of 10^15 were counted one by one."""
    codec = AdaptiveRows.__new__(AdaptiveRows)
    codec._config = Adaptive(warmup=warmup, period=period, trace_epochs=ahead)
    for epoch in range(60):
        following = next(later for later in range(epoch + 1, 200) if codec._assigns(later))
        assert codec._next_after(epoch) == following


# --- what files say


@pytest.mark.parametrize("part", ["train", "val", "test"])
def test_masks_are_tensors(part: str) -> None:
    """val_mask as a list was left out, and with it the accuracy."""
    nodes = {f"{each}_mask": torch.ones(4).bool() for each in ("train", "val", "test")}
    data = Data(x=torch.ones(4, 2), y=torch.arange(4) % 2, edge_index=torch.zeros(2, 1, dtype=torch.long), **nodes)
    saved.raw_graph("given", data)
    data[f"{part}_mask"] = [True] * 4
    with pytest.raises(ValueError, match=f"{part}_mask is a list; give a tensor of booleans"):
        saved.raw_graph("given", data)


def test_info_needs_no_word(run_cli: Run) -> None:
    done = run_cli("train", *TINY, "--info")
    assert done.returncode == 0, done.stderr
    assert "Hydra" in done.stdout


# --- what ranks, and the epochs of a run, have alike


def test_a_checkpoint_gives_no_rank_other_weights(tmp_path: Path) -> None:
    """A run went on with replicas that differed, and reported the metrics of both."""
    two = ("strategy=graph_parallel", "world_size=2")
    train(tmp_path / "run", *two, "epochs=2", "checkpoint.every=1")
    folder = tmp_path / "run" / "checkpoint" / "epoch-000002"
    tree = torch.load(folder / "rank-1.pt", weights_only=True)
    changed = next(iter(tree["model"]))
    tree["model"][changed] += 1
    torch.save(tree, folder / "rank-1.pt")
    manifest = read_checked_json(folder / "manifest.json")
    facts = {"nbytes": (folder / "rank-1.pt").stat().st_size, "sha256": file_hash(folder / "rank-1.pt")}
    manifest["files"]["rank-1.pt"] = facts
    write_checked_json(folder / "manifest.json", manifest)
    outcome = train(tmp_path / "run", *two, "epochs=4", "resume=auto")
    assert outcome.status == "failed" and outcome.error is not None
    assert f"epoch-000002 has other values of {changed} for rank 1 than for a rank before it" in outcome.error


@pytest.mark.parametrize(("model", "kept"), [("gat", "features"), ("gcn", ("fold", 0))])
def test_rows_that_a_checkpoint_keeps_are_as_many_as_are_due(tmp_path: Path, model: str, kept: object) -> None:
    """Kernels read as many as the shard has."""
    cached = ("strategy=graph_parallel", "world_size=2", "first_layer=cached", f"model={model}")
    train(tmp_path / "run", *cached, "epochs=2", "checkpoint.every=1")
    folder = tmp_path / "run" / "checkpoint" / "epoch-000002"
    tree = torch.load(folder / "rank-0.pt", weights_only=True)
    tree["engine"]["cache"][kept] = tree["engine"]["cache"][kept][:2].clone()
    torch.save(tree, file := folder / "rank-0.pt")
    manifest = read_checked_json(folder / "manifest.json")
    manifest["files"][file.name] = {"nbytes": file.stat().st_size, "sha256": file_hash(file)}
    write_checked_json(folder / "manifest.json", manifest)
    outcome = train(tmp_path / "run", *cached, "epochs=4", "resume=auto")
    assert outcome.status == "failed"
    assert "rows are due: start afresh" in str(outcome.error)
