"""Non-finite numbers, full memory and disks, SIGTERM: one line that says what to do, and no finished epoch lost."""

import errno
import os
import resource
import signal
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from checkpoints import SMALL, hashes, last, result, rows, strategy_of, train
from composing import names, rest_slow, settings_of
from gnnpar.cli.train import run_training
from gnnpar.config.compose import compose
from gnnpar.parallel.engine import FlatEngine
from gnnpar.parallel.sequential.out_of_core import OutOfCoreEngine
from gnnpar.track.tracker import Null
from gnnpar.training.checkpoint import files as checkpoint

pytestmark = pytest.mark.fault


@pytest.mark.parametrize("strategy", rest_slow([*names("strategy"), "sar strategy.logical_parts=3"]))
def test_loss_not_finite_names_first_tensor_and_keeps_last_checkpoint(tmp_path: Path, strategy: str) -> None:
    """Weights of 1e12 overflow fp32 in some layer."""
    name, *more = strategy.split()
    common = (*strategy_of(name), *more, "model.num_layers=5", "model.dropout=0", "checkpoint.every=1")
    outcome = train(tmp_path, *common, "optim=sgd", "optim.lr=1e12", "epochs=9")
    assert outcome.exit_code == 1
    found = last(tmp_path)
    model, _ = found.merged(torch.device("cpu"))
    assert all(bool(torch.isfinite(p).all()) for p in model.values())
    if "holds Inf or NaN" in str(outcome.error):  # what quantizes looks at its rows itself
        assert "epoch 1, layer 4, forward: a row for rank" in str(outcome.error)
        return
    assert found.epoch == len(rows(tmp_path)) - 1, "the epoch that went wrong is no checkpoint"
    weight = "a weight after the step of epoch" in str(outcome.error)  # it left its type, with a finite gradient
    first = "layers." if weight else "the output of layers."
    assert f"the first tensor that is not finite is {first}" in str(outcome.error), outcome.error
    assert "(layer " in str(outcome.error)
    assert str(outcome.error).endswith(f"lower optim.lr or set optim.clip; the last good checkpoint is {found.folder}")


def test_gradient_not_finite_leaves_weights_unchanged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gradients_of = FlatEngine.gradients_of

    def poisoned(self: FlatEngine, bucket: torch.Tensor) -> dict[str, torch.Tensor]:
        found = gradients_of(self, bucket)
        if bool((bucket[:-1] != 0).any()) and len(rows_of(tmp_path)) >= 3:
            name = next(iter(found))
            found[name] = torch.full_like(found[name], float("inf"))
        return found

    monkeypatch.setattr(FlatEngine, "gradients_of", poisoned)
    outcome = train(tmp_path, "strategy=graph_parallel", "checkpoint.every=3", "epochs=9")
    assert "the gradient of epoch 3 is not finite (loss " in str(outcome.error)
    assert "the gradient of layers.0.conv.weight (layer 0), on rank 0" in str(outcome.error)
    assert last(tmp_path).epoch == 3


def rows_of(folder: Path) -> list[dict[str, Any]]:
    return rows(folder) if (folder / "metrics.jsonl").exists() else []


@pytest.mark.parametrize(
    ("overrides", "fits"),
    [
        (("strategy=graph_parallel",), "strategy=sar strategy.logical_parts=8 world_size=1 trains out of core"),
        (("strategy=single",), "strategy=sar strategy.logical_parts=4 trains out of core"),
        (("strategy=sar",), "set strategy.prefetch=0 strategy.rounds=peer, or strategy.logical_parts=8 world_size=1"),
        (("strategy=sar", "strategy.logical_parts=3"), "set strategy.logical_parts=6"),
    ],
)
def test_out_of_memory_names_a_setting_that_needs_less(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, overrides: tuple[str, ...], fits: str
) -> None:
    def greedy(*arguments: Any, **keywords: Any) -> None:
        torch.empty(1 << 50)

    for engine in (FlatEngine, OutOfCoreEngine):
        monkeypatch.setattr(engine, "train_epoch", greedy)
    outcome = train(tmp_path, *overrides)
    assert "MemoryError: out of memory (4194304.00 GiB were asked for): " in str(outcome.error)
    assert fits in str(outcome.error)
    assert result(tmp_path)["status"] == "failed"


@contextmanager
def files_up_to(nbytes: int) -> Iterator[None]:
    """Writes beyond fail, as on a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (nbytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_checkpoint_larger_than_the_disk_is_skipped_with_a_line(tmp_path: Path, capsys) -> None:
    common = ("strategy=graph_parallel", "checkpoint.every=2", "model.hidden=256", "epochs=4")
    with files_up_to(20_000):
        assert train(tmp_path, *common).exit_code == 0
    said = capsys.readouterr().out
    assert said.count(" not written: ") == 2
    assert "checkpoint of epoch 2 not written: " in said
    assert len(rows(tmp_path)) == 4
    assert list((tmp_path / "checkpoint").iterdir()) == []


@pytest.mark.parametrize("strategy", rest_slow(names("strategy")))
def test_full_disk_keeps_earlier_checkpoints(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys, strategy: str
) -> None:
    fsync = os.fsync

    def full(handle: int) -> None:
        if len(checkpoint.folders(tmp_path)) == 1:
            raise OSError(errno.ENOSPC, "No space left on device")
        fsync(handle)

    monkeypatch.setattr(checkpoint.os, "fsync", full)
    assert train(tmp_path, *strategy_of(strategy), "checkpoint.every=2", "epochs=6").exit_code == 0
    assert capsys.readouterr().out.count("not written: No space left on device") == 2
    assert [folder.name for folder in (tmp_path / "checkpoint").iterdir()] == ["epoch-000002"]
    assert last(tmp_path).epoch == 2


def test_disk_too_full_for_metrics_ends_the_run_in_one_line(tmp_path: Path) -> None:
    with files_up_to(3000):
        outcome = train(tmp_path, "strategy=single", "epochs=50", "checkpoint.keep=0")
    assert outcome.exit_code == 1
    assert "metrics.jsonl cannot be written: File too large" in str(outcome.error)
    assert "result.json cannot be written (File too large)" in str(outcome.error)


@dataclass(frozen=True)
class Terminating:
    """Sends SIGTERM, or another signal, to this process after an epoch."""

    epoch: int
    number: signal.Signals = signal.SIGTERM

    def build(self, run_dir: Path, epochs: int, job: Mapping[str, Any]) -> Null:
        told = Null()
        told.log = lambda row: os.kill(os.getpid(), self.number) if row["epoch"] == self.epoch else None
        return told


@pytest.mark.parametrize("strategy", ["graph_parallel", "single"])
def test_sigterm_ends_ranks_in_threads_after_their_epoch(tmp_path: Path, capsys, strategy: str) -> None:
    common = (f"strategy={strategy}", "epochs=6")
    settings = replace(compose([*SMALL, *common]), tracker=Terminating(3))
    (tmp_path / "run").mkdir()
    assert run_training(settings, tmp_path / "run").status == "interrupted"
    told = result(tmp_path / "run")
    assert (told["status"], told["epochs_done"]) == ("interrupted", last(tmp_path / "run").epoch)
    assert 4 <= told["epochs_done"] <= 5, "the signal may reach this process an epoch late"
    assert "asked to end: checkpoint after epoch" in capsys.readouterr().out
    assert train(tmp_path / "run", "resume=auto", *common).exit_code == 0
    assert train(tmp_path / "whole", *common).exit_code == 0
    assert hashes(tmp_path / "run") == hashes(tmp_path / "whole")


def test_ctrl_c_ends_a_rank_in_a_thread_at_once(tmp_path: Path) -> None:
    """Ranks in threads of another process: test_failures.py."""
    settings = replace(settings_of(*SMALL, "strategy=single", "epochs=6"), tracker=Terminating(3, signal.SIGINT))
    outcome = run_training(settings, tmp_path)
    assert (outcome.status, outcome.error, outcome.exit_code) == ("interrupted", "interrupted by a signal", 1)
    told = result(tmp_path)
    assert (told["status"], told["error"]) == ("interrupted", "interrupted by a signal")
    assert told["epochs_done"] < 6
    assert not (tmp_path / "checkpoint").exists()
