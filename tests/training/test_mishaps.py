"""Non-finite numbers, full memory and disks, read-only folders, SIGTERM: one line, and no finished epoch lost."""

import errno
import json
import os
import re
import resource
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from checkpoints import SMALL, hashes, last, result, rows, strategy_of, train
from composing import names, rest_slow, settings_of
from conftest import Run, environment
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


JOB = (*SMALL, "strategy=single", "epochs=2")


@pytest.fixture
def mounted(tmp_path: Path) -> Iterator[Path]:
    """Mount a tmpfs of 2 MiB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=2m", "gnnpar-test", str(folder)]
    if shutil.which("mount") is None or subprocess.run(mount, capture_output=True, check=False).returncode != 0:
        pytest.skip("no file system can be mounted here")
    yield folder
    subprocess.run(["umount", "--lazy", str(folder)], check=True)


def one_line(done: subprocess.CompletedProcess[str]) -> str:
    assert done.stderr.startswith("gnnpar: ")
    assert done.stderr.count("\n") == 1, done.stderr
    return done.stderr.removeprefix("gnnpar: ").rstrip("\n")


@pytest.fixture
def unwritable(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """A path below which nothing can be written: of a file, below a file, on a file system that is read only."""
    if request.param == "read only":
        disk: Path = request.getfixturevalue("mounted")
        disk.chmod(0o755)
        subprocess.run(["mount", "-o", "remount,ro", str(disk)], check=True)
        return disk
    (tmp_path / "file").write_text("")
    return tmp_path / "file" / ("below" if request.param == "below a file" else "")


@pytest.mark.parametrize("unwritable", ["a file", "below a file", "read only"], indirect=True)
@pytest.mark.parametrize(
    "command",
    [
        f"train {' '.join(JOB)} hydra.run.dir={{place}}",
        f"train -m {' '.join(JOB)} hydra.sweep.dir={{place}}",
        "compare {run} --html {place}/page.html",
        "compare {run} --figures {place}/figures",
        "export {run} --out {place}/export",
        "partition dataset=sbm dataset.num_nodes=200 world_size=2 out={place}/shards",
        "new model mine --into {place}",
    ],
)
def test_unwritable_output_is_one_line(run_here: Run, finished: Path, unwritable: Path, command: str) -> None:
    done = run_here(*command.format(run=finished, place=unwritable).split())
    assert done.returncode == 2
    line = one_line(done)
    assert str(unwritable) in line
    ends = (": File exists", ": Not a directory", "is a file", ": Read-only file system")
    assert line.endswith(ends) or not command.startswith("train")


def fill(disk: Path, leave: int) -> Path:
    """A file that leaves so many bytes free."""
    ballast = disk / "ballast"
    there = os.statvfs(disk)
    ballast.write_bytes(bytes(there.f_bavail * there.f_frsize - leave))
    return ballast


def epochs_of(folder: Path) -> list[int]:
    """Epochs of the rows, every one of which is whole."""
    return [json.loads(line)["epoch"] for line in (folder / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("comm", ["threads", pytest.param("gloo", marks=pytest.mark.slow)])
def test_full_disk_leaves_the_last_row_and_the_result(run_here: Run, run_cli: Run, mounted: Path, comm: str) -> None:
    run_train = run_here if comm == "threads" else run_cli  # ranks that are processes write to the terminal themselves
    run = mounted / "run"
    job = (*SMALL[1:], f"comm={comm}", "strategy=graph_parallel", f"hydra.run.dir={run}", "checkpoint.keep=3")
    ballast = fill(mounted, leave=(1 << 20) + 150_000)
    done = run_train("train", *job, "epochs=2000", "checkpoint.every=3")
    assert done.returncode == 1
    line = one_line(done)
    result = json.loads((run / "result.json").read_text())
    last = result["epochs_done"] - 1
    assert line.endswith(
        f"DiskFull: the disk of {run} is full: the run ends after epoch {last}; free some space, and resume=auto goes "
        "on from the last checkpoint"
    )
    assert (result["status"], result["error"]) == ("failed", line)
    assert epochs_of(run) == list(range(last + 1))
    assert last > 10
    assert (
        f"the disk of {run} is full: only the last checkpoint stays" in done.stdout or "the one before" in done.stdout
    )
    assert len(list((run / "checkpoint").glob("epoch-*"))) == 1
    ballast.unlink()
    again = run_train("train", *job, f"epochs={last + 3}", "resume=auto")
    assert (again.returncode, again.stderr) == (0, "")
    assert epochs_of(run) == list(range(last + 3))
    assert [each.name for each in run.glob(".*")] == [".gnnpar.lock"]


def test_disk_full_before_the_start_is_one_line(run_here: Run, mounted: Path) -> None:
    run = mounted / "run"
    fill(mounted, leave=0)
    done = run_here("train", *JOB, f"hydra.run.dir={run}")
    assert done.returncode in (1, 2)
    assert one_line(done).endswith("No space left on device")


def test_prediction_on_full_disk_is_one_line_and_leaves_no_file(run_here: Run, tmp_path: Path, mounted: Path) -> None:
    """A mapped page without room on the disk kills the process by SIGBUS."""
    assert run_here("train", *SMALL[1:], "comm=threads", f"hydra.run.dir={tmp_path / 'run'}").returncode == 0
    fill(mounted, leave=4096)
    done = run_here("predict", str(tmp_path / "run"), "comm=threads", "--out", str(mounted / "out.npy"))
    assert done.returncode == 1
    assert re.search(r"/\.out\.npy\.\w+\.partial cannot be written: No space left on device", one_line(done))
    assert [path.name for path in mounted.iterdir() if "out" in path.name] == []


@pytest.mark.slow  # a process of its own
def test_full_disk_for_stdout_does_not_end_the_run(tmp_path: Path, mounted: Path) -> None:
    job = (*SMALL[:5], *SMALL[6:], "strategy=single", "epochs=30", "hydra.run.dir=run")
    command = [sys.executable, "-m", "gnnpar", "train", *job]
    with (mounted / "log").open("w") as log:
        fill(mounted, leave=0)
        read = {"stdout": log, "stderr": subprocess.PIPE, "text": True, "check": False}
        done = subprocess.run(command, cwd=tmp_path, env=environment(), **read)
    assert (done.returncode, done.stderr) == (0, "")
    assert json.loads((tmp_path / "run" / "result.json").read_text())["status"] == "completed"


def test_sweep_job_on_full_disk_is_one_line(run_here: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device", "/there/plan.json")

    monkeypatch.setattr("gnnpar.cli.train.run_training", full)
    done = run_here("train", "-m", *JOB, "hydra.sweep.dir=sweep")
    assert done.returncode == 1
    assert one_line(done) == "/there/plan.json cannot be used: No space left on device"
    assert "sweep: 0 of 1 done, 1 failed" in done.stdout
