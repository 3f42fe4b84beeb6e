"""Sweeps through other launchers and sweepers: the ready configurations of conf/hydra."""

import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml
from hydra.errors import MissingConfigException
from omegaconf import DictConfig

from conftest import Refused, Run
from gnnpar.comm.world import num_cores
from gnnpar.config.errors import hydra_line
from gnnpar.config.jobs import jobs_below
from gnnpar.config.sweep import num_concurrent_jobs

TINY = ("debug=tiny", "strategy=single", "world_size=1", "threads_per_rank=1", "tracker=jsonl", "hydra.sweep.dir=sweep")


NUM_CORES = num_cores()


def states(folder: Path) -> list[str]:
    return [job.state()[0] for job in jobs_below(folder / "sweep")]


@pytest.mark.slow  # a new interpreter a job
@pytest.mark.parametrize(
    ("launcher", "plugin"), [("parallel", "hydra_joblib_launcher"), ("queue", "hydra_submitit_launcher")]
)
def test_jobs_in_processes_of_their_own(run_cli: Run, tmp_path: Path, launcher: str, plugin: str) -> None:
    """Two jobs run elsewhere and one fails there; started again, only that one runs."""
    pytest.importorskip(f"hydra_plugins.{plugin}")
    sweep = ("train", "-m", *TINY, f"hydra/launcher={launcher}", "seed=0,1", "optim.lr=0.01,1e18")
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
    assert all(json.loads(f.read_text())["oversubscribed"] is (NUM_CORES < 2) for f in written)
    assert all(json.loads(f.read_text())["status"] == "failed" for f in changed)


@pytest.mark.slow  # three starts of a search
def test_search_finds_the_best_trial_and_resumes(run_cli: Run, tmp_path: Path) -> None:
    pytest.importorskip("hydra_plugins.hydra_optuna_sweeper")
    search = ("train", "-m", *TINY, "hydra/sweeper=search", "optim.lr=choice(0.001,0.05,1e18)")
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
