"""A run folder belongs to one run: what a second one, a killed one and a folder that cannot be written come to."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from checkpoints import result, rows, train
from conftest import Run, environment
from gnnpar import durable
from gnnpar.cli import main
from gnnpar.data.files import cached_folder
from gnnpar.folder_lock import FILE, FolderInUse, Lock, Owner, started, working_in
from gnnpar.track.jsonl import Jsonl
from gnnpar.training.checkpoint.policy import CheckpointPolicy
from started import LONG, Started

ONE_PROCESS = ("comm=threads", "checkpoint.every=2")


@pytest.fixture
def first(tmp_path: Path):
    """A run in tmp_path/run that has trained some epochs and goes on."""
    run = Started(tmp_path, *ONE_PROCESS, num_ranks=1)
    yield run
    run.cleanup()


def test_a_second_run_in_the_folder_is_refused_and_changes_nothing(first: Started, run_here: Run) -> None:
    folder = first.folder / "run"
    before = (folder / "config.yaml").read_bytes()
    for how in ((), ("resume=auto",)):
        done = run_here("train", *LONG, *ONE_PROCESS, "epochs=3", "seed=5", *how)
        assert done.returncode == 2
        pid = first.process.pid
        assert done.stderr.startswith(f"gnnpar: {folder} is in use by process {pid} of this host since ")
        assert done.stderr.endswith(": wait for it, or choose another hydra.run.dir\n")
        assert done.stderr.count("\n") == 1
    assert (folder / "config.yaml").read_bytes() == before
    first.process.send_signal(signal.SIGTERM)
    code, err, result = first.end()
    assert (code, err) == (1, "gnnpar: interrupted by a signal\n")
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [row["epoch"] for row in rows] == list(range(result["epochs_done"]))
    assert (result["status"], result["seed"]) == ("interrupted", 0)
    assert not list(folder.glob(".gnnpar*")), "what says that the folder is in use is gone"


def test_interrupts_while_a_lock_is_given_back_leave_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Three SIGINTs within 0.1 s left the file."""
    unlink = Path.unlink

    def interrupted(file: Path, missing_ok: bool = False) -> None:
        monkeypatch.setattr(Path, "unlink", unlink)
        raise KeyboardInterrupt

    def command(argv: list[str]) -> int:
        with working_in(tmp_path, otherwise="", say=print):
            monkeypatch.setattr(Path, "unlink", interrupted)
            raise KeyboardInterrupt

    monkeypatch.setattr("gnnpar.cli.cite.run", command)
    handler = signal.getsignal(signal.SIGINT)
    assert main.run("cite", []) == 1
    assert not (tmp_path / FILE).exists()
    assert signal.getsignal(signal.SIGINT) is handler


def test_the_lock_of_a_killed_run_does_not_stop_the_resume(first: Started, run_here: Run) -> None:
    folder = first.folder / "run"
    first.process.kill()
    first.process.wait()
    done_before = len((folder / "metrics.jsonl").read_text().splitlines())
    done = run_here("train", *LONG, *ONE_PROCESS, f"epochs={done_before + 2}", "resume=auto")
    assert (done.returncode, done.stderr) == (0, "")
    pid = first.process.pid
    assert f"{folder} was in use by process {pid} of this host, which has ended: taken over\n" in done.stdout
    assert json.loads((folder / "result.json").read_text())["epochs_done"] == done_before + 2


def take(folder: Path, said: list[str] | None = None) -> Lock:
    return Lock.take(folder, otherwise="choose another", say=pytest.fail if said is None else said.append)


def left_by(folder: Path, owner: Owner) -> Path:
    """The lock of a process that could not remove it."""
    folder.mkdir(exist_ok=True)
    (folder / FILE).write_text(json.dumps(asdict(owner)))
    return folder / FILE


DEAD = 2**22 + 1  # above the largest pid


@pytest.fixture(params=["locks", "no locks", "locks of another kind"])
def file_system(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """One with flock, one that refuses it, and one that grants it to everybody (each host of a network its own)."""
    if request.param == "no locks":

        def flock(handle: int, how: int) -> None:
            raise OSError(errno.ENOLCK, "No locks available")

        monkeypatch.setattr(fcntl, "flock", flock)
    elif request.param == "locks of another kind":
        monkeypatch.setattr(fcntl, "flock", lambda handle, how: None)
    return request.param


def test_what_a_lock_says_decides_on_any_file_system(tmp_path: Path, file_system: str) -> None:
    me = Owner.this({})
    lock = take(tmp_path / "new" / "folder")
    with pytest.raises(FolderInUse, match=r"use by process \d+ of this host since 20.*: wait for it, or "):
        take(tmp_path / "new" / "folder")
    lock.release()
    lock.release()
    assert not list((tmp_path / "new" / "folder").iterdir())
    taken: list[str] = []
    left_by(tmp_path, replace(me, pid=DEAD, born=7))
    take(tmp_path, taken).release()
    left_by(tmp_path, replace(me, born=7))  # a process of this pid, before this one had it
    take(tmp_path, taken).release()
    assert [line.partition(" was in use by ")[2] for line in taken] == [
        f"process {pid} of this host, which has ended: taken over" for pid in (DEAD, me.pid)
    ]
    file = left_by(tmp_path, replace(me, host="node-b", pid=7))
    remedy = f"choose another; if that process has ended, remove {file}"
    with pytest.raises(FolderInUse, match="is in use by process 7 of node-b since ") as refused:
        take(tmp_path)
    assert str(refused.value).endswith(f": wait for it, or {remedy}")
    file.unlink()
    take(tmp_path).release()


@pytest.mark.parametrize("damage", ["", "{", "[]", "null", '{"pid": 1}', "\0" * 300])
def test_a_lock_that_says_nothing_is_nobodys(tmp_path: Path, file_system: str, damage: str) -> None:
    (tmp_path / FILE).write_text(damage)
    with working_in(tmp_path, otherwise="", say=pytest.fail):
        assert json.loads((tmp_path / FILE).read_text())["pid"] == os.getpid()


@pytest.mark.parametrize(
    ("before", "now", "ends"),
    [
        ({"SLURM_JOB_ID": "7"}, {"SLURM_JOB_ID": "7", "SLURM_RESTART_COUNT": "1"}, True),
        ({"SLURM_JOB_ID": "7"}, {"SLURM_JOB_ID": "7"}, False),  # another step of the same job
        ({"SLURM_JOB_ID": "7"}, {"SLURM_JOB_ID": "8", "SLURM_RESTART_COUNT": "1"}, False),
        (
            {"TORCHELASTIC_RUN_ID": "x"},
            {"TORCHELASTIC_RUN_ID": "x", "TORCHELASTIC_RESTART_COUNT": "1"},
            False,
        ),  # or of another
    ],
)
def test_a_job_that_its_scheduler_starts_again_on_another_host_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, before: dict[str, str], now: dict[str, str], ends: bool
) -> None:
    left_by(tmp_path, replace(Owner.this(before), host="node-b"))
    for name, value in now.items():
        monkeypatch.setenv(name, value)
    said: list[str] = []
    if ends:
        take(tmp_path, said).release()
        assert said[0].endswith(" of node-b, which has ended: taken over")
    else:
        with pytest.raises(FolderInUse, match=" of node-b since "):
            take(tmp_path)


RACE = """
import sys, time
from pathlib import Path
from gnnpar.folder_lock import FolderInUse, Lock
if sys.argv[2] == "no locks":
    import errno, fcntl
    def flock(handle, how):
        raise OSError(errno.ENOLCK, "")
    fcntl.flock = flock
print("up", flush=True)
sys.stdin.readline()
try:
    lock = Lock.take(Path(sys.argv[1]), otherwise="", say=lambda line: None)
    print("taken", flush=True)
    sys.stdin.readline()
    lock.release()
except FolderInUse:
    print("refused", flush=True)
"""


@pytest.fixture(params=["locks", "no locks"])
def racers(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[list[subprocess.Popen[str]]]:
    """Processes that take tmp_path at a line on their stdin."""
    command = [sys.executable, "-c", RACE, str(tmp_path), request.param]
    pipe = subprocess.PIPE
    there = [subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, env=environment()) for _ in range(6)]
    yield there
    for process in there:
        process.kill()
        process.communicate()


def test_of_several_at_once_exactly_one_gets_a_folder_that_was_left(
    tmp_path: Path, racers: list[subprocess.Popen[str]]
) -> None:
    left_by(tmp_path, replace(Owner.this({}), pid=DEAD))
    for process in racers:
        assert process.stdout is not None and process.stdout.readline() == "up\n"
    for process in racers:
        assert process.stdin is not None
        process.stdin.write("\n")
        process.stdin.flush()
    answers = [process.stdout.readline() for process in racers if process.stdout is not None]
    assert sorted(answers) == ["refused\n"] * 5 + ["taken\n"]


def test_a_process_is_told_from_a_later_one_of_its_pid() -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        born = started(process.pid)
        assert born is not None and born > (started(1) or 0)
        process.kill()
        process.wait()
    assert started(process.pid) is None
    assert started(DEAD) is None


def test_two_hosts_that_fill_a_cache_at_once_keep_one_result(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, file_system: str
) -> None:
    monkeypatch.setenv("GNNPAR_CACHE", str(tmp_path))

    def build(folder: Path) -> None:
        (folder / "mine").touch()
        (tmp_path / "key").mkdir()
        (tmp_path / "key" / "theirs").touch()  # the other host has ended meanwhile

    assert [file.name for file in cached_folder("key", build).iterdir()] == ["theirs"]
    assert [file.name for file in tmp_path.iterdir() if file.is_dir()] == ["key"]


LOSSES = {
    "the first rows": (lambda lines: lines[2:], "has no rows of epochs 0-1, which "),
    "rows in the middle": (lambda lines: [*lines[:2], lines[3], lines[5]], "has no rows of epochs 2, 4, which "),
    "a line cut short": (lambda lines: [*lines[:5], lines[5][:20]], "has no rows of epochs 5, which "),
    "all": (lambda lines: [], "has no rows of epochs 0-5, which "),
}


@pytest.mark.parametrize("how", LOSSES)
@pytest.mark.parametrize("place", ["its folder", "another"])
def test_a_run_does_not_go_on_from_rows_that_are_lost_or_changed(tmp_path: Path, how: str, place: str) -> None:
    lose, line = LOSSES[how]
    old = tmp_path / "run"
    assert train(old, "strategy=single", "epochs=6").exit_code == 0
    file = old / "metrics.jsonl"
    file.write_text("".join(lose(file.read_text().splitlines(keepends=True))))
    new = old if place == "its folder" else tmp_path / "new"
    outcome = train(new, "strategy=single", "epochs=8", "resume=auto" if new == old else f"resume={old}")
    assert outcome.exit_code == 1
    assert outcome.error is not None
    assert f"{file} {line}{old}/checkpoint/epoch-000006" in outcome.error
    assert outcome.error.endswith(": put it back as it was, or leave resume out")
    assert result(new)["status"] == "failed"


def test_a_resume_that_rewrites_its_rows_can_be_resumed_again(tmp_path: Path) -> None:
    """On other ranks, times and memory of the rows before are dropped; the checkpoint before counts them still."""
    assert train(tmp_path, "strategy=graph_parallel", "epochs=4").exit_code == 0
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(CheckpointPolicy, "save", lambda *_: False)
        assert train(tmp_path, "strategy=single", "epochs=6", "resume=auto").exit_code == 0
    assert train(tmp_path, "strategy=single", "epochs=6", "resume=auto").exit_code == 0
    assert [row["epoch"] for row in rows(tmp_path)] == list(range(6))


def test_a_run_whose_rows_vanish_meanwhile_is_not_completed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log = Jsonl.log

    def vanishing(self: Jsonl, row: durable.JsonObject) -> None:
        log(self, row)
        if row["epoch"] == 3:
            (tmp_path / "metrics.jsonl").write_text("")

    monkeypatch.setattr(Jsonl, "log", vanishing)
    outcome = train(tmp_path, "strategy=single", "epochs=6")
    assert outcome.exit_code == 1
    assert outcome.error is not None
    assert "metrics.jsonl has lost the rows of epochs 0-" in outcome.error
    assert result(tmp_path)["status"] == "failed"
