"""Runs that are killed, stopped and interrupted at any time lose no epoch, do not hang, and leave no files."""

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

import kills
from checkpoints import SMALL, hashes, result
from composing import configured, names
from conftest import environment
from gnnpar.cli.train import run_training
from gnnpar.comm.world import Outcome
from gnnpar.config.compose import compose
from gnnpar.track.tracker import Null
from kills import undisturbed
from saboteurs import Saboteur
from started import TINY

pytestmark = pytest.mark.fault
COMMANDS = ("train strategy=single epochs=2 tracker=jsonl comm=threads", "compare .", "train --cfg job", "doctor")


@pytest.mark.parametrize("command", COMMANDS[:2])
def test_interrupt_at_the_start_shows_no_traceback(tmp_path: Path, command: str) -> None:
    check_interrupts(tmp_path, command, [0.3, 1.2])


@pytest.mark.slow
@pytest.mark.parametrize("command", COMMANDS)
def test_interrupts_at_random_times_of_the_start_show_no_traceback(tmp_path: Path, command: str) -> None:
    draw = random.Random(command)
    check_interrupts(tmp_path, command, [draw.uniform(0.1, 6.0) for _ in range(12)])


def check_interrupts(folder: Path, command: str, delays: list[float]) -> None:
    for delay in delays:
        with quiet(folder, *command.split(), *(TINY if "train" in command else ())) as process:
            while not imports_gnnpar(process.pid) and process.poll() is None:
                time.sleep(0.01)
            time.sleep(delay)
            process.send_signal(signal.SIGINT)
            _, err = process.communicate(timeout=60)
        assert "Traceback" not in err, (delay, err)
        assert err.count("\n") <= 1, (delay, err)


def quiet(folder: Path, *words: str, **variables: str) -> subprocess.Popen[str]:
    """gnnpar(*words) in a session of its own; its stderr is kept."""
    command, env = [sys.executable, "-m", "gnnpar", *words], environment() | variables
    kept: Any = {"stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE, "text": True, "start_new_session": True}
    return subprocess.Popen(command, cwd=folder, env=env, **kept)


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
import time
from pathlib import Path
from gnnpar.parallel.halo.strategy import GraphParallel

@dataclass(frozen=True, kw_only=True)
class Busy(GraphParallel):
    def build(self, context):
        engine = super().build(context)
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
@pytest.mark.parametrize(("comm", "how"), [("gloo", "sum(range(10**12))"), ("threads", "time.sleep(100)")])
def test_epoch_longer_than_the_grace_ends_with_it(tmp_path: Path, comm: str, how: str) -> None:
    """Ranks in a loop of C, which holds the GIL and runs no handler, answer SIGKILL alone."""
    (tmp_path / "own_busy.py").write_text(BUSY.replace("HOW", how))
    (tmp_path / "strategy").mkdir()
    (tmp_path / "strategy" / "busy.yaml").write_text("_target_: own_busy.Busy\n")
    words = ("strategy=busy", f"comm={comm}", f"launch.grace_seconds={GRACE}", "hydra.run.dir=run", *TINY)
    with quiet(tmp_path, "train", *words) as process:
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


def test_run_killed_and_told_to_end_has_the_bits_of_an_undisturbed_one(tmp_path: Path) -> None:
    few = {"kill a rank": 1, "ask a rank to end": 1}
    strikes = kills.strikes("two", 2, few, below=8)
    count = kills.run(kills.Case("adaqp", 2, strikes, epochs=16), tmp_path)
    assert (count.outcome, count.detail, count.number) == ("survived", "", 2)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("case", kills.cases(), ids=lambda case: case.name)
def test_run_struck_by_the_schedule_has_the_bits_of_an_undisturbed_one(tmp_path: Path, case: kills.Case) -> None:
    count = kills.run(case, tmp_path)
    assert (count.outcome, count.detail, count.number) == ("survived", "", len(case.strikes))


def test_schedule_has_three_hundred_strikes_over_all_strategies() -> None:
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


def test_table_of_the_guide_shows_the_counts() -> None:
    counts = kills.read(Path(__file__).with_name("kills.json"))
    page = kills.PAGE.read_text(encoding="utf-8")
    assert page == kills.with_table(page, counts)
    assert {each.name for each in counts} == {case.name for case in kills.cases()}
    assert {each.outcome for each in counts} == {"survived"}


def test_partition_on_sigterm_leaves_no_files(tmp_path: Path) -> None:
    graph = ("dataset=sbm", "dataset.num_nodes=400000", "dataset.num_features=16", "partition=random", "world_size=4")
    process = quiet(tmp_path, "partition", *graph, f"out={tmp_path}/shards", GNNPAR_CACHE=str(tmp_path / "cache"))
    try:
        deadline = time.monotonic() + 120
        while not list(tmp_path.glob(".shards.*")) and time.monotonic() < deadline and process.poll() is None:
            time.sleep(0.02)
        process.send_signal(signal.SIGTERM)
        _, err = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == 1, err
    assert "Traceback" not in err
    assert not list(tmp_path.glob(".shards.*")) and not (tmp_path / "shards").exists()


PROCESSES = ("comm=gloo", "launch.max_restarts=2", "checkpoint.every=2", "epochs=8")


def sabotaged(folder: Path, plan: Saboteur, *overrides: str) -> Outcome:
    folder.mkdir()
    return run_training(replace(compose([*SMALL, *PROCESSES, *overrides]), tracker=plan), folder)


@pytest.mark.slow  # time-outs must exceed any pause of a busy machine
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


@pytest.mark.slow
def test_run_with_a_slow_end_of_rank_0_is_not_restarted(tmp_path: Path, capsys) -> None:
    job = (*SMALL, *PROCESSES, "strategy=graph_parallel", "comm.timeout_seconds=10", "checkpoint.keep=0")
    assert run_training(replace(compose(job), tracker=SlowEnd(25.0)), tmp_path).exit_code == 0
    assert "starting all ranks again" not in capsys.readouterr().out
    assert (result(tmp_path)["status"], result(tmp_path)["restarts"]) == ("completed", 0)
