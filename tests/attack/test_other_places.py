"""What a fifteenth attack found: figures of other runs, graphs and hosts, and places that are not what they say."""

from __future__ import annotations

import json
import runpy
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import gnnpar
from checkpoints import train
from gnnpar.cli import partition, plan, predict
from gnnpar.cli.new import next_steps
from gnnpar.config.compose import compose
from gnnpar.files import read_json
from gnnpar.report.fairness import differences
from gnnpar.settings import Comm, ConfigError
from gnnpar.track.text import one_line
from gnnpar.training.checkpoint import files as checkpoint


@pytest.fixture
def result(tmp_path: Path) -> dict[str, Any]:
    train(tmp_path / "run", "epochs=2")
    return read_json(tmp_path / "run" / "result.json")


def test_runs_that_stop_by_other_rules_are_no_fair_pair(result: dict[str, Any]) -> None:
    stopped = {**result, "settings": {**result["settings"], "early_stopping": {"patience": 1, "min_delta": 0.0}}}
    assert differences(result, stopped) == ["early stopping"]
    before = {**result, "settings": {k: v for k, v in result["settings"].items() if k != "early_stopping"}}
    assert not differences(result, before), "runs of before say nothing of it"


def test_a_run_without_epochs_of_its_own_has_no_times(tmp_path: Path) -> None:
    train(tmp_path / "single", "strategy=single", "epochs=2")
    other = ["strategy=graph_parallel", "world_size=2", "comm=threads", f"resume={tmp_path}/single"]
    train(tmp_path / "other", "epochs=2", *other)
    assert read_json(tmp_path / "single" / "result.json")["epoch_seconds"]["num_epochs"] == 2
    mine = read_json(tmp_path / "other" / "result.json")
    assert (mine["epoch_seconds"]["mean"], mine["epoch_seconds"]["num_epochs"]) == (None, 0)


def test_epochs_with_other_threads_do_not_count_in_times(tmp_path: Path) -> None:
    train(tmp_path, "epochs=4")
    train(tmp_path, "epochs=5", "resume=auto", "threads_per_rank=2")
    mine = read_json(tmp_path / "result.json")
    assert mine["begun_otherwise"] == {"epochs": 4, "settings": ["threads_per_rank"]}
    assert mine["epoch_seconds"]["num_epochs"] == 1
    assert not differences(mine, {**mine, "begun_otherwise": None}), "accuracies are those of any threads"


def test_checkpoints_that_are_all_damaged_push_out_no_new_ones(tmp_path: Path) -> None:
    train(tmp_path, "epochs=4")
    for part in (tmp_path / "checkpoint").rglob("*.pt"):
        part.write_bytes(b"damaged")
    train(tmp_path, "epochs=2", "resume=auto")
    found = checkpoint.latest(tmp_path, lambda line: None)
    assert found is not None
    assert found.epoch == 2
    assert (tmp_path / "checkpoint-before").is_dir(), "nothing is deleted"


def test_a_pyg_model_takes_loops_from_the_shards_that_it_trains_on(tmp_path: Path) -> None:
    graph = ["dataset=sbm", "dataset.num_nodes=60", "dataset.self_loops=false", "partition=range", "world_size=2"]
    assert partition.run([*graph, f"out={tmp_path}/shards"]) == 0
    asked = ["model=pyg", "model.target=torch_geometric.nn.models.GCN", f"shards={tmp_path}/shards"]
    assert compose(asked).resolved["model"]["self_loops"] is False
    assert compose([*asked, "model.self_loops=true"]).resolved["model"]["self_loops"] is True


def test_a_key_beside_a_plan_changes_the_plans_own_model(tmp_path: Path) -> None:
    made_for = ["model=sage", "model.hidden=32", "dataset=sbm", "dataset.num_nodes=80", "world_size=1", "--no-measure"]
    assert plan.run([*made_for, "--out", str(tmp_path / "p")]) == 0
    settings = compose([f"plan={tmp_path}/p/plan.json", "model.dropout=0.1"])
    assert (settings.names["model"], settings.resolved["model"]["hidden"]) == ("sage", 32)
    assert settings.resolved["model"]["dropout"] == 0.1


def test_a_prediction_needs_the_graph_that_it_changes(tmp_path: Path) -> None:
    train(tmp_path / "run", "epochs=2")
    with pytest.raises(ConfigError, match=r"of which graph\? set dataset=NAME"):
        predict.run([str(tmp_path / "run"), "dataset.split_seed=1"])
    graph = ["dataset=sbm", "dataset.num_nodes=60", "dataset.self_loops=false", "partition=range", "world_size=1"]
    assert partition.run([*graph, f"out={tmp_path}/shards"]) == 0
    with pytest.raises(ConfigError, match=r"were made with dataset\.self_loops=False"):
        predict.run([str(tmp_path / "run"), f"shards={tmp_path}/shards"])


def test_a_rank_reads_no_other_checkpoint_than_rank_0(tmp_path: Path) -> None:
    train(tmp_path / "run", "epochs=2")
    found = checkpoint.latest(tmp_path / "run", lambda line: None)
    assert found is not None
    found.rank(0, torch.device("cpu"))
    name = checkpoint.name_of(0)
    other = {**found.manifest, "files": {name: {**found.manifest["files"][name], "sha256": "0" * 64}}}
    with pytest.raises(ValueError, match="of another checkpoint than rank 0's"):
        replace(found, manifest=other).rank(0, torch.device("cpu"))


def test_a_run_that_has_stopped_early_stays_so(tmp_path: Path) -> None:
    stopping = ["epochs=60", "early_stopping.patience=1", "early_stopping.min_delta=1"]
    train(tmp_path, *stopping)
    before = read_json(tmp_path / "result.json")["epochs_done"]
    assert before < 60
    assert train(tmp_path, *stopping, "resume=auto").exit_code == 0
    assert read_json(tmp_path / "result.json")["epochs_done"] == before
    train(tmp_path, *stopping, "resume=auto", "early_stopping.patience=3")
    assert read_json(tmp_path / "result.json")["epochs_done"] > before


def test_a_folder_of_the_name_of_a_key_hides_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert not plan.run(["model=gcn", "dataset=sbm", "dataset.num_nodes=60", "--no-measure", "--out", "plan"])
    assert compose(["plan=plan/plan.json"]).resolved["plan"] == "plan/plan.json"


def test_an_exported_program_refuses_nodes_that_there_are_not(tmp_path: Path) -> None:
    template = Path(gnnpar.__file__).parent / "templates" / "export" / "predict.txt"
    told = {"num_features": 2, "dtype": "float32", "prepare": compose([]).resolved["dataset"]}
    (tmp_path / "model.json").write_text(json.dumps(told))
    (tmp_path / "predict.py").write_text(template.read_text())
    prepared = runpy.run_path(str(tmp_path / "predict.py"))["prepared"]
    assert prepared(torch.ones(4, 2), torch.tensor([[0], [3]]))[1].shape[1] >= 1
    for wrong in (4, -1):  # in a key of two ends, another edge
        with pytest.raises(ValueError, match=r"edge_index names nodes .* x has 4 rows"):
            prepared(torch.ones(4, 2), torch.tensor([[wrong], [0]]))


def test_names_in_printed_commands_are_no_options() -> None:
    steps = next_steps("model", "mine", Path("/tmp/lab;touch a"))
    assert steps[1].strip() == "cd '/tmp/lab;touch a'"


def test_seconds_have_bounds_that_sockets_take() -> None:
    code = "from gnnpar.config.compose import compose; compose(['comm.lost_seconds=100000'])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert "comm.lost_seconds" in done.stderr
    assert Comm().lost_seconds == 30


def test_a_study_whose_data_was_exchanged_says_so(result: dict[str, Any], tmp_path: Path) -> None:
    from gnnpar.cli.ablate import refuse_other_data

    other = {**result, "hashes": {**result["hashes"], "graph": "0" * 64}}
    refuse_other_data({("", 0, 0): result, ("a", 0, 0): result}, tmp_path)
    with pytest.raises(ConfigError, match="its data has changed between two starts"):
        refuse_other_data({("", 0, 0): result, ("a", 0, 0): other}, tmp_path)


def test_lines_of_others_stay_one_line() -> None:
    assert one_line("a\n  gnnpar: run this") == "a\\n  gnnpar: run this"
