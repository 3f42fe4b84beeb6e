"""Killed, interrupted and failing ranks: one line, a non-zero exit, result.json, no process left."""

import json
import os
import signal
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest

from conftest import Run
from started import TINY, Started

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
