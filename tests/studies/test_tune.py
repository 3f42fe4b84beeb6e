"""conf/tune and its random search: spaces fit what they are for, budgets are equal, the test set is not looked at."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

import hydra
import pytest

from composing import names
from conftest import ROOT
from gnnpar.__main__ import main
from gnnpar.config.compose import compose, search_installed
from gnnpar.paths import conf_dir
from gnnpar.settings import ConfigError
from gnnpar.training.optim import Adam

sys.path.insert(0, str(ROOT / "experiments"))

tune: Any = import_module("compare_all.tune")
blocks: Any = tune.blocks
records: Any = tune.records

JOB = ["strategy=adaqp", "model=gcn", "epochs=4"]


def test_every_space_names_keys_that_are_there() -> None:
    """A model's space beside a strategy's, composed as trials are."""
    settings_of = {
        "mix": ["strategy=gnnpipe", "strategy.gradient=mix"],
        "minibatch_cluster": ["strategy=minibatch", "strategy.sampler=cluster"],
        "minibatch_saint": ["strategy=minibatch", "strategy.sampler=saint"],
    }
    models, strategies = sorted(set(names("tune")) - {"width"}), names("tune/strategy")
    assert set(models) <= set(names("model"))
    assert set(strategies) <= {*settings_of, *names("strategy")}
    for i in range(max(len(models), len(strategies))):
        model, own = models[i % len(models)], strategies[i % len(strategies)]
        job = settings_of.get(own, [f"strategy={own}"])
        keys = tune.space_of(f"{model},strategy/{own}" + (",width" if i == 0 else ""), job)
        assert len(keys) > len(tune.read_space(model)) >= 3
        drawn = tune.draw(keys, 1 + i, seed=0)
        settings = compose([f"model={model}", *job, "epochs=60", "model.num_layers=4", *drawn])
        assert isinstance(settings.optim, Adam)
        assert 1e-3 <= settings.optim.lr <= 3e-2


def test_a_space_is_what_hydra_sweeps_over() -> None:
    search_installed()
    with hydra.initialize_config_dir(version_base="1.3", config_dir=str(conf_dir())):
        asked = ["+tune=[gat,width]", "+tune/strategy=adaqp", "strategy=adaqp", "hydra/sweeper=search"]
        config = hydra.compose("config", asked, return_hydra_config=True)
    params = dict(config.hydra.sweeper.params)
    assert params == {k: v for name in ("gat", "width", "strategy/adaqp") for k, v in tune.read_space(name).items()}
    assert "tune" not in config


def test_trials_draw_the_same_for_every_strategy() -> None:
    shared, own = tune.read_space("gcn"), tune.space_of("gcn", JOB)
    assert set(shared) < set(own)
    assert tune.draw(own, 0, seed=3) == []
    for trial in range(1, 20):
        drawn = tune.draw(own, trial, seed=3)
        assert [o for o in drawn if not o.startswith("strategy.")] == tune.draw(shared, trial, seed=3)
        assert drawn == tune.draw(own, trial, seed=3)
        assert drawn != tune.draw(own, trial, seed=4)
    rates = [float(tune.draw({"optim.lr": shared["optim.lr"]}, t, seed=0)[0].partition("=")[2]) for t in range(1, 200)]
    assert 0.3 < sum(rate < 0.0055 for rate in rates) / len(rates) < 0.7  # half of them below the geometric middle
    more = {"a": "range(2, 9, 3)", "b": "int(interval(1, 3))", "c": "choice('[5,5]', 7)"}
    values = {o for t in range(1, 60) for o in tune.draw(more, t, seed=0)}
    assert values == {"a=2", "a=5", "a=8", "b=1", "b=2", "b=3", "c=[5,5]", "c=7"}


@pytest.fixture
def trained(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """Overrides of all trials; validation is best at the lowest dropout, and a period of 20 fails."""
    asked: list[list[str]] = []

    def train(overrides: Sequence[str]) -> dict[str, Any]:
        asked.append(list(overrides))
        given = dict(o.split("=", 1) for o in overrides)
        if given.get("strategy.codec.period") == "20":
            raise SystemExit("python -m gnnpar train\ngnnpar: codec.period=20 is longer than the run of 4 epochs")
        metric = {"best_val": 1 - float(given.get("model.dropout", 0.3)), "best_epoch": 3, "test_at_best_val": 0.123456}
        facts = {"epochs": 4, "epochs_done": 4, "commit": "abc", "hardware": "", "versions": {}, "hashes": {}}
        return {"result": {"metric": metric, **facts}, "curve": [{"metric/test": 0.123456}]}

    monkeypatch.setattr(blocks, "train", train)
    return asked


def test_a_search(trained: list[list[str]], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Chosen on validation; equal budgets; goes on where it was stopped; nothing of the test set is written down."""
    out = tmp_path / "new" / "tune.jsonl"
    first = tune.tuned(JOB, space="gcn", trials=3, seed=0, out=out)
    assert len(trained) == 3
    assert all("seed=1000" in overrides for overrides in trained)
    best = tune.tuned([*JOB, "seed=5", "block=2"], space="gcn", trials=8, seed=0, out=out)  # the same job
    assert len(trained) == 8
    rows = records.read(out)
    assert [row["trial"] for row in rows] == list(range(8))
    assert rows[0]["overrides"] == []
    assert any("longer than the run" in (row["error"] or "") for row in rows)
    vals = {tuple(row["overrides"]): row["val"] for row in rows if row["val"] is not None}
    assert vals[tuple(best)] == max(vals.values())
    assert vals[tuple(first)] <= vals[tuple(best)]
    kept = json.loads((tmp_path / "new" / "tune.chosen.json").read_text())
    assert len(kept) == 1
    assert (kept[0]["overrides"], kept[0]["trials"], kept[0]["epochs"]) == (best, 8, 4)
    assert kept[0]["failed"] == sum(bool(row["error"]) for row in rows) > 0
    assert kept[0]["default_val"] == 0.7
    assert "0.123456" not in out.read_text() + json.dumps(kept)
    tune.tuned(["strategy=sar", "model=gcn"], space="gcn", trials=8, seed=0, out=out)
    assert len(trained) == 16
    assert len(json.loads((tmp_path / "new" / "tune.chosen.json").read_text())) == 2
    assert "8/8" in capsys.readouterr().out


@pytest.mark.usefixtures("trained")
def test_what_cannot_be_tuned_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for job, space, trials, said in (
        (JOB, "gnc", 2, "space=gnc does not exist, did you mean gin?"),
        (JOB, "gcn", 0, "trials=0 tries nothing"),
        (JOB, "gcn,sage", 2, "optim.lr is in two of the spaces gcn, sage, strategy/adaqp"),
        (["strategy=adaqp", "model=gcn,gat"], "gcn", 2, "model=gcn,gat: a search is of one configuration"),
    ):
        with pytest.raises(ConfigError) as caught:
            tune.tuned(job, space=space, trials=trials, seed=0, out=tmp_path / "trials.jsonl")
        assert said in str(caught.value)
    with pytest.raises(SystemExit, match="longer than the run"):
        tune.tuned([*JOB, "strategy.codec.period=20"], space="gcn", trials=2, seed=0, out=tmp_path / "trials.jsonl")
    assert not (tmp_path / "trials.jsonl").exists()
    assert tune.main(["strategy=adaqp,sar", "model=gcn", "--space", "gcm", "--trials", "2"]) == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_trials_are_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two strategies on a tiny graph, as the command does it; here without a process a run."""
    monkeypatch.chdir(tmp_path)

    def call(arguments: Sequence[str], *, failures: bool = False) -> None:
        assert main(["train", *arguments, "tracker=jsonl"]) == 0

    monkeypatch.setattr(blocks, "call", call)
    tiny = ["model=gcn", "dataset.num_nodes=200", "model.hidden=8", "world_size=2", "comm=threads", "epochs=3"]
    assert tune.main(["strategy=graph_parallel,gnnpipe", *tiny, "--trials", "2", "--out", "tune.jsonl"]) == 0
    rows = records.read(tmp_path / "tune.jsonl")
    assert [(row["job"].split()[0], row["trial"], row["epochs_done"]) for row in rows] == [
        (f"strategy={name}", trial, 3) for name in ("graph_parallel", "gnnpipe") for trial in (0, 1)
    ]
    assert all(0 <= row["val"] <= 1 for row in rows)
    assert [o for o in rows[3]["overrides"] if not o.startswith("strategy.")] == rows[1]["overrides"]
    kept = json.loads((tmp_path / "tune.chosen.json").read_text())
    assert [entry["train_seed"] for entry in kept] == [1000, 1000]
