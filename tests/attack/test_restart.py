"""A rank is killed or hangs, and the run ends as if nothing had happened: the same parameters, state and metrics."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from checkpoints import SMALL, hashes, result
from gnnpar.cli.train import run_training
from gnnpar.comm import Site
from gnnpar.comm.flight_recorder import DONE, RECORD, WORKING, FlightRecorder, read_entry
from gnnpar.comm.world import Outcome
from gnnpar.config.compose import compose
from gnnpar.launch.forked import Ranks
from gnnpar.launch.monitor import Monitor
from gnnpar.launch.processes import first_to_fail
from gnnpar.track.tracker import Null
from kills import undisturbed
from saboteurs import Saboteur

PROCESSES = ("comm=gloo", "launch.max_restarts=2", "checkpoint.every=2", "epochs=8")


def sabotaged(folder: Path, plan: Saboteur, *overrides: str) -> Outcome:
    folder.mkdir()
    return run_training(replace(compose([*SMALL, *PROCESSES, *overrides]), tracker=plan), folder)


@pytest.mark.slow  # the time-out must be long beside any pause of a busy machine
def test_a_rank_that_hangs_is_named_with_its_site_and_replaced(tmp_path: Path, capsys) -> None:
    plan = Saboteur(epoch=4, rank=1, marker=tmp_path / "done", number=signal.SIGSTOP)
    outcome = sabotaged(tmp_path / "hung", plan, "strategy=graph_parallel", "comm.timeout_seconds=20")
    said = capsys.readouterr().out
    assert outcome.exit_code == 0, (outcome, said)
    assert "rank 1: hangs: nothing heard of it for comm.timeout_seconds=20; last seen in epoch 4" in said
    assert "; the process is stopped: starting all ranks again from" in said
    assert said.count("starting all ranks again from") == 1
    assert hashes(tmp_path / "hung") == hashes(
        undisturbed(tmp_path / "whole", tmp_path, "strategy=graph_parallel", "epochs=8")
    )


@pytest.mark.parametrize("stopped", [False, True])
def test_the_monitor_ends_the_rank_that_holds_the_others_up(tmp_path: Path, stopped: bool) -> None:
    """Rank 0 waits for rank 1, which works for ever, or was stopped while it waited itself."""
    code = "import sys; sys.stdout.write('up'); sys.stdout.flush(); import time; time.sleep(60)"
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) as victim:
        assert victim.stdout is not None
        assert victim.stdout.read(2) == b"up"
        waiting = FlightRecorder(tmp_path / "0.at")
        waiting.at(Site(3, 1, 0, "backward"))
        with waiting.waiting(1):
            seen = read_entry(tmp_path / "0.at")
            assert (seen.place, seen.waits_for) == ("epoch 3, layer 1, backward", 1)
            state = 0 if stopped else WORKING
            record = (seen.seconds + 0.1, victim.pid, state, 3, 1, 0, 0, 2)
            (tmp_path / "1.at").write_bytes(RECORD.pack(*record))
            if stopped:
                victim.send_signal(signal.SIGSTOP)
            with Monitor(tmp_path, 2, timeout_seconds=0.4) as monitor:
                assert victim.wait(timeout=30) < 0
    assert monitor.failure is not None
    how = "; the process is stopped" if stopped else ""
    place = f"epoch 3, layer 1, forward, chunk 2{how}"
    assert (
        monitor.failure.line == f"rank 1: hangs: nothing heard of it for comm.timeout_seconds=0.4; last seen in {place}"
    )
    assert monitor.failure.lost


@pytest.mark.parametrize("stopped", [False, True])
def test_after_the_work_of_one_rank_only_a_rank_that_is_stopped_hangs(tmp_path: Path, stopped: bool) -> None:
    """Rank 1 is done, and nobody waits for rank 0, which writes the last checkpoint, the result, a tracker's rest."""
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as slow:
        other = FlightRecorder(tmp_path / "1.at")
        other.at(Site(3, -1, 0, "evaluate"))
        other.done()
        seen = read_entry(tmp_path / "1.at")
        assert (seen.waits_for, seen.epoch) == (DONE, 3)
        (tmp_path / "0.at").write_bytes(RECORD.pack(seen.seconds - 9.0, slow.pid, WORKING, 3, -1, 0, 7, 0))
        if stopped:
            slow.send_signal(signal.SIGSTOP)
        with Monitor(tmp_path, 2, timeout_seconds=0.2) as monitor:
            time.sleep(1.0)
            assert monitor.is_over(1) and not monitor.is_over(0)
        ended = slow.poll()
        slow.kill()
    if stopped:
        assert ended == -signal.SIGKILL
        assert monitor.failure is not None and monitor.failure.line.endswith("; the process is stopped")
    else:
        assert (ended, monitor.failure) == (None, None)


@pytest.mark.parametrize("over", [frozenset({0, 1}), frozenset({0}), frozenset({1}), frozenset()])
def test_a_rank_that_is_killed_after_its_work_is_no_loss(over: frozenset[int]) -> None:
    ranks = Ranks(2, os._exit, fork=True)  # the exit code is the rank
    ranks.start()
    assert first_to_fail(ranks, 0.1, over.__contains__) == (None if 1 in over else 1)
    ranks.end()


@dataclass(frozen=True)
class SlowEnd:
    """A tracker that takes its time after the last epoch."""

    seconds: float

    def build(self, run_dir: Path, epochs: int, job: Mapping[str, object]) -> Null:
        made = Null()
        made.close = lambda result=None: time.sleep(self.seconds)
        return made


@pytest.mark.slow  # the time-out must be long beside any pause of a busy machine
def test_a_run_whose_rank_0_is_slow_at_the_end_is_not_started_again(tmp_path: Path, capsys) -> None:
    job = (*SMALL, *PROCESSES, "strategy=graph_parallel", "comm.timeout_seconds=10", "checkpoint.keep=0")
    assert run_training(replace(compose(job), tracker=SlowEnd(25.0)), tmp_path).exit_code == 0
    assert "starting all ranks again" not in capsys.readouterr().out
    assert (result(tmp_path)["status"], result(tmp_path)["restarts"]) == ("completed", 0)


def test_a_rank_that_is_alone_and_stopped_hangs(tmp_path: Path) -> None:
    """The schedule of kills found that nobody noticed."""
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as alone:
        (tmp_path / "0.at").write_bytes(RECORD.pack(time.monotonic(), alone.pid, WORKING, -1, -1, -1, -1, -1))
        with Monitor(tmp_path, 1, timeout_seconds=0.4) as monitor:
            time.sleep(0.8)
            assert monitor.failure is None
            alone.send_signal(signal.SIGSTOP)
            assert alone.wait(timeout=30) == -signal.SIGKILL
    assert monitor.failure is not None and monitor.failure.lost
    assert monitor.failure.line.endswith("; the process is stopped")
