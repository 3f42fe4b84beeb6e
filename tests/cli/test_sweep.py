"""Sweeps: a job that fails ends nothing, and one started again runs exactly what is missing."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser

from conftest import Run, environment
from gnnpar.cli import status
from gnnpar.cli.main import run
from gnnpar.config import jobs
from gnnpar.config.compose import HydraJob
from gnnpar.config.jobs import Manifest, alone_in, begin_job, job_key, refuse_job, state_of
from gnnpar.config.replay import asked, quoted, resumed
from gnnpar.config.sweep import per_job
from gnnpar.settings import ConfigError, Settings
from gnnpar.track.progress import SHOWN, Snapshot, duration, shown

TINY = (
    "debug=tiny",
    "strategy=single",
    "world_size=1",
    "threads_per_rank=1",
    "dataset.num_nodes=120",
    "tracker=counting",
    "hydra.sweep.dir=sweep",
)
COUNTING = """
import os, signal
from dataclasses import dataclass
from pathlib import Path
from gnnpar.track.tracker import Null

@dataclass(frozen=True, kw_only=True)
class Counting:
    def build(self, run_dir, epochs, job):
        seed = job["seed"]
        with open("ran.txt", "a") as file:
            file.write(f"{seed}\\n")
        if Path(f"fail-{seed}").exists():
            raise RuntimeError("planted")
        if Path(f"kill-{seed}").exists():
            os.kill(os.getpid(), signal.SIGKILL)
        return Null()
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a tracker of its own, which notes the seed of every job that runs."""
    (tmp_path / "own_counting.py").write_text(COUNTING)
    (tmp_path / "tracker").mkdir()
    (tmp_path / "tracker" / "counting.yaml").write_text("_target_: own_counting.Counting\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setattr(sys, "meta_path", [*sys.meta_path])
    monkeypatch.setitem(sys.modules, "own_counting", None)
    monkeypatch.delitem(sys.modules, "own_counting")
    return tmp_path


def ran(folder: Path) -> list[int]:
    """Seeds of the jobs that ran since the last call."""
    file = folder / "ran.txt"
    seeds = [int(line) for line in file.read_text().split()] if file.exists() else []
    file.unlink(missing_ok=True)
    return seeds


def refusal(argv: list[str]) -> str:
    with pytest.raises(ConfigError) as error:
        resumed(argv)
    return str(error.value)


def states(folder: Path) -> list[str]:
    return [state for state, _ in Manifest.read(folder / "sweep").states().values()]


@pytest.mark.fault
def test_a_sweep_killed_half_way_finishes_exactly_what_is_missing(
    run_cli: Run, folder: Path, capsys: pytest.CaptureFixture
) -> None:
    (folder / "fail-1").touch()
    (folder / "kill-2").touch()
    done = run_cli("train", "-m", *TINY, "seed=0,1,2,3")
    assert done.returncode == -signal.SIGKILL
    assert ran(folder) == [0, 1, 2]
    assert states(folder) == ["done", "failed", "killed", "missing"]
    assert status.run(["sweep"]) == 1
    said = capsys.readouterr().out
    assert "sweep: 1 of 4 done, 1 failed, 1 killed, 1 missing" in said
    assert "1 failed: rank 0: RuntimeError: planted (own_counting.py:" in said

    (folder / "kill-2").unlink()
    assert run("train", ["-m", *TINY, "seed=0,1,2,3"]) == 1  # the planted failure is still there
    assert ran(folder) == [1, 2, 3]
    assert states(folder) == ["done", "failed", "done", "done"]
    told = capsys.readouterr()
    assert "resuming: 1 of 4 jobs are done, 3 to run" in told.out
    assert "sweep: 3 of 4 done, 1 failed  ->  sweep" in told.out
    assert "sweep/1 failed: rank 0: RuntimeError: planted (own_counting.py:" in told.out
    assert "sent/epoch" in told.out  # the closing table
    assert "gnnpar: rank 0: RuntimeError: planted" in told.err

    (folder / "fail-1").unlink()
    assert run("train", ["--resume", "sweep"]) == 2  # the tracker is of this folder, and named by a file alone
    assert "sweep.json has tracker=counting, which may run code of its own" in capsys.readouterr().err
    assert ran(folder) == []
    assert run("train", ["--resume", "sweep", "tracker=counting"]) == 0
    assert ran(folder) == [1]
    assert run("train", ["--resume", "sweep", "--trust"]) == 0
    assert ran(folder) == []
    assert "no job of sweep; name some of 0, 1, 2, 3" in refusal(["--resume", "sweep", "--again", "0,9"])
    assert run("train", ["--resume", "sweep", "--trust", "--again", "2,0"]) == 0
    assert ran(folder) == [0, 2]
    sessions = [json.loads((folder / "sweep" / job / "result.json").read_text())["session"] for job in "0123"]
    assert sessions[0] == sessions[2] != sessions[1]
    assert "resume=null" not in Manifest.read(folder / "sweep").argv  # jobs of later resumes go on where they were
    assert "--again names jobs of a sweep" in refusal(["--again", "0"])
    assert "--again stands twice" in refusal(["--resume", "sweep", "--again", "0", "--again", "1"])
    assert status.run(["sweep", "--json"]) == 0
    (told,) = json.loads(capsys.readouterr().out.rpartition("sweep: 4 of 4 done  ->  sweep\n")[2])
    assert told["counts"] == {"done": 4}


def test_another_seed_is_another_job_in_a_folder_of_its_own(folder: Path) -> None:
    assert run("train", ["-m", *TINY, "seed=0"]) == 0
    assert run("train", ["-m", *TINY, "seed=1,0", "data_dir=elsewhere"]) == 0
    assert ran(folder) == [0, 1]  # folders are no part of what a job is
    planned = {job.folder: job.overrides[-1] for job in Manifest.read(folder / "sweep").jobs.values()}
    assert planned == {"0": "seed=0", "1": "data_dir=elsewhere"}
    sessions = {json.loads((folder / "sweep" / n / "result.json").read_text())["session"] for n in "01"}
    assert len(sessions) == 2


def test_a_wrong_job_is_refused_and_the_others_run(folder: Path, capsys: pytest.CaptureFixture) -> None:
    assert run("train", ["-m", *TINY, "seed=0", "epochs=0,1"]) == 1
    assert ran(folder) == [0]
    assert states(folder) == ["failed", "done"]
    assert "sweep/0 failed: epochs=0 must be a whole number >= 1  (epochs=0)" in capsys.readouterr().out
    assert run("train", ["-m", *TINY, "seed=0", "epochs=0"]) == 2


def test_keys_of_a_swept_group_are_those_of_its_jobs(folder: Path, capsys: pytest.CaptureFixture) -> None:
    swept = [*(o for o in TINY if o != "strategy=single"), "dataset.num_features=8", "strategy=gnnpipe,hybrid"]
    assert run("train", ["-m", *swept, "model.num_layers=2", "strategy.chunks=2"]) == 0  # the default has no chunks
    chunks = [
        json.loads((folder / "sweep" / n / "result.json").read_text())["settings"]["strategy"]["chunks"] for n in "01"
    ]
    assert chunks == [2, 2]
    asked = ["-m", "model=gcn,sage", "model.hidden=8", "strategy.chunks=2", "+model.x=1", "model.order=a,b"]
    assert per_job(asked) == [*asked[:2], "model.hidden=choice(8)", *asked[3:]]
    capsys.readouterr()
    assert run("train", ["-m", *swept[:-1], "strategy=gnnpipe,sar", "strategy.chunks=2"]) == 2
    assert "unknown key strategy.chunks=2; strategy has backward, codec" in capsys.readouterr().err  # sar's keys


def test_one_folder_for_several_jobs_is_refused(folder: Path, capsys: pytest.CaptureFixture) -> None:
    assert run("train", ["-m", *TINY, "seed=0,1", "hydra.sweep.subdir=same"]) == 2
    assert "hydra.sweep.subdir=same is one folder for several jobs" in capsys.readouterr().err
    assert ran(folder) == []


def test_a_defect_in_one_job_ends_no_other(
    folder: Path, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings_of = HydraJob.settings

    def broken(job: HydraJob) -> Settings:
        return {}["planted"] if job.config.seed else settings_of(job)

    monkeypatch.setattr(HydraJob, "settings", broken)
    assert run("train", ["-m", *TINY, "seed=1,0"]) == 1
    assert ran(folder) == [0]
    told = capsys.readouterr()
    assert "sweep/0 failed: KeyError: 'planted'  (seed=1)" in told.out
    assert "Traceback" in told.err


def test_states_and_keys(tmp_path: Path) -> None:
    assert state_of(tmp_path) == ("missing", "")
    begin_job(tmp_path, ["seed=0"])
    assert state_of(tmp_path) == ("running", "")
    record = json.loads((tmp_path / "job.json").read_text())
    (tmp_path / "job.json").write_text(json.dumps(record | {"born": 0.0}))  # its number is somebody else's by now
    assert state_of(tmp_path)[0] == "killed"
    (tmp_path / "job.json").write_text(json.dumps(record | {"host": "elsewhere"}))
    assert state_of(tmp_path)[0] == "running"
    long_ago = time.time() - 3600
    os.utime(tmp_path / "job.json", (long_ago, long_ago))
    assert state_of(tmp_path)[0] == "killed"
    refuse_job(tmp_path, "out\nof luck", refused=True)
    assert state_of(tmp_path) == ("failed", "out of luck")
    one = {"seed": 0, "data_dir": "a", "cache_dir": "b", "tracker": {"every": 1}}
    other = {"seed": 0, "data_dir": "c", "cache_dir": "d", "tracker": {}}
    assert job_key(one, {"tracker": "console", "model": "gcn"}) == job_key(other, {"tracker": "wandb", "model": "gcn"})
    assert job_key(one, {}) != job_key(one | {"seed": 1}, {})
    assert job_key(one, {"model": "gcn"}) != job_key(one, {"model": "gat"})


def test_one_sweep_a_folder_and_clear_refusals(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    hold = "import sys; from pathlib import Path; from gnnpar.config.jobs import alone_in\n"
    hold += "with alone_in(Path(sys.argv[1])): print(flush=True); input()"
    command = [sys.executable, "-c", hold, str(tmp_path)]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, env=environment()) as other:
        assert other.stdout and other.stdout.readline()
        with pytest.raises(ConfigError, match="is in use by process "), alone_in(tmp_path):
            pass
        other.kill()
    with alone_in(tmp_path):
        pass
    assert run("status", [str(tmp_path)]) == 2
    assert "no sweep.json below" in capsys.readouterr().err
    assert run("train", ["--resume", str(tmp_path)]) == 2
    assert "has no sweep.json with jobs" in capsys.readouterr().err
    assert run("train", ["--resume"]) == 2
    (tmp_path / "sweep.json").write_text("{")
    assert run("status", [str(tmp_path)]) == 2
    assert "sweep.json cannot be read" in capsys.readouterr().err


def test_what_a_resumed_sweep_is_told(tmp_path: Path) -> None:
    argv = ["-m", "seed=0,1", "hydra.sweep.dir=x", "hydra/launcher=parallel"]
    assert asked(argv) == ["seed=0,1", "hydra/launcher=parallel"]
    Manifest(tmp_path, asked(argv), {"k": jobs.Job("k", "0", ("seed=0",))}).save()
    expected = [
        "-m",
        "seed=0,1",
        "hydra/launcher=parallel",
        "device=cpu",
        "hydra.searchpath=[]",
        f"hydra.sweep.dir='{tmp_path}'",
    ]
    assert resumed(["--resume", str(tmp_path), "device=cpu"])[0] == expected
    for text in ("it's", "a\\b", "a\\\\b", "ends\\", "\\'", "''", "a b, {c}: [$]"):
        (override,) = OverridesParser.create().parse_overrides([f"hydra.sweep.dir={quoted(text)}"])
        assert override.value() == text
    seen = Snapshot(12, 3, 1, ("a", "b"), 240.0)
    assert seen.line == "3 of 12 jobs done, 1 failed, 2 running, about 4 min left"
    assert (duration(40), duration(12_600)) == ("40 s", "3.5 h")


def test_a_terminal_shows_the_sweep_and_jobs_are_silent(monkeypatch: pytest.MonkeyPatch) -> None:
    looked: list[int] = []

    def look() -> Snapshot:
        looked.append(1)
        return Snapshot(2, 1, 0, ("  1: seed=1  epoch 3  loss 0.5",))

    with shown(look):
        assert SHOWN not in os.environ  # no terminal here: jobs speak for themselves
    assert not looked
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    with shown(look):
        assert os.environ[SHOWN] == "1"
        time.sleep(0.6)
    assert SHOWN not in os.environ
    assert len(looked) >= 3  # at the start, twice a second, at the end


def test_what_a_strategy_does_not_read_is_not_trained_again(folder: Path, capsys: pytest.CaptureFixture) -> None:
    sweep = [word for word in TINY if not word.startswith(("strategy=", "world_size="))]
    argv = ["-m", *sweep, "strategy=single,graph_parallel", "codec=identity,drop", "comm=threads", "world_size=2"]
    for _ in range(2):  # once more: nothing is left to do
        assert run("train", argv) == 0
        told = capsys.readouterr().out
        assert re.search("not trained again: .* does not read codec=drop.*; its result is that of job 0", told)
    assert (folder / "ran.txt").read_text().split() == ["0"] * 3
    assert run("train", [*argv[:-1], "world_size=1", "partition=random"]) == 0
    assert re.search("does not read codec=identity .*partition=random.*; its", capsys.readouterr().out)


def test_resuming_a_sweep_goes_on_inside_a_job_that_is_half_done(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    monkeypatch.chdir(tmp_path)
    common = [*TINY[:-2], "tracker=jsonl", "checkpoint.every=1", "hydra.sweep.dir=sweep"]
    assert run("train", ["-m", *common, "seed=0", "epochs=4"]) == 0
    file = tmp_path / "sweep" / "0" / "checkpoint"
    whole = (tmp_path / "sweep" / "0" / "metrics.jsonl").read_text()
    shutil.rmtree(file / "epoch-000004")
    (tmp_path / "sweep" / "0" / "result.json").unlink()  # as after kill -9 in the last epoch
    record = json.loads((tmp_path / "sweep" / "0" / "job.json").read_text())
    (tmp_path / "sweep" / "0" / "job.json").write_text(json.dumps(record | {"born": 1.0}))
    capsys.readouterr()
    assert run("train", ["--resume", "sweep"]) == 0
    assert "resumed from" in (told := capsys.readouterr().out) and "at epoch 3" in told
    losses = [json.loads(line)["loss/train"] for line in whole.splitlines()]
    again = (tmp_path / "sweep" / "0" / "metrics.jsonl").read_text()
    assert [json.loads(line)["loss/train"] for line in again.splitlines()] == losses
