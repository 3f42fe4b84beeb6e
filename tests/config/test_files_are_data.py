"""Files that people pass on name no code of their own: it is refused before it is imported (docs/adr/0034)."""

from __future__ import annotations

import json
import os
import re
import sys
from pathlib import Path
from typing import Any

import pytest

import gnnpar
from checkpoints import train
from gnnpar.cli.ablate import refuse_classes
from gnnpar.cli.main import run
from gnnpar.config.compose import compose
from gnnpar.config.jobs import Job, Manifest
from gnnpar.config.replay import Replay, resumed
from gnnpar.durable import read_checked_json, write_checked_json
from gnnpar.settings import ConfigError, instantiate
from gnnpar.targets import refuse_foreign

EVIL = """
from pathlib import Path
Path({marker!r}).write_text("ran")
class Evil:
    num_layers, in_one_piece, wraps = 1, "", False
    def __init__(self, **_):
        Path({marker!r}).write_text("ran")
    def build(self, *_, **__):
        pass
    on = build
"""
CALLABLES = (
    *("evil.Evil", "os.system", "pathlib.Path", "gnnpar.durable.Path", "gnnpar.durable.open_whole"),
    *("gnnpar.train", "gnnpar.load"),  # which the package finds when it is asked
)


@pytest.fixture
def marker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file that evil.py of the working directory writes when it is imported or called."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setattr(sys, "meta_path", [*sys.meta_path])
    monkeypatch.setitem(sys.modules, "evil", None)
    monkeypatch.delitem(sys.modules, "evil")
    marker = tmp_path / "marker"
    (tmp_path / "evil.py").write_text(EVIL.format(marker=str(marker)))
    return marker


def plan(**setup: Any) -> str:
    single = {"name": "single", "_target_": "gnnpar.parallel.single.strategy.Single"}
    return json.dumps({"strategy": single, "setup": {"names": {}, **setup}})


@pytest.mark.parametrize("target", CALLABLES)
@pytest.mark.parametrize("group", ["strategy", "model"])
def test_a_plan_names_no_foreign_class(marker: Path, group: str, target: str) -> None:
    node = {"name": "x", "_target_": target}
    text = json.dumps({"strategy": node}) if group == "strategy" else plan(model=node)
    Path("plan.json").write_text(text)
    with pytest.raises(ConfigError) as refused:
        compose(["plan=plan.json"])
    line = f"{group} of plan=plan.json names {target}, which is no class of gnnpar or of an installed plugin: "
    assert str(refused.value).startswith(line)
    assert "--trust" in str(refused.value)
    assert not marker.exists()


def test_a_function_of_gnnpar_is_no_class_of_a_configuration(marker: Path) -> None:
    """A checkpoint named gnnpar.train, with a model whose target was any callable: gnnpar.load ran it."""
    for target in ("gnnpar.load", "gnnpar.durable.write_text_whole"):
        with pytest.raises(ConfigError, match=rf"^tracker\._target_={target} is no class$"):
            instantiate({"_target_": target, "run": "x", "file": "marker", "text": ""}, "tracker")
    assert not marker.exists()


@pytest.mark.parametrize(
    "target", ["gnnpar.launch.joined.JoinedRank", "gnnpar.placement.Placement", "gnnpar.data.dataset.Dataset"]
)
def test_a_file_names_no_dataclass_of_gnnpar_that_is_no_configuration(target: str) -> None:
    """JoinedRank would open a connection."""
    with pytest.raises(ValueError, match=f"^plan names {target}, which is no class of gnnpar or of an installed"):
        refuse_foreign({"codec": {"_target_": target}}, "plan", remedy="leave it out")


def test_a_checkpoint_names_no_function_of_gnnpar(marker: Path) -> None:
    assert train(Path("run"), "epochs=1").exit_code == 0
    (manifest,) = Path("run").glob("checkpoint/*/manifest.json")
    data = read_checked_json(manifest)
    model = {"_target_": "gnnpar.train", "model": "pyg", "data": "sbm", "model.target": "evil.Evil"}
    data["run"]["settings"]["model"] = model
    write_checked_json(manifest, data)
    with pytest.raises(ValueError, match=r"names gnnpar\.train, which is no class of gnnpar or of an installed plugin"):
        gnnpar.load("run")
    assert not marker.exists()


def test_a_plugin_that_cannot_be_imported_is_not_looked_up_in_the_working_directory(
    marker: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gnnpar.targets.plugin_packages", lambda: {"evil"})
    with pytest.raises(ValueError, match=r"names evil\.Evil, which is no class of gnnpar or of an installed plugin"):
        refuse_foreign({"_target_": "evil.Evil"}, "a file", remedy="no")
    assert not marker.exists()


def test_a_target_deep_in_a_plan_is_seen(marker: Path) -> None:
    Path("plan.json").write_text(
        plan(model={"_target_": "gnnpar.models.gcn.GCN", "x": [{"y": {"_target_": "evil.Evil"}}]})
    )
    with pytest.raises(ConfigError, match=r"model of plan=plan\.json names evil\.Evil"):
        compose(["plan=plan.json"])
    assert not marker.exists()


def test_a_target_below_a_thousand_lists_is_seen() -> None:
    tree: Any = {"_target_": "evil.Evil"}
    for _ in range(5_000):
        tree = [tree]
    with pytest.raises(ValueError, match=r"a file names evil\.Evil"):
        refuse_foreign(tree, "a file", remedy="")


def test_what_the_user_names_is_his_own(marker: Path) -> None:
    """A group that he chooses by name gives the plan's way; a class that he typed is allowed."""
    Path("own.py").write_text("from gnnpar.models.gcn import GCN\nclass Own(GCN): pass\n")
    Path("model").mkdir()
    Path("model/own.yaml").write_text("_target_: own.Own\n")
    Path("plan.json").write_text(plan(model={"_target_": "own.Own"}))
    with pytest.raises(ConfigError, match="give model=NAME yourself, or --trust"):
        compose(["plan=plan.json"])
    assert type(compose(["plan=plan.json", "model=own"]).model).__name__ == "Own"
    assert type(compose(["plan=plan.json", "model=gcn"]).model).__name__ == "GCN"
    sys.modules.pop("own")


def test_trust_lets_a_plan_name_any_class_and_says_so(marker: Path, capsys: pytest.CaptureFixture) -> None:
    Path("plan.json").write_text(plan(model={"_target_": "evil.Evil"}))
    assert run("cite", ["plan=plan.json"]) == 2
    assert not marker.exists()
    assert run("cite", ["plan=plan.json", "--trust"]) == 0
    assert marker.exists()
    assert "model of plan=plan.json names evil.Evil; it is trusted, and its code runs\n" in capsys.readouterr().err
    marker.unlink()
    assert run("cite", ["plan=plan.json"]) == 2  # of that command alone


def test_a_checkpoint_names_no_foreign_class(marker: Path, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    assert train(tmp_path / "run", "strategy=single", "epochs=1").exit_code == 0
    (file,) = (tmp_path / "run").glob("checkpoint/*/manifest.json")
    tree = read_checked_json(file)
    tree["run"]["settings"]["tracker"] = {"_target_": "evil.Evil"}
    write_checked_json(file, tree)
    with pytest.raises(ValueError, match=r"names evil\.Evil, which is no class of gnnpar or of an installed plugin"):
        gnnpar.load(tmp_path / "run")
    assert run("export", ["run"]) == 2
    assert "--trust" in capsys.readouterr().err
    assert not marker.exists()
    assert gnnpar.load(tmp_path / "run", trust=True).epoch == 1
    assert marker.exists()


def test_shards_name_no_foreign_class(marker: Path, tmp_path: Path) -> None:
    argv = ["dataset.num_nodes=60", "dataset.num_features=3", "world_size=1", "partition=range", "out=shards"]
    assert run("partition", argv) == 0
    file = tmp_path / "shards" / "manifest.json"
    tree = read_checked_json(file)
    tree["setup"]["dataset"] = {"_target_": "evil.Evil"}
    write_checked_json(file, tree)
    with pytest.raises(ConfigError, match=r"dataset of shards=shards names evil\.Evil"):
        compose(["shards=shards"])
    assert not marker.exists()


@pytest.mark.parametrize(
    "override",
    [
        "model._target_=evil.Evil",
        "+x={_target_:evil.Evil}",
        "model=own",  # YAML of the working directory, chosen by a file
        "model=gcn,own",
        "model=choice(gcn,own)",
        "+own=x",
        "model@hydra.launcher=own",
        "hydra.launcher._target_=evil.Evil",
        "hydra.launcher.setup=[touch x]",
        "hydra/launcher=own",
        "hydra/launcher=submitit_local",  # shadowed by YAML of the working directory
        "hydra.searchpath=[file:///tmp]",
        "hydra.callbacks.x._target_=evil.Evil",
        "hydra.sweeper.custom_search_space=evil.Evil",
        "+hydra.sweeper.params.model=own",
        "+hydra.launcher.additional_parameters.task_prolog=evil.sh",
        "debug=",  # which Hydra reads as debug/.yaml
        "debug=[]",
        "hydra/launcher=",
        f"+model/{'a' * 210}=evil",  # longer than no folder may be called
        f"+model/{'a' * 5000}=evil",
        "model.target=evil${hydra:job.num}.Evil",  # which is no name before the job runs
        "model.target=${hydra.job.num}",
        "--config-dir=own",
    ],
)
def test_a_sweep_replays_nothing_that_may_run_code(
    marker: Path, tmp_path: Path, override: str, capsys: pytest.CaptureFixture
) -> None:
    for folder in ("model", "debug", f"model/{'a' * 210}"):
        Path(folder).mkdir()
    for file in ("model/own", "debug/", f"model/{'a' * 210}/evil"):
        Path(f"{file}.yaml").write_text("_target_: evil.Evil\n")
    Path("hydra/launcher").mkdir(parents=True)
    Path("hydra/launcher/submitit_local.yaml").write_text("_target_: evil.Evil\n")
    Path("sweep").mkdir()
    Manifest(Path("sweep"), ["seed=0,1", override], {"k": Job("k", "0", ("seed=0",))}).save()
    assert run("train", ["--resume", "sweep"]) == 2
    assert re.search(
        rf"sweep.json has {re.escape(override[:50])}.*, which may run code of its own", capsys.readouterr().err
    )
    assert not marker.exists()


def test_a_job_of_a_sweep_chooses_no_yaml_of_the_folder(
    marker: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    """However it came to that: what a job resolves to is held, too, and not the words of the file alone."""
    Path("debug").mkdir()
    evil = "# @package _global_\nhydra: {job: {env_set: {X: evil.Evil}}}\n"
    evil += "model: {_target_: '${oc.env:X,gnnpar.models.gcn.GCN}'}\n"  # what it was when the sweep was planned
    Path("debug/evil.yaml").write_text(evil)
    Path("sweep").mkdir()
    stored = ["strategy=single", "epochs=1", "+tune=width", "+hydra.sweeper.params.debug=evil"]
    Manifest(Path("sweep"), stored, {"k": Job("k", "0", ("seed=0",))}).save()
    assert run("train", ["--resume", "sweep"]) == 2
    assert "sweep.json has +hydra.sweeper.params.debug=evil, which may run code" in capsys.readouterr().err
    monkeypatch.setattr("gnnpar.config.replay._is_harmless", lambda override: True)
    assert run("train", ["--resume", "sweep"]) == 2
    assert "debug=evil does not exist" in capsys.readouterr().err  # Hydra does not look into this folder
    monkeypatch.setattr("gnnpar.config.replay._names_yaml", lambda override: True)
    assert run("train", ["--resume", "sweep", "seed=0"]) == 2
    assert "sweep.json chooses debug=evil of this folder: type it again" in capsys.readouterr().err
    assert not marker.exists()


def test_a_file_that_is_typed_names_no_class(marker: Path, capsys: pytest.CaptureFixture) -> None:
    """Any word with a dot in what was typed was taken for one."""
    Path("sweep").mkdir()
    stored = ["debug=tiny", "strategy=single", "model=pyg", "model.target=evil.npz"]
    Manifest(Path("sweep"), stored, {"k": Job("k", "0", ("seed=0",))}).save()
    assert run("train", ["--resume", "sweep", "data_dir=evil.npz"]) == 2
    assert "sweep.json names evil.npz, which is no class of gnnpar" in capsys.readouterr().err
    assert not marker.exists()


@pytest.mark.parametrize(
    "override",
    [
        "seed=range(0,1000000000)",
        "+hydra.sweeper.params.seed=range(0,1000000000)",
        "+hydra.sweeper.params.seed='range(0,1000000000)'",
    ],
)
def test_a_sweep_without_end_is_refused_before_it_is_listed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, override: str, capsys: pytest.CaptureFixture
) -> None:
    monkeypatch.chdir(tmp_path)
    assert run("train", ["-m", "model.hidden=8,16", override]) == 2
    assert "the sweep asks for 2,000,000,000 jobs, at most 100,000 are listed" in capsys.readouterr().err
    assert run("train", ["-m", "--cfg", "job", "seed=0,1"]) == 2
    assert "--cfg shows the configuration of one run" in capsys.readouterr().err


@pytest.mark.parametrize("end", ["inf", "nan", "-inf"])
def test_a_range_without_end_is_a_line(end: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("train", ["-m", "debug=tiny", f"seed=range(0,{end})"]) == 2
    assert "the sweep asks for 100,001 jobs, at most 100,000 are listed" in capsys.readouterr().err


@pytest.mark.parametrize("typed", ["model.self_loops=true", "model=pyg", "model.kwargs={}"])
def test_typing_a_key_of_a_group_trusts_no_class_that_the_sweep_names(
    marker: Path, typed: str, capsys: pytest.CaptureFixture
) -> None:
    Path("sweep").mkdir()
    stored = ["debug=tiny", "strategy=single", "model=pyg", "model.target=evil.Evil"]
    Manifest(Path("sweep"), stored, {"k": Job("k", "0", ("seed=0",))}).save()
    assert run("train", ["--resume", "sweep", typed]) == 2
    assert "sweep.json names evil.Evil, which is no class of gnnpar" in capsys.readouterr().err
    assert not marker.exists()


@pytest.mark.parametrize("typed", ["model.target=evil.Evil", "model=own", "model=own,gcn"])
def test_a_class_that_is_typed_or_in_yaml_that_is_typed_is_named(marker: Path, typed: str) -> None:
    own = {"model": {"_target_": "gnnpar.models.pyg.model.PyG", "target": "evil.Evil"}}
    Path("model").mkdir()
    Path("model/own.yaml").write_text(json.dumps(own["model"]))
    job = [typed.partition(",")[0], "model.kwargs.hidden=8", "seed=0"]
    Replay(Path("sweep.json"), (typed,)).check_settings(own, job)
    for other in ("model.hidden=8", "model=gcn"):  # whatever filled the group in
        with pytest.raises(ConfigError, match=r"names evil\.Evil"):
            Replay(Path("sweep.json"), (other,)).check_settings(own, [other])


def test_a_key_below_one_that_has_none_is_a_line(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    (tmp_path / "sweep").mkdir()
    stored = ["debug=tiny", "hydra.sweeper.params.model.target=os.system"]
    Manifest(tmp_path / "sweep", stored, {"k": Job("k", "0", ("seed=0",))}).save()
    assert run("train", ["--resume", str(tmp_path / "sweep")]) == 2
    assert "an override sets a key below something that has none" in capsys.readouterr().err


@pytest.mark.parametrize(
    "override",
    [
        "model=gcn,gat",
        "strategy=choice(single,sar)",
        "model.hidden=8,16",
        "codec@strategy.boundary=bf16",
        "+tune=[gat,width]",
        "debug=tiny",
        "hydra/launcher=joblib",
        "hydra.launcher.n_jobs=2",
        "hydra.sweep.subdir='${hydra.job.num}'",
        "hydra/sweeper=search",
        "hydra.sweeper.n_trials=4",
        "+hydra.sweeper.params.model.hidden=8,16",
        "+hydra.sweeper.params.model=gcn,gat",
        "~debug",
    ],
)
def test_a_sweep_replays_what_gnnpar_brings(tmp_path: Path, override: str) -> None:
    tmp_path.joinpath("sweep").mkdir()
    Manifest(tmp_path / "sweep", [override], {"k": Job("k", "0", ("seed=0",))}).save()
    argv, replay = resumed(["--resume", str(tmp_path / "sweep")])
    assert override in argv and replay is not None


@pytest.mark.parametrize(
    "override",
    [
        "model._target_=evil.Evil",
        "model={_target_:evil.Evil}",
        "+x._target_.y=evil.Evil",
        "model.target=evil.Evil",
        "model@hydra.launcher=own",
    ],
)
def test_a_study_names_no_foreign_class(marker: Path, override: str, capsys: pytest.CaptureFixture) -> None:
    Path("study.yaml").write_text(json.dumps({"base": ["debug=tiny", override], "factors": {"codec": ["codec=bf16"]}}))
    assert run("ablate", ["study.yaml"]) == 2
    assert "may run code of its own, and a study is data" in capsys.readouterr().err
    assert not marker.exists()


@pytest.mark.parametrize(
    ("base", "line"),
    [
        (["model.target=${dataset.name}"], "may run code of its own"),
        (["model.target=gnnpar.${dataset.name}", "+model.kwargs={target: evil.Evil}"], "may run code of its own"),
        (["model._target_=gnnpar.models.pyg.model.${dataset.name}"], "may run code of its own"),
        (["+model@model.kwargs=pyg", "model.kwargs.target=evil.Evil"], "names evil.Evil, which is no class of gnnpar"),
        (["+theirs=x"], "chooses YAML of the folder theirs here"),
        (["+theirs/model@model=x"], "chooses YAML of the folder theirs/model here"),
    ],
)
def test_a_study_hides_no_class(marker: Path, base: list[str], line: str, capsys: pytest.CaptureFixture) -> None:
    """The name of a class was looked at as it was written, and not as what it became."""
    Path("theirs/model").mkdir(parents=True)
    for folder in ("theirs", "theirs/model"):
        Path(folder, "x.yaml").write_text("# @package _global_\nmodel: {_target_: evil.Evil}\n")
    base = ["debug=tiny", "model=pyg", "dataset.name=targets.locate", *base]
    Path("study.yaml").write_text(json.dumps({"base": base, "factors": {"codec": ["codec=bf16"]}}))
    assert run("ablate", ["study.yaml"]) == 2
    err = capsys.readouterr().err
    assert line in err and err.count("\n") == 1
    assert not marker.exists()


def test_a_study_may_choose_a_class_of_the_folder_by_the_name_of_its_yaml(marker: Path) -> None:
    Path("model").mkdir()
    Path("model/own.yaml").write_text("_target_: gnnpar.models.pyg.model.PyG\ntarget: evil.Evil\n")
    tree = {"model": {"_target_": "gnnpar.models.pyg.model.PyG", "target": "evil.Evil"}}
    refuse_classes(Path("study.yaml"), tree, ["debug=tiny", "model=own", "epochs=1"])
    for overrides in (["model=pyg"], ["model=own", "model.target=evil.Other"]):
        other = {"model": tree["model"] | {"target": "evil.Other"}}
        with pytest.raises(ConfigError, match=r"study\.yaml names evil\.Other, which is no class of gnnpar"):
            refuse_classes(Path("study.yaml"), other, ["debug=tiny", *overrides])
    assert not marker.exists()


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ('base: ["dataset.name=${oc.env:GNNPAR_TOKEN}"]', r"base[0]=dataset.name=${oc.env:GNNPAR_TOKEN} reads the env"),
        ("base: ['tag=${${tracker.project}:x}']", r"base[0]=tag=${${tracker.project}:x} reads the env"),
        ("base: [cache_dir=/elsewhere]", "base[0]=cache_dir=/elsewhere: a study, which is data, chooses no folder"),
        (
            "base: [resume=/elsewhere/run]",
            "base[0]=resume=/elsewhere/run: a study, which is data, begins from no run of yours",
        ),
        ('base: ["model=../../{here}/away"]', ": options are names of files in a folder model, and no paths"),
        ('base: ["model=[{here}/away]"]', "a list of options is for -m, as model=a,b; give one name"),
        ('base: ["+tune=[../../{here}/away]"]', "options are names of files in a folder tune, and no paths"),
        ("base: &a [x, *a]", "it repeats a part of itself by *; write it out"),
        ("base: [" + "x" * (1 << 20) + "]", "bytes, more than 65536"),
    ],
)
def test_a_study_reads_no_environment_writes_nowhere_else_and_ends(
    marker: Path, text: str, line: str, capsys: pytest.CaptureFixture
) -> None:
    Path("away.yaml").write_text("_target_: os.system\ncommand: touch ran\n")
    text = text.replace("{here}", "../" * 20 + str(Path.cwd()))
    Path("study.yaml").write_text(text + '\nfactors: {codec: [codec=bf16, "optim.lr=${seed}"]}\n')
    assert run("ablate", ["study.yaml"]) == 2
    err = capsys.readouterr().err
    assert line in err and err.count("\n") == 1
    assert not Path("ran").exists()


def test_a_study_that_is_a_pipe_is_not_waited_for(marker: Path, capsys: pytest.CaptureFixture) -> None:
    os.mkfifo("pipe.yaml")
    assert run("ablate", ["pipe.yaml"]) == 2
    assert "it is no file" in capsys.readouterr().err


def test_jobs_of_a_sweep_stay_in_its_folder(tmp_path: Path) -> None:
    Manifest(tmp_path, [], {"k": Job("k", "../elsewhere", ())}).save()
    with pytest.raises(ConfigError, match=r"the job folder \.\./elsewhere is not below it"):
        Manifest.read(tmp_path)


@pytest.mark.parametrize(
    "key", ["hydra.launcher.n_jobs", "hydra.sweeper.n_jobs", "hydra.launcher.tasks_per_node", "hydra.launcher.nodes"]
)
@pytest.mark.parametrize("value", ["65", "-1", "9" * 30, "1e3"])
def test_a_sweep_starts_no_thousand_workers(tmp_path: Path, key: str, value: str) -> None:
    jobs = {"k": Job("k", "0", ("seed=0",))}
    Manifest(tmp_path, ["seed=0", f"{key}={value}"], jobs).save()
    with pytest.raises(ConfigError, match=rf"has {key}=.* type it again"):
        resumed(["--resume", str(tmp_path)])


def test_a_study_sends_no_runs_to_whom_it_names(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    study = {"base": ["debug=tiny", "strategy=single", "tracker=wandb"], "factors": {"a": ["tracker.entity=somebody"]}}
    (tmp_path / "study.yaml").write_text(json.dumps(study))
    assert run("ablate", [str(tmp_path / "study.yaml")]) == 2
    assert "tracker.entity=somebody sends runs to whom the study names" in capsys.readouterr().err
