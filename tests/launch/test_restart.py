"""A rank hangs and is restarted: parameters, state and metrics are those of an undisturbed run."""

from __future__ import annotations

import signal
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from checkpoints import SMALL, hashes, result
from gnnpar.cli.train import run_training
from gnnpar.comm.world import Outcome
from gnnpar.config.compose import compose
from gnnpar.track.tracker import Null
from kills import undisturbed
from saboteurs import Saboteur

pytestmark = [pytest.mark.fault, pytest.mark.slow]  # time-outs must exceed any pause of a busy machine
PROCESSES = ("comm=gloo", "launch.max_restarts=2", "checkpoint.every=2", "epochs=8")


def sabotaged(folder: Path, plan: Saboteur, *overrides: str) -> Outcome:
    folder.mkdir()
    return run_training(replace(compose([*SMALL, *PROCESSES, *overrides]), tracker=plan), folder)


def test_hanging_rank_is_named_and_restarted(tmp_path: Path, capsys) -> None:
    plan = Saboteur(epoch=4, rank=1, marker=tmp_path / "done", number=signal.SIGSTOP)
    outcome = sabotaged(tmp_path / "hung", plan, "strategy=graph_parallel", "comm.timeout_seconds=20")
    said = capsys.readouterr().out
    assert outcome.exit_code == 0, (outcome, said)
    line = "rank 1: hangs: nothing heard of it for comm.timeout_seconds=20; the process is stopped"
    assert f"{line}: starting all ranks again from" in said
    assert said.count("starting all ranks again from") == 1
    assert hashes(tmp_path / "hung") == hashes(
        undisturbed(tmp_path / "whole", tmp_path, "strategy=graph_parallel", "epochs=8")
    )


@dataclass(frozen=True)
class SlowEnd:
    """A tracker that takes its time after the last epoch."""

    seconds: float

    def build(self, run_dir: Path, epochs: int, job: Mapping[str, object]) -> Null:
        made = Null()
        made.close = lambda result=None: time.sleep(self.seconds)
        return made


def test_run_with_a_slow_end_of_rank_0_is_not_restarted(tmp_path: Path, capsys) -> None:
    job = (*SMALL, *PROCESSES, "strategy=graph_parallel", "comm.timeout_seconds=10", "checkpoint.keep=0")
    assert run_training(replace(compose(job), tracker=SlowEnd(25.0)), tmp_path).exit_code == 0
    assert "starting all ranks again" not in capsys.readouterr().out
    assert (result(tmp_path)["status"], result(tmp_path)["restarts"]) == ("completed", 0)
