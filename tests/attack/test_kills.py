"""Runs that are killed, stopped and interrupted at any time: nothing is lost, nothing hangs, nothing is left behind."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

import kills
from composing import configured, names
from conftest import environment
from started import TINY

COMMANDS = ("train strategy=single epochs=2 tracker=jsonl comm=threads", "compare .", "train --cfg job", "doctor")


@pytest.mark.parametrize("command", COMMANDS[:2])
def test_an_interrupt_while_a_command_starts_is_no_traceback(tmp_path: Path, command: str) -> None:
    check_interrupts(tmp_path, command, [0.3, 1.2])


@pytest.mark.slow
@pytest.mark.parametrize("command", COMMANDS)
def test_interrupts_at_any_time_of_the_start_are_no_tracebacks(tmp_path: Path, command: str) -> None:
    draw = random.Random(command)
    check_interrupts(tmp_path, command, [draw.uniform(0.1, 6.0) for _ in range(12)])


def check_interrupts(folder: Path, command: str, delays: list[float]) -> None:
    for delay in delays:
        with subprocess.Popen(
            [sys.executable, "-m", "gnnpar", *command.split(), *(TINY if "train" in command else ())],
            cwd=folder,
            env=environment(),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        ) as process:
            while not imports_gnnpar(process.pid) and process.poll() is None:
                time.sleep(0.01)
            time.sleep(delay)
            process.send_signal(signal.SIGINT)
            _, err = process.communicate(timeout=60)
        assert "Traceback" not in err, (delay, err)
        assert err.count("\n") <= 1, (delay, err)


def imports_gnnpar(pid: int) -> bool:
    """Whether Python has begun to run the program: it answers to SIGINT by then."""
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return False
    caught = int(status.partition("SigCgt:")[2].split()[0], 16)
    return bool(caught & 1 << (signal.SIGINT - 1))


BUSY = """
from dataclasses import dataclass
import ctypes
import time
from pathlib import Path
from gnnpar.parallel.halo.strategy import GraphParallel

@dataclass(frozen=True, kw_only=True)
class Busy(GraphParallel):
    def build(self, plan, shard, model, task, comm, **kwargs):
        engine = super().build(plan, shard, model, task, comm, **kwargs)
        train_epoch = engine.train_epoch
        def busy(epoch, optimizer, **kwargs):
            if epoch == 3:
                Path("busy").touch()
                HOW
            return train_epoch(epoch, optimizer, **kwargs)
        object.__setattr__(engine, "train_epoch", busy)
        return engine
"""
GRACE = 8.0


@pytest.mark.slow  # waits for the grace
@pytest.mark.parametrize(("comm", "how"), [("gloo", "ctypes.PyDLL(None).sleep(100)"), ("threads", "time.sleep(100)")])
def test_an_epoch_that_outlasts_the_grace_ends_with_it(tmp_path: Path, comm: str, how: str) -> None:
    """Ranks that hold Python's lock meanwhile answer to nothing but SIGKILL."""
    (tmp_path / "own_busy.py").write_text(BUSY.replace("HOW", how))
    (tmp_path / "strategy").mkdir()
    (tmp_path / "strategy" / "busy.yaml").write_text("_target_: own_busy.Busy\n")
    words = ("strategy=busy", f"comm={comm}", f"launch.grace_seconds={GRACE}", "hydra.run.dir=run", *TINY)
    with subprocess.Popen(
        [sys.executable, "-m", "gnnpar", "train", *words],
        cwd=tmp_path,
        env=environment(),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as process:
        deadline = time.monotonic() + 120
        while not (tmp_path / "busy").exists():
            assert process.poll() is None and time.monotonic() < deadline
            time.sleep(0.05)
        asked = time.monotonic()
        os.killpg(process.pid, signal.SIGTERM)
        _, err = process.communicate(timeout=60)
        seconds = time.monotonic() - asked
    assert (process.returncode, err) == (1, "gnnpar: interrupted by a signal\n")
    assert GRACE <= seconds < 2 * GRACE


def test_a_kill_and_an_order_to_end_change_nothing(tmp_path: Path) -> None:
    """The schedule's way, with two strikes; its bits, its profile and its error feedback are adaqp's."""
    few = {"kill a rank": 1, "ask a rank to end": 1}
    strikes = kills.strikes("two", 2, few, below=8)
    count = kills.run(kills.Case("adaqp", 2, strikes, epochs=16), tmp_path)
    assert (count.outcome, count.detail, count.number) == ("survived", "", 2)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("case", kills.cases(), ids=lambda case: case.name)
def test_the_schedule_of_kills_changes_nothing(tmp_path: Path, case: kills.Case) -> None:
    count = kills.run(case, tmp_path)
    assert (count.outcome, count.detail, count.number) == ("survived", "", len(case.strikes))


def test_the_schedule_has_three_hundred_strikes_over_all_strategies() -> None:
    cases = kills.cases()
    assert sum(len(case.strikes) for case in cases) >= 300
    assert {case.launcher for case in cases} == {"gnnpar", "torchrun", "two-hosts"}
    there = {(case.strategy, case.ranks) for case in cases}
    assert there == {
        (name, ranks)
        for name in names("strategy")
        for ranks in (2, 4)
        if (configured("strategy", name).capabilities.max_ranks or 4) >= ranks
    } | {(name, 1) for name in names("strategy") if configured("strategy", name).capabilities.max_ranks == 1}


def test_the_table_of_the_guide_is_that_of_the_counts() -> None:
    counts = kills.Counts.read(Path(__file__).with_name("kills.json"))
    page = kills.PAGE.read_text(encoding="utf-8")
    assert page == counts.on(page)
    assert {each.name for each in counts.cases} == {case.name for case in kills.cases()}
    assert {each.outcome for each in counts.cases} == {"survived"}


def of_session(session: int) -> list[int]:
    """Its processes that live."""
    found = []
    for process in psutil.process_iter():
        with suppress(OSError, psutil.Error):
            if os.getsid(process.pid) == session and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process.pid)
    return found


def wait_until(what: Callable[[], bool], seconds: float) -> None:
    end = time.monotonic() + seconds
    while not what():
        assert time.monotonic() < end, "not within its time"
        time.sleep(0.2)
