"""Sweeps: a failed job ends nothing, one started again runs what is missing; launchers and sweepers of conf/hydra."""

import json
import os
import re
import shutil
import signal
import sys
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import MissingConfigException
from omegaconf import DictConfig

from conftest import Refused, Run
from gnnpar.cli import status
from gnnpar.cli.main import run
from gnnpar.comm.world import num_cores
from gnnpar.config.compose import HydraJob
from gnnpar.config.errors import hydra_line
from gnnpar.config.inputs import quoted
from gnnpar.config.jobs import Job, job_key, jobs_below
from gnnpar.config.sweep import num_concurrent_jobs, per_job
from gnnpar.files import working_in
from gnnpar.settings import Settings
from gnnpar.track.console import SHOWN, Snapshot, duration, shown
from gnnpar.track.jsonl import read_rows

JOB = ("debug=tiny", "strategy=single", "world_size=1", "threads_per_rank=1", "dataset.num_nodes=120")
TINY = (*JOB, "tracker=counting", "hydra.sweep.dir=sweep")
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
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, run_here: Run) -> Path:
    """A folder with a tracker of its own, which notes the seed of every job that runs."""
    (tmp_path / "own_counting.py").write_text(COUNTING)
    (tmp_path / "tracker").mkdir()
    (tmp_path / "tracker" / "counting.yaml").write_text("_target_: own_counting.Counting\n")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def ran(folder: Path) -> list[int]:
    """Seeds of the jobs that ran since the last call."""
    file = folder / "ran.txt"
    seeds = [int(line) for line in file.read_text().split()] if file.exists() else []
    file.unlink(missing_ok=True)
    return seeds


def states(folder: Path) -> list[str]:
    return [job.state()[0] for job in jobs_below(folder / "sweep")]


@pytest.mark.fault
def test_killed_sweep_runs_the_missing_jobs_again(run_cli: Run, folder: Path, capsys: pytest.CaptureFixture) -> None:
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
    assert run("train", ["-m", *TINY, "seed=0,1,2,3"]) == 0
    assert ran(folder) == [1]
    assert run("train", ["-m", *TINY, "seed=0,1,2,3"]) == 0
    assert ran(folder) == []
    capsys.readouterr()
    assert status.run(["sweep", "--json"]) == 0
    (told,) = json.loads(capsys.readouterr().out)
    assert told["counts"] == {"done": 4}


@pytest.mark.slow
def test_job_with_another_seed_has_a_folder_of_its_own(folder: Path) -> None:
    assert run("train", ["-m", *TINY, "seed=0"]) == 0
    assert run("train", ["-m", *TINY, "seed=1,0", "data_dir=elsewhere"]) == 0
    assert ran(folder) == [0, 1]  # folders are no part of what a job is
    planned = {job.folder: job.overrides[-2:] for job in jobs_below(folder / "sweep")}
    assert planned == {"0": ("seed=0", "data_dir=elsewhere"), "1": ("seed=1", "data_dir=elsewhere")}
    sessions = {json.loads((folder / "sweep" / n / "result.json").read_text())["session"] for n in "01"}
    assert len(sessions) == 2


@pytest.mark.slow
def test_wrong_job_of_a_sweep_is_refused_and_others_run(folder: Path, run_here: Run) -> None:
    done = run_here("train", "-m", *TINY, "seed=0", "epochs=0,1")
    assert done.returncode == 1
    assert ran(folder) == [0]
    assert states(folder) == ["failed", "done"]
    assert "sweep/0 failed: epochs=0 must be a whole number >= 1  (epochs=0)" in done.stdout
    assert run_here("train", "-m", *TINY, "seed=0", "epochs=0").returncode == 2


@pytest.mark.slow
def test_keys_of_a_swept_group_are_those_of_its_jobs(folder: Path, refused: Refused) -> None:
    common = [*(o for o in TINY if o != "strategy=single"), "dataset.num_features=8"]
    swept = ["-m", *common, "strategy=gnnpipe,hybrid", "model.num_layers=2", "strategy.chunks=2"]
    assert run("train", swept) == 0  # the default has no chunks
    results = [json.loads((folder / "sweep" / n / "result.json").read_text()) for n in "01"]
    assert [result["settings"]["strategy"]["chunks"] for result in results] == [2, 2]
    asked = ["-m", "model=gcn,sage", "model.hidden=8", "strategy.chunks=2", "+model.x=1", "model.order=a,b"]
    assert per_job(asked) == [*asked[:2], "model.hidden=choice(8)", *asked[3:]]
    line = "unknown key strategy.chunks=2; strategy has backward, codec"  # sar's keys
    refused(line, "train", "-m", *common, "strategy=gnnpipe,sar", "strategy.chunks=2")


def test_defect_in_one_job_ends_no_other(folder: Path, run_here: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    settings_of = HydraJob.settings

    def broken(job: HydraJob) -> Settings:
        return {}["planted"] if job.config.seed else settings_of(job)

    monkeypatch.setattr(HydraJob, "settings", broken)
    done = run_here("train", "-m", *TINY, "seed=1,0")
    assert done.returncode == 1
    assert ran(folder) == [0]
    assert "sweep/0 failed: KeyError: 'planted'  (seed=1)" in done.stdout
    assert "Traceback" in done.stderr


def test_terminal_shows_the_sweep_and_jobs_are_silent(monkeypatch: pytest.MonkeyPatch) -> None:
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


@pytest.mark.slow
def test_job_that_differs_in_an_unread_key_is_not_trained_again(folder: Path, capsys: pytest.CaptureFixture) -> None:
    sweep = [word for word in TINY if not word.startswith(("strategy=", "world_size="))]
    argv = ["-m", *sweep, "strategy=single,graph_parallel", "codec=identity,drop", "comm=threads", "world_size=2"]
    for _ in range(2):  # once more: nothing is left to do
        assert run("train", argv) == 0
        told = capsys.readouterr().out
        assert re.search("not trained again: .* does not read codec=drop.*; its result is that of job 0", told)
    assert (folder / "ran.txt").read_text().split() == ["0"] * 3
    assert run("train", [*argv[:-1], "world_size=1", "partition=random"]) == 0
    assert re.search("does not read codec=identity .*partition=random.*; its", capsys.readouterr().out)


def test_state_of_a_job_follows_its_files(tmp_path: Path) -> None:
    job = Job(tmp_path, "a/0", "k", ("seed=0",))
    job.save()
    assert Job.read(tmp_path / "a/0") == job
    assert job.state() == ("missing", "")
    job.begin()
    (running,) = jobs_below(tmp_path)
    assert running.state() == ("running", "")
    assert replace(running, born=0.0).state()[0] == "killed"  # another process has its number now
    assert replace(running, host="elsewhere").state()[0] == "running"
    long_ago = time.time() - 3600
    os.utime(running.run_dir / "job.json", (long_ago, long_ago))
    assert replace(running, host="elsewhere").state()[0] == "killed"
    running.fail("out\nof luck", refused=True)
    (failed,) = jobs_below(tmp_path)
    assert (failed.state(), failed.refused) == (("failed", "out of luck"), True)


def test_key_of_a_job_leaves_out_folders_and_trackers() -> None:
    one = {"seed": 0, "data_dir": "a", "cache_dir": "b", "tracker": {"every": 1}}
    other = {"seed": 0, "data_dir": "c", "cache_dir": "d", "tracker": {}}
    assert job_key(one, {"tracker": "console", "model": "gcn"}) == job_key(other, {"tracker": "wandb", "model": "gcn"})
    assert job_key(one, {}) != job_key(one | {"seed": 1}, {})
    assert job_key(one, {"model": "gcn"}) != job_key(one, {"model": "gat"})


def test_folder_of_a_sweep_in_use_is_one_line(folder: Path, refused: Refused) -> None:
    with working_in(folder / "sweep", remedy="wait", say=print):
        refused("sweep is in use by", "train", "-m", *TINY, "seed=0,1")
    assert ran(folder) == []


@pytest.mark.parametrize("text", ["it's", "a\\b", "a\\\\b", "ends\\", "\\'", "''", "a b, {c}: [$]"])
def test_quoted_text_is_read_back_by_hydra(text: str) -> None:
    (override,) = OverridesParser.create().parse_overrides([f"hydra.sweep.dir={quoted(text)}"])
    assert override.value() == text


def test_snapshot_as_a_line() -> None:
    seen = Snapshot(12, 3, 1, ("a", "b"), 240.0)
    assert seen.line == "3 of 12 jobs done, 1 failed, 2 running, about 4 min left"
    assert (duration(40), duration(12_600)) == ("40 s", "3.5 h")


def test_job_that_was_killed_goes_on_from_its_last_checkpoint(run_here: Run, tmp_path: Path) -> None:
    kept = ("tracker=jsonl", "checkpoint.every=1", "hydra.sweep.dir=sweep")
    command = ("train", "-m", *JOB, *kept, "seed=0", "epochs=4")
    assert run_here(*command).returncode == 0
    job = tmp_path / "sweep" / "0"
    losses = [row["loss/train"] for row in read_rows(job)]
    shutil.rmtree(job / "checkpoint" / "epoch-000004")
    (job / "result.json").unlink()  # as after kill -9 in the last epoch
    record = json.loads((job / "job.json").read_text())
    (job / "job.json").write_text(json.dumps(record | {"born": 1.0}))
    done = run_here(*command)
    assert (done.returncode, "resumed from" in done.stdout, "at epoch 3" in done.stdout) == (0, True, True)
    assert [row["loss/train"] for row in read_rows(job)] == losses


def test_sweeper_of_hydra_runs_unpatched_and_skips_what_is_done(folder: Path) -> None:
    basic = ["-m", *TINY, "hydra/sweeper=basic"]
    assert run("train", [*basic, "seed=0,1"]) == 0
    assert run("train", [*basic, "seed=0,1,2"]) == 0
    assert ran(folder) == [0, 1, 2]
    assert run("train", [*basic, "seed=2"]) == 0  # the result in its folder is of seed 0, and stays
    assert [job.folder for job in jobs_below(folder / "sweep")] == ["0", "1", "2", "0-2"]


SMALL = (
    "debug=tiny",
    "strategy=single",
    "world_size=1",
    "threads_per_rank=1",
    "tracker=jsonl",
    "hydra.sweep.dir=sweep",
)


@pytest.mark.slow  # a new interpreter a job
@pytest.mark.parametrize(
    ("launcher", "plugin"), [("parallel", "hydra_joblib_launcher"), ("queue", "hydra_submitit_launcher")]
)
def test_jobs_in_processes_of_their_own(run_cli: Run, tmp_path: Path, launcher: str, plugin: str) -> None:
    """Two jobs run elsewhere and one fails there; started again, only that one runs."""
    pytest.importorskip(f"hydra_plugins.{plugin}")
    sweep = ("train", "-m", *SMALL, f"hydra/launcher={launcher}", "seed=0,1", "optim.lr=0.01,1e18")
    done = run_cli(*sweep, "hydra.sweeper.max_batch_size=2")
    assert done.returncode == 1
    assert sorted(states(tmp_path)) == ["done", "done", "failed", "failed"]
    assert "sweep: 2 of 4 done, 2 failed  ->  sweep" in done.stdout
    assert re.search("the loss is (nan|inf) in epoch 1", done.stdout)  # which, is the machine's
    jobs = [json.loads(file.read_text()) for file in sorted(tmp_path.glob("sweep/*/job.json"))]
    assert len(jobs) == 4
    written = {file: file.stat().st_mtime_ns for file in tmp_path.glob("sweep/*/result.json")}
    again = run_cli(*sweep, "hydra.sweeper.max_batch_size=2")
    assert "resuming: 2 of 4 jobs are done, 2 to run" in again.stdout
    changed = [f for f, when in written.items() if f.stat().st_mtime_ns != when]
    assert len(changed) == 2
    assert all(json.loads(f.read_text())["oversubscribed"] is (num_cores() < 2) for f in written)
    assert all(json.loads(f.read_text())["status"] == "failed" for f in changed)


@pytest.mark.slow  # three starts of a search
def test_search_finds_the_best_trial_and_resumes(run_cli: Run, tmp_path: Path) -> None:
    pytest.importorskip("hydra_plugins.hydra_optuna_sweeper")
    search = ("train", "-m", *SMALL, "hydra/sweeper=search", "optim.lr=choice(0.001,0.05,1e18)")
    done = run_cli(*search, "hydra.sweeper.n_trials=4")
    assert done.returncode == (0 if "failed" not in states(tmp_path) else 1), done.stderr
    best = yaml.safe_load((tmp_path / "sweep" / "optimization_results.yaml").read_text())
    results = [json.loads(file.read_text()) for file in tmp_path.glob("sweep/*/result.json")]
    assert best["best_value"] == max(r["metric"]["best_val"] for r in results if r["status"] == "completed")
    completed = {
        f: f.stat().st_mtime_ns for f in tmp_path.glob("sweep/*/result.json") if '"completed"' in f.read_text()
    }
    run_cli(*search, "hydra.sweeper.n_trials=4")
    assert {f: f.stat().st_mtime_ns for f in completed} == completed


@pytest.mark.parametrize(
    ("launcher", "at_once"),
    [
        ({"_target_": "hydra._internal.core_plugins.basic_launcher.BasicLauncher"}, "1"),
        ({"_target_": "hydra_plugins.hydra_joblib_launcher.joblib_launcher.JoblibLauncher", "n_jobs": 2}, "2"),
        ({"_target_": "hydra_plugins.hydra_joblib_launcher.joblib_launcher.JoblibLauncher", "n_jobs": 9}, "4"),
        ({"_target_": "hydra_plugins.hydra_submitit_launcher.submitit_launcher.LocalLauncher"}, "4"),
        ({"_target_": "hydra_plugins.hydra_submitit_launcher.submitit_launcher.SlurmLauncher"}, "1"),
    ],
)
def test_jobs_know_how_many_run_at_once(launcher: dict, at_once: str, monkeypatch) -> None:
    """Four jobs; what shares the cores says so in every result (oversubscribed)."""
    config: Any = SimpleNamespace(hydra=SimpleNamespace(launcher=DictConfig(launcher)))
    monkeypatch.setenv("GNNPAR_SWEEP", "")
    assert num_concurrent_jobs(config, 4) == int(at_once)


@pytest.mark.parametrize(
    ("file", "line"),
    [
        ("hydra/launcher/submitit_slurm", "hydra/launcher: submitit_slurm is an extra; pip install 'gnnpar[submitit]'"),
        ("hydra/sweeper/optuna", "hydra/sweeper: optuna is an extra; pip install 'gnnpar[optuna]'"),
    ],
)
def test_missing_extra_is_named(file: str, line: str) -> None:
    assert hydra_line(MissingConfigException("no", missing_cfg_file=file, options=["basic"]), []) == line


def test_folder_named_as_a_key_is_no_group(run_here: Run, tmp_path: Path) -> None:
    (tmp_path / "epochs").mkdir()
    assert run_here("train", "debug=tiny", "strategy=single", "epochs=2").returncode == 0


@pytest.mark.slow
def test_wrong_hydra_values_are_one_line(refused: Refused, run_here: Run, tmp_path: Path) -> None:
    small = ("debug=tiny", "strategy=single")
    cannot = "gnnpar: an override, or a key of hydra, cannot be used ("
    refused(f"{cannot}A logger name must be a string", "train", *small, "hydra.verbose=[1]")
    pytest.importorskip("hydra_plugins.hydra_optuna_sweeper")
    storage = f"hydra.sweeper.storage=sqlite:///{tmp_path}/missing/x.db"
    done = run_here("train", "-m", *small, "hydra/sweeper=optuna", storage, "seed=1,2")
    line = done.stderr.splitlines()[-1]
    assert done.returncode == 2 and line.startswith(cannot) and "unable to open database file" in line
