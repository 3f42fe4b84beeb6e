"""Plans that are compared with what they took, corrected by phase, and replaced where another one is better."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from conftest import Run
from gnnpar.cli.train import run_training
from gnnpar.config.compose import compose
from gnnpar.placement import Placement, Plan
from gnnpar.planner import replan
from gnnpar.planner.replan import Replanner
from gnnpar.pricing.rates import NOMINAL
from gnnpar.settings import ConfigError
from gnnpar.track.jsonl import read_rows
from gnnpar.track.keys import PHASES
from gnnpar.training import loop
from gnnpar.training.loop import since_of
from gnnpar.training.result.result import WARMUP_EPOCHS
from planner.machines import machine

SAID: dict[str, Any] = {
    "label": "graph_parallel",
    "epoch_seconds": 0.1,
    "candidate": {"family": "graph_parallel"},
    "phases": {"compute": 0.08, "encode": 0.0, "wire": 0.02, "bubble": 0.0, "reduce": 0.0},
}


def rows(seconds: float, *, first: int = 0, count: int = 20, **phases: float) -> list[dict[str, Any]]:
    named = {f"time/{name}_seconds": phases.get(name, 0.0) for name in PHASES}
    return [{"epoch": first + i, "time/timed": 1, "time/epoch_seconds": seconds, **named} for i in range(count)]


def replanner(seconds: float, **phases: Any) -> Replanner:
    found = Replanner(0)
    for row in rows(seconds, **phases):
        found.add(row)
    return found


def test_only_timed_epochs_after_the_warm_up_count() -> None:
    found = Replanner(10)
    for row in rows(1.0, first=8, count=9):
        found.add(row)
    found.add({**rows(9.0, first=17, count=1)[0], "time/timed": 0})
    assert [row["epoch"] for row in found.rows] == [15, 16]
    assert found.due == 10 + WARMUP_EPOCHS + replan.EPOCHS


def test_a_prediction_that_holds_is_left_alone() -> None:
    assert replan.compared(SAID, replanner(0.119, compute=0.09, exposed_wire=0.029))[0] == ""
    why, by = replan.compared(SAID, replanner(0.3, compute=0.07, other=0.01, exposed_wire=0.22))
    assert why == "measured 300 ms an epoch, predicted 100 ms (+200%; wire x8.00)"  # eleven, but at most eight
    assert by == {"compute": 1.0, "encode": 1.0, "wire": 8.0, "reduce": 1.0}


def test_rates_and_links_are_told_what_they_take() -> None:
    before = machine(2)
    setting = replan.corrected(before, {"compute": 2.0, "encode": 4.0, "wire": 3.0, "reduce": 0.5})
    rates = setting.rates[0]
    assert rates.scale == 2.0
    assert rates.code_seconds(8, 1e6) == pytest.approx(4.0 * NOMINAL.code_seconds(8, 1e6))
    assert setting.fabric.rate(0, 1) == pytest.approx(1e9 / 3)
    assert setting.fabric.latency(0, 1) == pytest.approx(3 * before.fabric.latency(0, 1))
    assert rates.reduce[0] == pytest.approx(NOMINAL.reduce[0] / 2)


def test_another_plan_must_be_another_one_and_faster() -> None:
    import torch

    placement = Placement(((0, 1),), torch.tensor([0, 1]), None, (range(1),))
    found = replanner(0.2)
    other = {**SAID, "label": "sar", "candidate": {"family": "sar"}, "epoch_seconds": 0.15}
    assert replan.better(Plan(placement, predicted={**SAID}), SAID, found, 14, "why") is None
    assert replan.better(Plan(placement, predicted={**other, "epoch_seconds": 0.195}), SAID, found, 14, "") is None
    plan = replan.better(Plan(placement, predicted=other), SAID, found, 14, "slow")
    assert plan is not None
    assert plan.predicted is not None
    assert plan.predicted["replanned"] == {
        "epoch": 14,
        "before": "graph_parallel",
        "predicted_seconds": 0.1,
        "measured_seconds": 0.2,
        "why": "slow",
    }
    assert since_of(plan.predicted) == 14
    assert since_of(SAID) == since_of(None) == 0


def test_ranks_that_share_cores_are_not_compared() -> None:
    world: Any = SimpleNamespace(how="processes", oversubscribed=True, local_size=4, cores=2, jobs_at_once=1)
    assert replan.not_compared(world) == "4 ranks share 2 cores"
    world.oversubscribed = False
    assert replan.not_compared(world) == ""
    world.how = "threads"
    assert replan.not_compared(world) == "ranks are threads of one process"


def test_it_needs_a_checkpoint_to_go_on_from() -> None:
    from gnnpar.planner.strategy import TAG
    from gnnpar.training.checkpoint.resume import check

    settings: Any = SimpleNamespace(strategy=replace(TAG(), replan=True), checkpoint=SimpleNamespace(keep=0))
    with pytest.raises(ConfigError, match=r"set checkpoint\.keep=1"):
        check(settings)


def test_a_run_says_why_times_are_not_compared(run_here: Run, tmp_path: Path) -> None:
    quick = ("strategy=tag", "strategy.rates=nominal", "strategy.replan=true", "comm=threads", "world_size=2")
    done = run_here("train", *quick, "epochs=15", "dataset.num_nodes=400", "hydra.run.dir=run")
    assert done.returncode == 0, done.stderr
    assert "tag: ranks are threads of one process: times are not compared" in done.stdout


COMMON = (
    "dataset.num_nodes=300",
    "model.num_layers=4",
    "model.dropout=0",
    "partition=random",
    "precision=fp64",
    "world_size=2",
    "comm=threads",
    "tracker=jsonl",
    "strategy=tag",
    "strategy.rates=nominal",
)
AGAIN = WARMUP_EPOCHS + replan.EPOCHS + 1


def result_of(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "result.json").read_text(encoding="utf-8"))


def losses_of(folder: Path) -> list[float]:
    return [row["loss/train"] for row in read_rows(folder)]


@pytest.fixture
def slow_links(monkeypatch: pytest.MonkeyPatch) -> None:
    """After the warm-up the machine proves to have links so slow that a pipeline is better."""
    slow = machine(2, rate=1e5, latency=1e-5)
    monkeypatch.setattr(replan, "not_compared", lambda _: "")
    monkeypatch.setattr(replan, "setting_of", lambda *_: (slow, 2))
    monkeypatch.setattr(replan, "corrected", lambda setting, _: setting)
    monkeypatch.setattr(replan, "_GAIN", float("inf"))


def test_a_run_goes_on_with_another_plan(tmp_path: Path, slow_links: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Told that links are slow, a plan without stages becomes a pipeline of one chunk: the same losses, to the end;
    also where the run is killed after that, from the checkpoint of the change and from a later one."""
    again = compose(["strategy.replan=true", "epochs=21", "checkpoint.every=16", "resume=auto", *COMMON])
    for name in ("changed", "kept", "killed", "killed_early"):
        (tmp_path / name).mkdir()
    outcome = run_training(again, tmp_path / "changed")
    assert outcome.status == "completed", outcome
    assert run_training(compose([*COMMON, "epochs=21"]), tmp_path / "kept").status == "completed"
    changed, kept = (result_of(tmp_path / name) for name in ("changed", "kept"))
    told = changed["predicted"]
    assert kept["predicted"]["label"] == told["replanned"]["before"] != told["label"]
    assert told["label"] == "gnnpipe 2 stages, 1 chunk"
    assert told["replanned"]["epoch"] == AGAIN
    assert "measured" in told["replanned"]["why"]
    assert changed["epoch_seconds"]["num_epochs"] == 21 - AGAIN - WARMUP_EPOCHS
    assert kept["predicted"]["replanned"] is None
    losses = losses_of(tmp_path / "changed")
    assert losses == pytest.approx(losses_of(tmp_path / "kept"), rel=1e-9)
    assert len(losses) == 21

    real = loop.train_epoch
    monkeypatch.setattr(loop, "train_epoch", lambda run, epoch, *rest: killed_at(17, epoch) or real(run, epoch, *rest))
    assert "killed" in (run_training(again, tmp_path / "killed").error or "")
    monkeypatch.setattr(loop, "train_epoch", real)
    why = result_of(tmp_path / "killed")["predicted"]["replanned"]["why"]
    shutil.copytree(tmp_path / "killed", tmp_path / "killed_early", dirs_exist_ok=True)
    shutil.rmtree(tmp_path / "killed_early" / "checkpoint" / "epoch-000016")
    monkeypatch.setattr(replan, "plan_again", None)  # nothing is planned a second time
    for name in ("killed", "killed_early"):
        assert run_training(again, tmp_path / name).status == "completed"
        found = result_of(tmp_path / name)
        assert found["predicted"]["label"] == told["label"]
        assert found["predicted"]["replanned"]["epoch"] == AGAIN
        assert found["predicted"]["replanned"]["why"] == why
        assert found["epoch_seconds"]["num_epochs"] == changed["epoch_seconds"]["num_epochs"]
        assert found["bytes_per_epoch"] == changed["bytes_per_epoch"]
        assert losses_of(tmp_path / name) == losses


def killed_at(last: int, epoch: int) -> None:
    if epoch == last:
        raise RuntimeError("killed")
