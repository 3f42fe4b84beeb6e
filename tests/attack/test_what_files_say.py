"""What plans, rows, records and checkpoints say of results is what results are made of: no lie, nothing lost by it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from checkpoints import last, result, train
from gnnpar.cli.main import run
from gnnpar.config.jobs import job_key
from gnnpar.partition.partition import read_cached, write_cached
from gnnpar.report.fairness import unequal_accuracy
from gnnpar.training.result.result import fault

WHOLE = {"epoch": 0, "loss/train": 1.0}


@pytest.fixture
def plan(tmp_path: Path) -> Path:
    train(tmp_path / "run", "strategy=graph_parallel", "world_size=2", "epochs=2")
    return tmp_path / "run" / "plan.json"


def test_a_plan_does_not_choose_which_epochs_count(plan: Path, tmp_path: Path) -> None:
    predicted = {"peak_bytes": [1.0], "epoch_seconds": 1.0, "replanned": {"epoch": 10**9}}
    strategy = json.loads(plan.read_text())["strategy"]
    assert strategy["name"] == "graph_parallel"
    plan.write_text(json.dumps(json.loads(plan.read_text()) | {"predicted": predicted}))
    assert train(tmp_path / "again", f"plan={plan}", "world_size=2", "epochs=4").status == "completed"
    told = result(tmp_path / "again")
    assert told["predicted"]["replanned"] is None and not fault(told)
    assert told["epoch_seconds"]["num_epochs"] > 0


def test_a_result_says_what_its_run_went_on_from(tmp_path: Path) -> None:
    """A lossy strategy had the accuracy of the exact run whose checkpoint it was given."""
    for name in ("exact", "alike"):
        train(tmp_path / name, "strategy=single", "seed=3", "epochs=4")
    train(tmp_path / "lossy", "strategy=graph_parallel", "codec=drop", "world_size=2", "seed=0", "epochs=4")
    resume = f"resume={tmp_path / 'exact'}"
    train(tmp_path / "other", "strategy=graph_parallel", "codec=drop", "world_size=2", "seed=0", "epochs=6", resume)
    said = result(tmp_path / "other")
    assert said["begun_otherwise"] == {"epochs": 4, "settings": ["seed", "strategy"]} and not fault(said)
    assert last(tmp_path / "other").manifest["progress"]["begun_otherwise"] == ["seed", "strategy"]
    assert "what it went on from" in unequal_accuracy(said, result(tmp_path / "lossy"))
    train(tmp_path / "on", "strategy=single", "seed=3", "epochs=6", resume)
    assert "begun_otherwise" not in result(tmp_path / "on")
    again = ("strategy=graph_parallel", "codec=drop", "world_size=2", "seed=0", "epochs=8")
    train(tmp_path / "third", *again, f"resume={tmp_path / 'other'}")
    assert result(tmp_path / "third")["begun_otherwise"]["settings"] == ["seed", "strategy"], "by way of"


def test_data_and_checkpoints_of_others_make_other_jobs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    alike = [job_key({"seed": 0, "resume": resume}, {}) for resume in (None, "auto")]
    others = [job_key({"seed": 0, "resume": resume}, {}) for resume in ("a", "b")]
    assert len({*alike}) == 1 and len({*alike, *others}) == 3
    assert run("train", ["-m", "debug=tiny", f"data_dir={tmp_path},/", "hydra.sweep.dir=s"]) == 2
    assert "a job is the same wherever its data lies" in capsys.readouterr().err


def test_a_cached_partition_has_no_empty_part(tmp_path: Path) -> None:
    lines: list[str] = []
    write_cached(tmp_path / "a.part", torch.tensor([0, 0, 0]), "partition", lines.append)
    assert read_cached(tmp_path / "a.part", 3, 2, "partition", lines.append) is None
    assert lines == [f"the cached partition {tmp_path / 'a.part'} is corrupt: making it again"]
