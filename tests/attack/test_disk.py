"""Folders that cannot be written and disks that are full: one line and the exit code of the guide, no traceback."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from checkpoints import SMALL
from conftest import Run

JOB = (*SMALL, "strategy=single", "epochs=2")


@pytest.fixture
def mounted(tmp_path: Path) -> Iterator[Path]:
    """A file system of 2 MiB of its own."""
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
        subprocess.run(["mount", "-o", "remount,ro", str(disk)], check=True)
        return disk
    (tmp_path / "file").write_text("")
    return tmp_path / "file" / ("below" if request.param == "below a file" else "")


PLACES = ("a file", "below a file", "read only")


@pytest.mark.parametrize("unwritable", PLACES, indirect=True)
@pytest.mark.parametrize("sweep", [False, True])
def test_a_run_folder_that_cannot_be_written_is_one_line(run_here: Run, unwritable: Path, sweep: bool) -> None:
    where = ("-m", f"hydra.sweep.dir={unwritable}") if sweep else (f"hydra.run.dir={unwritable}",)
    done = run_here("train", *JOB, *where)
    assert done.returncode == 2
    line = one_line(done)
    assert str(unwritable) in line
    assert line.endswith((" cannot be a folder: it, or a part of its path, is a file", ": Read-only file system"))


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from checkpoints import train

    folder = tmp_path_factory.mktemp("finished") / "run"
    assert train(folder, "strategy=single", "epochs=2").exit_code == 0
    return folder


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
def test_an_output_that_cannot_be_written_is_one_line(
    run_here: Run, finished: Path, unwritable: Path, command: str
) -> None:
    done = run_here(*command.format(run=finished, place=unwritable).split())
    assert done.returncode == 2
    assert str(unwritable) in one_line(done)
