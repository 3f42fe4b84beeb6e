"""Read-only folders and full disks: one line and the exit code of the guide, no traceback."""

import errno
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from checkpoints import SMALL
from conftest import Run, environment
from gnnpar.cli import train

pytestmark = pytest.mark.fault

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


PLACES = ("a file", "below a file", "read only")


@pytest.mark.parametrize("unwritable", PLACES, indirect=True)
@pytest.mark.parametrize("sweep", [False, True])
def test_unwritable_run_folder_is_one_line(run_here: Run, unwritable: Path, sweep: bool) -> None:
    where = ("-m", f"hydra.sweep.dir={unwritable}") if sweep else (f"hydra.run.dir={unwritable}",)
    done = run_here("train", *JOB, *where)
    assert done.returncode == 2
    line = one_line(done)
    assert str(unwritable) in line
    assert line.endswith((": File exists", ": Not a directory", "is a file", ": Read-only file system"))


@pytest.mark.parametrize("unwritable", PLACES, indirect=True)
@pytest.mark.parametrize(
    "command",
    [
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
    assert str(unwritable) in one_line(done)


def fill(disk: Path, leave: int) -> Path:
    """A file that leaves so many bytes free."""
    ballast = disk / "ballast"
    there = os.statvfs(disk)
    ballast.write_bytes(bytes(there.f_bavail * there.f_frsize - leave))
    return ballast


def rows_of(folder: Path) -> list[int]:
    """Epochs of the rows, every one of which is whole."""
    return [json.loads(line)["epoch"] for line in (folder / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("comm", ["threads", pytest.param("gloo", marks=pytest.mark.slow)])
def test_full_disk_leaves_the_last_row_and_the_result(run_here: Run, run_cli: Run, mounted: Path, comm: str) -> None:
    train = run_here if comm == "threads" else run_cli  # ranks that are processes write to the terminal themselves
    run = mounted / "run"
    job = (*SMALL[1:], f"comm={comm}", "strategy=graph_parallel", f"hydra.run.dir={run}", "checkpoint.keep=3")
    ballast = fill(mounted, leave=(1 << 20) + 150_000)
    done = train("train", *job, "epochs=2000", "checkpoint.every=3")
    assert done.returncode == 1
    line = one_line(done)
    result = json.loads((run / "result.json").read_text())
    last = result["epochs_done"] - 1
    assert line.endswith(
        f"DiskFull: the disk of {run} is full: the run ends after epoch {last}; free some space, and resume=auto goes "
        "on from the last checkpoint"
    )
    assert (result["status"], result["error"]) == ("failed", line)
    assert rows_of(run) == list(range(last + 1))
    assert last > 10
    assert (
        f"the disk of {run} is full: only the last checkpoint stays" in done.stdout or "the one before" in done.stdout
    )
    assert len(list((run / "checkpoint").glob("epoch-*"))) == 1
    ballast.unlink()
    again = train("train", *job, f"epochs={last + 3}", "resume=auto")
    assert (again.returncode, again.stderr) == (0, "")
    assert rows_of(run) == list(range(last + 3))
    assert [each.name for each in run.glob(".*")] == [".gnnpar.lock"]


def test_disk_without_room_for_checkpoints_completes_the_run(run_here: Run, mounted: Path) -> None:
    run = mounted / "run"
    fill(mounted, leave=(1 << 20) + 120_000)
    job = (*SMALL, "strategy=single", "model.hidden=256", "checkpoint.every=2", f"hydra.run.dir={run}")
    done = run_here("train", *job, "epochs=12")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.count(" not written: ") >= 5
    assert json.loads((run / "result.json").read_text())["status"] == "completed"
    assert rows_of(run) == list(range(12))


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

    monkeypatch.setattr(train, "run_training", full)
    done = run_here("train", "-m", *JOB, "hydra.sweep.dir=sweep")
    assert done.returncode == 1
    assert one_line(done) == "/there/plan.json cannot be used: No space left on device"
    assert "sweep: 0 of 1 done, 1 failed" in done.stdout
