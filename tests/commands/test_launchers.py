"""Sweeps through other launchers and sweepers: the ready configurations of conf/hydra."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml

from conftest import Run
from gnnpar.main import hydra_line
from gnnpar.runner.jobs import Manifest

TINY = ("debug=tiny", "strategy=single", "world_size=1", "threads_per_rank=1", "tracker=jsonl", "hydra.sweep.dir=sweep")


def states(folder: Path) -> list[str]:
    return [state for state, _ in Manifest.read(folder / "sweep").states().values()]


@pytest.mark.slow  # a new interpreter a job
@pytest.mark.parametrize(
    ("launcher", "plugin"), [("parallel", "hydra_joblib_launcher"), ("queue", "hydra_submitit_launcher")]
)
def test_jobs_in_processes_of_their_own(run_cli: Run, tmp_path: Path, launcher: str, plugin: str) -> None:
    """Two jobs run elsewhere and one fails there; started again, only that one runs."""
    pytest.importorskip(f"hydra_plugins.{plugin}")
    sweep = ("train", "-m", *TINY, f"hydra/launcher={launcher}", "seed=0,1", "optim.lr=0.01,1e30")
    done = run_cli(*sweep, "hydra.sweeper.max_batch_size=2")
    assert done.returncode == 1
    assert sorted(states(tmp_path)) == ["done", "done", "failed", "failed"]
    assert "sweep: 2 of 4 done, 2 failed  ->  sweep" in done.stdout
    assert "the loss is nan in epoch 1" in done.stdout
    jobs = [json.loads(file.read_text()) for file in sorted(tmp_path.glob("sweep/*/job.json"))]
    assert len(jobs) == 4
    written = {file: file.stat().st_mtime_ns for file in tmp_path.glob("sweep/*/result.json")}
    again = run_cli("train", "--resume", "sweep")
    assert "resuming: 2 of 4 jobs are done, 2 to run" in again.stdout
    changed = [f for f, when in written.items() if f.stat().st_mtime_ns != when]
    assert len(changed) == 2
    assert all(json.loads(f.read_text())["status"] == "failed" for f in changed)


@pytest.mark.slow  # three starts of a search
def test_a_search_finds_the_best_trial_and_resumes(run_cli: Run, tmp_path: Path) -> None:
    pytest.importorskip("hydra_plugins.hydra_optuna_sweeper")
    search = ("train", "-m", *TINY, "hydra/sweeper=search", "optim.lr=choice(0.001,0.05,1e30)")
    done = run_cli(*search, "hydra.sweeper.n_trials=4")
    assert done.returncode == (0 if "failed" not in states(tmp_path) else 1), done.stderr
    best = yaml.safe_load((tmp_path / "sweep" / "optimization_results.yaml").read_text())
    results = [json.loads(file.read_text()) for file in tmp_path.glob("sweep/*/result.json")]
    assert best["best_value"] == max(r["metric"]["best_val"] for r in results if r["status"] == "completed")
    completed = {
        f: f.stat().st_mtime_ns for f in tmp_path.glob("sweep/*/result.json") if '"completed"' in f.read_text()
    }
    run_cli("train", "--resume", "sweep", "hydra.sweeper.n_trials=4")
    assert {f: f.stat().st_mtime_ns for f in completed} == completed


def test_a_missing_extra_is_named() -> None:
    from hydra.errors import MissingConfigException

    error = MissingConfigException("no", missing_cfg_file="hydra/launcher/submitit_slurm", options=["basic"])
    assert hydra_line(error, []) == "hydra/launcher: submitit_slurm is an extra; pip install 'gnnpar[submitit]'"
    error = MissingConfigException("no", missing_cfg_file="hydra/sweeper/optuna", options=["basic"])
    assert hydra_line(error, []) == "hydra/sweeper: optuna is an extra; pip install 'gnnpar[optuna]'"
