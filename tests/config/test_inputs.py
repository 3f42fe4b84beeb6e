"""plan=FILE and shards=FOLDER beside overrides, and values of overrides."""

import json
from pathlib import Path

import pytest
import yaml

from conftest import Refused, Run
from gnnpar.cli import plan
from gnnpar.cli.main import run
from gnnpar.config.compose import compose, with_references
from gnnpar.config.inputs import as_value
from gnnpar.files import read_json
from gnnpar.settings import ConfigError
from gnnpar.training.result.record import agreed_on


def test_references_to_a_dataset_follow_the_one_of_a_plan() -> None:
    model = {"_target_": "gnnpar.models.pyg.model.PyG", "kwargs": {"of": "${dataset.classes}", "all": ["a ${seed}"]}}
    data = {"name": "a", "classes": 8}
    written = {"seed": 0, "model": model, "optim": {"note": "on ${dataset.name}"}, "dataset": data}
    kwargs = {"of": 8, "all": ["a 0"]}
    before = {**written, "model": {**model, "kwargs": kwargs}, "optim": {"note": "on a"}}
    made = with_references({"dataset": {"name": "b", "classes": 4}}, written, before)
    assert made == {"seed": 0, "model": {**model, "kwargs": {**kwargs, "of": 4}}, "optim": {"note": "on b"}}
    assert with_references({"seed": 3}, written, before)["model"]["kwargs"]["all"] == ["a 3"]


@pytest.mark.parametrize(
    ("dataset", "line"),
    [
        ({"name": "${oc.env:HOME}"}, r"dataset of a file may hold no \$\{"),
        ({}, "dataset of a file: .*name.* not found"),
    ],
)
def test_references_inside_a_plan_are_refused(dataset: dict[str, str], line: str) -> None:
    written = {"model": {"text": "${dataset.name}"}, "dataset": {"name": "a"}}
    before = {**written, "model": {"text": "a"}}
    with pytest.raises(ConfigError, match=line):
        with_references({"dataset": dataset}, written, before)


@pytest.mark.slow
def test_experiment_beside_a_plan_is_refused_where_both_set_a_group(
    run_here: Run, refused: Refused, tmp_path: Path
) -> None:
    rmat = ("dataset=rmat", "dataset.scale=6")
    assert run_here("train", *rmat, "strategy=single", "epochs=1", "hydra.run.dir=run").returncode == 0
    file = tmp_path / "run" / "plan.json"
    setup = {"names": {"dataset": "rmat"}, "dataset": compose(rmat).resolved["dataset"]}
    file.write_text(json.dumps(read_json(file) | {"setup": setup}))
    (tmp_path / "experiment").mkdir()
    for name, text in {"other": "defaults:\n  - override /dataset: sbm_typed\n", "longer": "epochs: 2\n"}.items():
        (tmp_path / "experiment" / f"{name}.yaml").write_text(f"# @package _global_\n{text}")
    for several in ("+experiment=other", "debug=tiny"):
        refused(f"{several}: also sets keys that run/checkpoint", "predict", "run", several, "--out", "logits.npy")
        said = f"{several}: also sets keys that gnnpar check does not read"
        refused(said, "check", "strategy=single", several, "--worlds", "1")
    common = ("train", "plan=run/plan.json", "threads_per_rank=1")
    assert run_here(*common, "+experiment=longer", "hydra.run.dir=a").returncode == 0
    assert read_json(tmp_path / "a" / "result.json")["epochs_done"] == 2
    said = "experiment=other sets the dataset, and so does the file of plan= or shards=: leave one of them out"
    refused(said, *common, "+experiment=other", "hydra.run.dir=b")
    refused("debug=overfit sets the", *common, "debug=overfit", "hydra.run.dir=b")


def test_fingerprint_of_a_rank_names_its_shards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    few = ["dataset=sbm", "dataset.num_nodes=60"]
    for out in ("one", "two"):
        assert run("partition", [*few, "world_size=2", f"out={out}"]) == 0
    assert run("partition", [*few, "dataset.graph_seed=1", "world_size=2", "out=other"]) == 0
    plain, one, two, other = (
        agreed_on(compose(given))
        for given in ([*few, "world_size=2"], ["shards=one"], ["shards=two"], ["shards=other"])
    )
    assert plain["shards"] == "none" and one["shards"] == two["shards"]
    assert len({each["shards"] for each in (plain, one, other)}) == 3


SMALL = ["dataset=sbm", "dataset.num_nodes=60"]


def test_config_yaml_has_what_a_plan_brings(tmp_path: Path) -> None:
    assert plan.run([*SMALL, "model=sage", "world_size=1", "--no-measure", "--out", str(tmp_path / "p")]) == 0
    asked = [f"plan={tmp_path}/p/plan.json", "epochs=1", f"hydra.run.dir={tmp_path}/run"]
    assert run("train", asked) == 0
    left = yaml.safe_load((tmp_path / "run" / "config.yaml").read_text())
    settings = read_json(tmp_path / "run" / "result.json")["settings"]
    assert {key: left[key] for key in ("model", "strategy", "dataset")} == {
        key: settings[key] for key in ("model", "strategy", "dataset")
    }


@pytest.mark.slow
def test_plan_prices_its_own_model_and_keeps_its_parts(tmp_path: Path) -> None:
    made_for = ["dataset=sbm", "dataset.num_nodes=300", "topology=two_nodes", "--no-measure", "world_size=2"]
    assert plan.run([*made_for, "--out", str(tmp_path / "p")]) == 0
    asked = [f"plan={tmp_path}/p/plan.json", "comm=threads", "epochs=1"]
    with pytest.raises(ConfigError, match="the plan has its parts"):
        compose([*asked, "partition=random"])
    for run_dir, more, priced in (("own", [], True), ("other", ["model=gat"], False)):
        assert run("train", [*asked, *more, f"hydra.run.dir={tmp_path}/{run_dir}"]) == 0
        assert (read_json(tmp_path / run_dir / "result.json")["predicted"] is not None) == priced


@pytest.mark.quick(2)
@pytest.mark.parametrize("name", ["null", "a,b", "k=v", "it's", "1e3", "shards-2", "a b/c", "nan"])
def test_printed_value_is_read_back_as_the_same_path(name: str) -> None:
    assert compose([f"profile={as_value(name)}"]).profile == Path(name)
