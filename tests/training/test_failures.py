"""Killed, interrupted and failing ranks: one line and a result; one run at a time in a run folder."""

import json
import os
import signal
import socket
from collections.abc import Iterator
from contextlib import suppress
from datetime import datetime, tzinfo
from pathlib import Path
from typing import Any, Self

import psutil
import pytest

from checkpoints import SMALL, result, rows, train
from conftest import Refused, Run
from gnnpar import api
from gnnpar.data.files import cached_folder
from gnnpar.files import LOCK, JsonObject, working_in
from gnnpar.track.jsonl import Jsonl
from gnnpar.training.checkpoint.policy import CheckpointPolicy
from started import LONG, TINY, Started

FAILING = """
from dataclasses import dataclass
from gnnpar.parallel.halo.strategy import GraphParallel

@dataclass(frozen=True, kw_only=True)
class Failing(GraphParallel):
    def build(self, context):
        engine = super().build(context)
        train_epoch = engine.train_epoch
        def failing(epoch, optimizer, **kwargs):
            if epoch == 2 and context.comm.rank == 1:
                raise ValueError("the third epoch\\nis too much")
            return train_epoch(epoch, optimizer, **kwargs)
        object.__setattr__(engine, "train_epoch", failing)
        return engine
"""

pytestmark = pytest.mark.fault
LINE = (
    "rank 1: ValueError: the third epoch is too much (own_failing.py:12 in failing; GNNPAR_TRACEBACK=1 shows all of it)"
)


@pytest.fixture
def failing(tmp_path: Path) -> str:
    """A user's own strategy, in a folder outside the project."""
    (tmp_path / "own_failing.py").write_text(FAILING)
    (tmp_path / "strategy").mkdir()
    (tmp_path / "strategy" / "failing.yaml").write_text("_target_: own_failing.Failing\n")
    return "strategy=failing"


@pytest.fixture
def start(tmp_path: Path) -> Iterator:
    started: list[Started] = []

    def start(*arguments: str, **keywords: int) -> Started:
        started.append(Started(tmp_path, *arguments, **keywords))
        return started[-1]

    yield start
    for run in started:
        run.cleanup()


@pytest.mark.parametrize(
    ("victim", "arguments"),
    [
        (0, ("strategy=gnnpipe",)),
        pytest.param(1, ("strategy=gnnpipe",), marks=pytest.mark.slow),
        pytest.param(0, (), marks=pytest.mark.slow),
        pytest.param(1, (), marks=pytest.mark.slow),
    ],
)
def test_killed_rank_ends_the_run(start, victim: int, arguments: tuple[str, ...]) -> None:
    """Also where the other rank waits for rows of the killed stage."""
    run = start(*arguments)
    assert run.ranks[victim].cmdline() == psutil.Process(run.process.pid).cmdline()  # forked: nothing is imported again
    run.ranks[victim].kill()
    code, err, result = run.end(within=30)
    assert code == 1
    assert err == f"gnnpar: rank {victim}: killed by SIGKILL (out of memory?)\n"
    assert result["status"] == "failed"
    assert result["error"] == f"rank {victim}: killed by SIGKILL (out of memory?)"
    assert result["epochs_done"] > 2
    assert result["loss"]["last"] is not None


@pytest.mark.parametrize(
    ("number", "ranks"),
    [
        (signal.SIGUSR1, 2),
        pytest.param(signal.SIGINT, 2, marks=pytest.mark.slow),
        pytest.param(signal.SIGTERM, 2, marks=pytest.mark.slow),
        (signal.SIGINT, 1),
    ],
)
def test_signal_interrupts_all_ranks(start, number: signal.Signals, ranks: int) -> None:
    """Ranks are processes, or threads of one."""
    run = start(*(("comm=threads",) if ranks == 1 else ()), num_ranks=ranks)
    os.killpg(run.process.pid, number)  # what Ctrl-C and a scheduler do: the whole group gets it
    code, err, result = run.end(within=30)
    assert (code, err) == (1, "gnnpar: interrupted by a signal\n")
    assert (result["status"], result["error"]) == ("interrupted", "interrupted by a signal")
    kept = [folder.name for folder in (run.folder / "run" / "checkpoint").glob("*")]
    assert kept == ([f"epoch-{result['epochs_done']:06d}"] if number != signal.SIGINT else [])


@pytest.mark.parametrize(
    "number", [signal.SIGKILL, pytest.param(signal.SIGINT, marks=pytest.mark.slow)], ids=["killed", "Ctrl-C"]
)
def test_ended_paced_run_leaves_no_namespace(start, shaped_links, number: signal.Signals) -> None:
    run = start("launch=paced")
    made = namespaces_of(run.process.pid)
    assert len(made) == 3
    if number == signal.SIGKILL:
        run.process.kill()
        assert psutil.wait_procs(run.ranks, timeout=10)[1] == []
        run.process.wait()
    else:
        os.killpg(run.process.pid, number)
        code, err, result = run.end(within=30)
        assert (code, err, result["status"]) == (1, "gnnpar: interrupted by a signal\n", "interrupted")
    assert not made & kept_namespaces()


def namespaces_of(pid: int) -> set[str]:
    """Return the network namespaces of which a process holds a descriptor."""
    found: set[str] = set()
    with suppress(OSError):  # the process has ended
        for file in Path(f"/proc/{pid}/fd").iterdir():
            found.add(os.readlink(file))
    return {link for link in found if link.startswith("net:")}


def kept_namespaces() -> set[str]:
    return {link for pid in psutil.pids() for link in namespaces_of(pid)}


@pytest.mark.parametrize("how", ["comm=gloo", "comm=threads", "launch=paced"])
def test_rank_that_raises_is_one_line(
    request: pytest.FixtureRequest, run_here: Run, failing: str, tmp_path: Path, monkeypatch: Any, how: str
) -> None:
    """GNNPAR_TRACEBACK=1 prints the traceback above it."""
    if how == "launch=paced":
        request.getfixturevalue("shaped_links")
    if how == "comm=gloo":
        monkeypatch.setenv("GNNPAR_TRACEBACK", "1")
    done = run_here("train", failing, how, *TINY, "hydra.run.dir=run")
    assert done.returncode == 1
    above, line, end = done.stderr.rpartition(f"gnnpar: {LINE}\n")
    assert line and not end
    assert ('raise ValueError("the third epoch' in above) if how == "comm=gloo" else not above
    result = json.loads((tmp_path / "run" / "result.json").read_text())
    assert (result["status"], result["error"]) == ("failed", LINE)
    assert result["epochs_done"] == 2


def test_failed_job_does_not_stop_a_sweep(run_here: Run, failing: str, tmp_path: Path) -> None:
    done = run_here("train", "-m", f"{failing},single", "comm=threads", "epochs=4", *TINY, "hydra.sweep.dir=sweep")
    assert done.returncode == 1
    assert done.stderr == f"gnnpar: {LINE}\n"
    results = [json.loads((tmp_path / "sweep" / job / "result.json").read_text()) for job in ("0", "1")]
    assert [r["status"] for r in results] == ["failed", "completed"]


ONE_PROCESS = ("comm=threads", "checkpoint.every=2")


@pytest.fixture
def first(tmp_path: Path):
    """A run in tmp_path/run that has trained some epochs and goes on."""
    run = Started(tmp_path, *ONE_PROCESS, num_ranks=1)
    yield run
    run.cleanup()


def test_second_run_in_a_folder_is_refused_and_changes_nothing(first: Started, refused: Refused) -> None:
    folder = first.folder / "run"
    before = (folder / "config.yaml").read_bytes()
    line = f"gnnpar: {folder} is in use by process {first.process.pid} of {socket.gethostname()} since "
    for how in ((), ("resume=auto",)):
        said = refused(line, "train", *LONG, *ONE_PROCESS, "epochs=3", "seed=5", *how)
        assert said.endswith(": wait for it, or choose another hydra.run.dir\n")
    assert (folder / "config.yaml").read_bytes() == before
    first.process.send_signal(signal.SIGTERM)
    code, err, result = first.end()
    assert (code, err) == (1, "gnnpar: interrupted by a signal\n")
    assert [row["epoch"] for row in rows(folder)] == list(range(result["epochs_done"]))
    assert (result["status"], result["seed"]) == ("interrupted", 0)
    assert not (folder / LOCK).read_text()


def test_resume_after_kill_takes_over_the_lock(first: Started, run_here: Run) -> None:
    folder = first.folder / "run"
    first.process.kill()
    first.process.wait()
    epochs = len((folder / "metrics.jsonl").read_text().splitlines()) + 2
    done = run_here("train", *LONG, *ONE_PROCESS, f"epochs={epochs}", "resume=auto")
    assert (done.returncode, done.stderr) == (0, "")
    assert f"{folder} was in use by process {first.process.pid} of {socket.gethostname()} since " in done.stdout
    assert result(folder)["epochs_done"] == epochs


@pytest.mark.parametrize("content", [b"", b"{", b"\0" * 300, b"\x1b[2J", b"\xff"])
def test_free_lock_file_with_any_content_is_replaced(tmp_path: Path, content: bytes) -> None:
    (tmp_path / LOCK).write_bytes(content)
    with working_in(tmp_path, remedy="", say=lambda line: None):
        assert (tmp_path / LOCK).read_text().startswith(f"process {os.getpid()} of ")


def test_cache_filled_by_two_hosts_keeps_one_result(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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
def test_resume_with_lost_rows_is_refused(finished: Path, tmp_path: Path, how: str, place: str) -> None:
    lose, line = LOSSES[how]
    file = finished / "metrics.jsonl"
    file.write_text("".join(lose(file.read_text().splitlines(keepends=True))))
    new = finished if place == "its folder" else tmp_path / "new"
    outcome = train(new, "strategy=single", "epochs=8", "resume=auto" if new == finished else f"resume={finished}")
    assert outcome.exit_code == 1
    assert f"{file} {line}{finished}/checkpoint/epoch-000006" in str(outcome.error)
    assert str(outcome.error).endswith(": put it back as it was, or leave resume out")
    assert result(new)["status"] == "failed"


def test_resume_with_other_strategy_can_be_resumed_again(tmp_path: Path) -> None:
    """The resume drops times and memory of earlier rows, and the earlier checkpoint still counts them."""
    assert train(tmp_path, "strategy=graph_parallel", "epochs=4").exit_code == 0
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(CheckpointPolicy, "save", lambda *_: False)
        assert train(tmp_path, "strategy=single", "epochs=6", "resume=auto").exit_code == 0
    assert train(tmp_path, "strategy=single", "epochs=6", "resume=auto").exit_code == 0
    assert [row["epoch"] for row in rows(tmp_path)] == list(range(6))


def test_run_with_rows_lost_meanwhile_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log = Jsonl.log

    def vanishing(self: Jsonl, row: JsonObject) -> None:
        log(self, row)
        if row["epoch"] == 3:
            (tmp_path / "metrics.jsonl").write_text("")

    monkeypatch.setattr(Jsonl, "log", vanishing)
    outcome = train(tmp_path, "strategy=single", "epochs=6")
    assert outcome.exit_code == 1
    assert "metrics.jsonl has lost the rows of epochs 0-" in str(outcome.error)
    assert result(tmp_path)["status"] == "failed"


def test_runs_of_the_api_in_one_second_have_numbered_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(api.time, "strftime", lambda form: "2026-01-01/12-00-00")
    folders = [api._run_folder(None) for _ in range(3)]
    assert [folder.name for folder in folders] == ["12-00-00", "12-00-00-2", "12-00-00-3"]


def test_commands_in_one_second_have_numbered_folders(
    run_here: Run, refused: Refused, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Still(datetime):
        @classmethod
        def now(cls, tz: tzinfo | None = None) -> Self:
            return cls(2026, 1, 2, 3, 4, 5)

    monkeypatch.setattr("hydra.core.utils.datetime", Still)
    day, job = tmp_path / "outputs/2026-01-02", ("train", *SMALL, "strategy=single", "epochs=1")
    for seed in range(2):
        assert run_here(*job, f"seed={seed}").returncode == 0
    with working_in(day / "03-04-05-3", remedy="wait", say=print):
        assert run_here(*job, "seed=2").returncode == 0
        refused("is in use", *job, f"hydra.run.dir={day}/03-04-05-3")
    folders = [day / name for name in ("03-04-05", "03-04-05-2", "03-04-05-4")]
    assert [result(folder)["seed"] for folder in folders] == [0, 1, 2]
