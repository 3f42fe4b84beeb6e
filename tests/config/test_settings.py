"""Settings from YAML, plans and overrides are checked before a rank starts; files are whole or not there."""

import errno
import json
import os
import pickle
import random
import re
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from importlib import invalidate_caches
from pathlib import Path
from typing import Annotated, Any, Literal

import annotated_types as at
import pytest
import yaml
from omegaconf import OmegaConf

from composing import names
from conftest import Refused, Run
from gnnpar import targets
from gnnpar.cli import plan
from gnnpar.cli.main import run
from gnnpar.cli.train import run_training
from gnnpar.config.compose import compose, with_references
from gnnpar.config.inputs import as_value, expand_shorthands, with_plan
from gnnpar.config.jobs import job_key
from gnnpar.files import WriteError, open_atomic, read_json, write_text_atomic
from gnnpar.launch.launch import world_of
from gnnpar.models.gcn import GCN
from gnnpar.paths import conf_dir, locate, own_cache, path_of
from gnnpar.settings import ConfigError, build_settings, instantiate, iter_groups
from gnnpar.targets import refuse_foreign
from gnnpar.training.checks import check, check_strategy
from gnnpar.training.result.record import agreed_on

QUIET = {"KINETO_LOG_LEVEL": "99", "TORCH_CPP_LOG_LEVEL": "ERROR"}  # as __main__ sets them
GROUPS = {p.name: names(p.name) for p in sorted(conf_dir().iterdir()) if p.name not in ("codec", "debug", "tune")}
TOGETHER = [  # one of each group at a time: composing takes longer than instantiating
    {group: files[number % len(files)] for group, files in GROUPS.items() if files}
    for number in range(max(map(len, GROUPS.values())))
]
CODECS = [{"codec": name} for name in names("codec")]  # some strategies refuse some codecs


@pytest.mark.parametrize("chosen", [*TOGETHER, *CODECS], ids=lambda chosen: "-".join(chosen.values()))
def test_every_yaml_composes_and_instantiates(chosen: dict[str, str]) -> None:
    settings = compose([*(f"{group}={name}" for group, name in chosen.items()), "data_dir=somewhere"])
    assert {group: settings.names[group] for group in chosen} == chosen
    assert settings.data_dir == Path.cwd() / "somewhere"
    refuse_foreign(settings.resolved, "a file", remedy="")  # a file may name whatever gnnpar brings


@pytest.mark.parametrize("file", sorted((conf_dir() / "debug").glob("*.yaml")), ids=lambda p: p.stem)
def test_debug_preset_overrides_defaults_and_yields_to_overrides(file: Path) -> None:
    assert compose([f"debug={file.stem}"]).epochs == OmegaConf.load(file).epochs
    assert compose([f"debug={file.stem}", "epochs=7"]).epochs == 7


def on(strategy: str, *rows: tuple[str, str]) -> list[tuple[str, str]]:
    """Rows of overrides and lines, each with this strategy."""
    return [(f"strategy={strategy} {override}", line) for override, line in rows]


@pytest.mark.quick(30)
@pytest.mark.parametrize(
    ("overrides", "line"),
    [
        ("world_size=0", "world_size=0 must be a whole number >= 1"),
        ("epochs=ten", "epochs=ten must be a whole number >= 1"),
        ("epochs=2.5", "epochs=2.5 must be a whole number >= 1"),
        ("seed=true", "seed=true must be a whole number >= 0"),
        ("precision='fp\n32'", "precision=fp\\n32 must be one of fp32, fp64, bf16"),
        ("precision=fp23", "precision=fp23 must be one of fp32, fp64, bf16, did you mean fp32?"),
        ("threads_per_rank=none", "threads_per_rank=none must be a whole number >= 1 and <= 1024 or auto"),
        ("threads_per_rank=2048", "threads_per_rank=2048 must be a whole number >= 1 and <= 1024 or auto"),
        ("early_stopping.patience=0", "early_stopping.patience=0 must be a whole number >= 1 or null"),
        ("optim.lr=-0.1", "optim.lr=-0.1 must be a number > 0"),
        ("optim.betas=[0.9]", "optim.betas=[0.9] must be a list of 2, each a number >= 0 and < 1"),
        ("optim.schedule=cosin", "must be one of constant, cosine, step, warmup, did you mean cosine?"),
        ("optim.schedule=warmup", "optim: schedule=warmup with warmup_epochs=0 warms up never"),
        ("strategy.codec=7", "strategy.codec=7 must be a group or an object with _target_"),
        ("strategy.codec={_target_:gnnpar.models.gcn.GCN}", "strategy.codec=gnnpar.models.gcn.GCN has no exactness"),
        ("comm.backend=null", "comm.backend=null must be one of gloo, nccl, threads"),
        ("codec=uniform codec.bits=3", "codec.bits=3 must be one of 1, 2, 4, 8, 32, fp8, bf16"),
        ("+model.depth=3", "unknown key model.depth=3; model has"),
        ("+epoch=3", "unknown key epoch=3, did you mean epochs?; there are"),
        ("hidden=3", "; there is model.hidden, model.kwargs.hidden, where the model is a class of PyG"),
        ("task=regression", "task=regression does not exist; for real targets set dataset.task=regression;"),
        ("+experiments/scaling=study", "experiments/scaling=study: there is no folder experiments/scaling"),
        ("optim._target_=gnnpar.training.optim.Adan", "optim._target_=gnnpar.training.optim.Adan cannot be imported"),
        ("comm._target_=gnnpar.settings.Host", "comm=gnnpar.settings.Host is no Comm"),
        (
            "strategy=grap_parallel",
            "strategy=grap_parallel does not exist, did you mean graph_parallel?; strategy can be",
        ),
        ("modle=gcn", "unknown key modle=gcn, did you mean model?; there are"),
        ("model.hiden=3", "unknown key model.hiden=3, did you mean hidden?; model has"),
        ("optim.lr.x=3", "optim.lr"),
        ("epochs=[", "epochs=[ is no override"),
        *on("minibatch", ("strategy.walk_length=1000000000", "strategy.walk_length=1000000000")),
        *on("minibatch", ("strategy.coverage=1000000000", "strategy.coverage=1000000000")),
        *on("bns", ("strategy.rate=1e-300", "strategy.rate=1e-300")),
        *on(
            "sar",
            ("strategy.rounds=parts", "strategy.rounds=parts must be a number > 0 or one of part, peer, one, did you"),
            ("strategy.rounds=0", "strategy.rounds=0 must be a number > 0 or one of part, peer, one"),
            ("strategy.rounds=-2.5", "strategy.rounds=-2.5 must be a number > 0 or one of part, peer, one"),
            ("strategy.prefetch=-1", "strategy.prefetch=-1 must be a whole number >= 0"),
            ("strategy.backward=pushed", "strategy.backward=pushed must be one of push, pull, did you mean push?"),
            ("strategy.remat=1", "strategy.remat=1 must be true or false"),
            ("+strategy.round=peer", "unknown key strategy.round=peer, did you mean rounds?; strategy has"),
        ),
        *on(
            "adaqp",
            ("strategy.codec.variance_weight=1.5", "strategy.codec.variance_weight=1.5 must be a number >= 0 and <= 1"),
            ("strategy.codec.menu=[2,3]", "strategy.codec.menu=[2, 3] must be a list of one of 1, 2, 4, 8"),
            (
                "strategy.codec.menu=[4,2]",
                "strategy.codec: menu=[4, 2] must be a list of 1, 2, 4, 8 in ascending order",
            ),
            ("strategy.codec.first_bits=16", "strategy.codec.first_bits=16 must be one of 1, 2, 4, 8"),
            ("strategy.codec.solver=gurobi", "strategy.codec.solver=gurobi must be one of threshold, highs"),
            ("strategy.codec.warmup=0", "strategy.codec.warmup=0 must be a whole number >= 1"),
            ("strategy.codec.budget_bits=1.5", "strategy.codec: budget_bits=1.5 is outside menu=[2, 4, 8]"),
        ),
    ],
    ids=lambda value: value[:40],
)
def test_wrong_value_is_one_line(overrides: str, line: str) -> None:
    with pytest.raises(ConfigError) as error:
        compose(overrides.split(" "))
    assert line in str(error.value)
    assert "\n" not in str(error.value)
    assert str(conf_dir()) not in str(error.value)


@pytest.mark.parametrize(
    ("given", "key"),
    [
        ("strategy=graph_parallel codec=adaptive", "codec"),
        ("strategy=adaqp", "strategy.codec"),
        ("strategy=adaqp_q", "strategy.codec"),
    ],
)
def test_period_longer_than_the_run_is_refused(given: str, key: str) -> None:
    with pytest.raises(ValueError, match=rf"^{key}.period=20 is longer than the run of 15 epochs; set it to 3, or "):
        check_strategy(compose([*given.split(), "epochs=15"]), 2)
    check_strategy(compose([*given.split(), "epochs=15", f"{key}.period=3"]), 2)


@pytest.mark.quick(1)
@pytest.mark.parametrize(
    ("name", "file"),
    [
        ("codec=bfloat16", "codec=bf16"),
        ("codec=fp16", "codec=bf16"),
        ("codec=float16", "codec=bf16"),
        ("codec=none", "codec=identity"),
        ("codec=int8", "codec=uniform"),
        ("codec=int4", "codec=uniform codec.bits=4"),
        ("codec@strategy.codec=int4", "codec@strategy.codec=uniform strategy.codec.bits=4"),
    ],
)
def test_other_name_of_a_codec_is_the_same_configuration(name: str, file: str) -> None:
    """Also its hash, and the name in results."""
    strategy = "strategy=adaqp" if "@" in name else "strategy=graph_parallel"
    given, canonical = compose([strategy, name]), compose([strategy, *file.split()])
    assert given == canonical
    assert job_key(given.resolved, given.names) == job_key(canonical.resolved, canonical.names)


def test_own_codec_file_hides_another_name_of_a_codec(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "codec").mkdir()
    (tmp_path / "codec" / "int4.yaml").write_text("_target_: gnnpar.codecs.codec.Drop\n")
    monkeypatch.chdir(tmp_path)
    assert expand_shorthands(["codec=int4", "codec=int8"]) == ["codec=int4", "codec=uniform", "codec.bits=8"]


def test_missing_class_is_refused_with_the_nearest_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "near_net.py").write_text("class Net: ...\nclass Graph: ...\n")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(AttributeError, match=r"has no attribute 'Nett', did you mean Net\?$"):
        locate("near_net.Nett")
    with pytest.raises(AttributeError, match=r"has no attribute 'Other'$"):
        locate("near_net.Other")


@dataclass(frozen=True, kw_only=True)
class Inner:
    depth: Annotated[int, at.Interval(ge=1, le=4)] = 2
    kind: Literal["a", "b"] = "a"


@dataclass(frozen=True, kw_only=True)
class Outer:
    inner: Inner
    anything: Any = None
    pair: tuple[float, float] = (0.0, 1.0)
    many: tuple[Inner, ...] = ()
    where: Path | None = None
    note: str = field(default="")


def node(**fields: Any) -> dict[str, Any]:
    return {"_target_": f"{__name__}.Outer", **fields}


@pytest.fixture(autouse=True)
def _importable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, __name__, sys.modules.get(__name__) or sys.modules[Outer.__module__])


def test_nested_dataclasses_are_built_and_checked() -> None:
    inner = {"_target_": f"{__name__}.Inner", "depth": 3}
    built = instantiate(node(inner={"depth": 4}, anything=inner, pair=[1, 2.5], many=[inner], where="x/y"), "g")
    assert built == Outer(
        inner=Inner(depth=4), anything=Inner(depth=3), pair=(1.0, 2.5), many=(Inner(depth=3),), where=Path("x/y")
    )


INNER = {"_target_": f"{__name__}.Inner"}


@pytest.mark.parametrize(
    ("fields", "line"),
    [
        ({}, "g.inner is missing; it must be Inner"),
        ({"inner": {"depth": 9}}, "g.inner.depth=9 must be a whole number >= 1 and <= 4"),
        ({"inner": {"_target_": "gnnpar.settings.Comm"}}, "g.inner=gnnpar.settings.Comm is no Inner"),
        ({"inner": {"_target_": "sys.exit"}}, "g.inner=sys.exit is no Inner"),  # and is not called
        ({"inner": {}, "many": [{**INNER, "kind": "c"}]}, "g.many[0].kind=c must be one of a, b"),
        ({"inner": {}, "note": ["a", INNER]}, "g.note=['a', {"),
        ({"inner": {}, "pair": [1, INNER]}, "g.pair[1]={"),
        ({"inner": {}, "note": 3}, "g.note=3 must be text"),
        ({"inner": {}, "anything": {"_target_": "nowhere.X"}}, "g.anything._target_=nowhere.X cannot be imported"),
    ],
)
def test_error_in_a_nested_field_names_its_key(fields: dict, line: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(line)):
        instantiate(node(**fields), "g")


def test_number_of_an_environment_variable_is_a_number(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, text in {"RANKS": "4", "RATE": "2.5e-1", "FLAG": "true", "WORD": "four"}.items():
        monkeypatch.setenv(name, text)
    settings = compose(["world_size=${oc.env:RANKS}", "optim.lr=${oc.env:RATE}", "trace=${oc.env:FLAG}"])
    assert (settings.world_size, settings.trace) == (4, True)
    assert settings.optim == compose(["optim.lr=0.25"]).optim
    with pytest.raises(ConfigError, match=r"world_size=four must be a whole number"):
        compose(["world_size=${oc.env:WORD}"])


def test_plan_beside_a_strategy_or_codec_is_refused(tmp_path: Path) -> None:
    plan = tmp_path / "plan.json"
    plan.write_text('{"strategy": {"name": "single", "_target_": "gnnpar.parallel.single.strategy.Single"}}')
    base = compose([])
    config, names = with_plan({**base.resolved, "plan": str(plan)}, base.names, ["epochs=3"])
    assert build_settings(config, names).names["strategy"] == "single"
    with pytest.raises(ConfigError, match="the plan sets the strategy"):
        with_plan(config, names, ["strategy.overlap=none"])
    with pytest.raises(ConfigError, match="the plan sets the strategy; leave one of them out"):
        with_plan(config, names, ["codec=uniform"])
    with pytest.raises(ConfigError, match=r"cannot be read: FileNotFoundError"):
        with_plan(config | {"plan": "nowhere.json"}, names, [])


def test_yaml_of_the_working_directory_adds_options(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "mine.yaml").write_text("_target_: gnnpar.models.gcn.GCN\nhidden: 7\n")
    (tmp_path / "experiments").mkdir()
    (tmp_path / "experiments" / "deep.yaml").write_text("# @package _global_\nepochs: 17\n")
    monkeypatch.chdir(tmp_path)
    settings = compose(["model=mine", "+experiments=deep"])
    assert isinstance(settings.model, GCN)
    assert settings.model.hidden == 7
    assert settings.epochs == 17


SPAWNED = """
import pickle, sys, pathlib
settings = pickle.loads(pathlib.Path("settings").read_bytes())
from gnnpar.cli.train import run_training
import gnnpar.launch.processes
assert run_training(settings, pathlib.Path(".")).status == "completed"
absent = ("hydra", "omegaconf", "wandb", "torch_geometric", "gnnpar.planner", "torch._dynamo", "sympy", "triton")
print([name for name in sys.modules if name.startswith(absent)])
"""


def test_spawned_rank_imports_no_heavy_package(run_python: Run, tmp_path: Path) -> None:
    """A pickled Settings, unpickled and trained with in a fresh process, as a spawned rank does it."""
    settings = compose(["strategy=single", "threads_per_rank=1", "debug=tiny", "tracker=jsonl", f"data_dir={tmp_path}"])
    (tmp_path / "settings").write_bytes(pickle.dumps(settings))
    done = run_python("-c", SPAWNED, **QUIET)
    assert (done.stderr, done.stdout.splitlines()[-1]) == ("", "[]")


NET = """
import torch
from torch_geometric.nn import GCNConv

class Net(torch.nn.Module):
    def __init__(self, in_channels, out_channels, width=None):
        super().__init__()
        self.conv = GCNConv(width or in_channels, out_channels)

    def forward(self, x, edge_index):
        return self.conv(x, edge_index)

class Broken(Net):
    def forward(self, x, edge_index):
        return self.conv(x, edge_index) @ x
"""


@pytest.mark.quick(1)
@pytest.mark.parametrize(
    ("target", "width", "line"),
    [
        ("a_net.Net", None, None),
        ("b_net.Net", 16, None),  # the dataset's: another one than is tried
        ("c_net.Net", 20, r"model.target=c_net.Net cannot run on 16 features: "),
        ("d_net.Broken", None, r"model.target=d_net.Broken cannot run on 16 features: "),
    ],
)
def test_pyg_model_that_cannot_be_built_is_refused_before_ranks_start(
    target: str, width: int | None, line: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Started(Exception): ...

    def launch(*given: object, **more: object) -> None:
        raise Started

    (tmp_path / f"{target.partition('.')[0]}.py").write_text(NET)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("gnnpar.launch.launch.launch", launch)
    data = ["dataset=sbm", "dataset.num_nodes=200", "dataset.num_features=16", "world_size=2"]
    kwargs = [] if width is None else [f"model.kwargs.width={width}"]
    settings = compose([*data, "strategy=graph_parallel", "model=pyg", f"model.target={target}", *kwargs])
    with pytest.raises(ValueError if line else Started, match=line):
        run_training(settings, tmp_path / "run")


METADATA = "Metadata-Version: 2.1\nName: {name}\nVersion: 1\n"


def package(folder: Path, name: str, *, touch: Path) -> None:
    """A distribution that brings YAML, and whose import leaves a file."""
    (folder / f"{name}-1.dist-info").mkdir(parents=True)
    (folder / f"{name}-1.dist-info" / "METADATA").write_text(METADATA.format(name=name))
    (folder / f"{name}-1.dist-info" / "entry_points.txt").write_text(f"[gnnpar.conf]\n{name} = {name}.conf\n")
    (folder / name / "conf" / "model").mkdir(parents=True)
    (folder / name / "__init__.py").write_text(f"open({str(touch)!r}, 'w').close()\n")
    (folder / name / "conf" / "__init__.py").write_text("")
    (folder / name / "conf" / "model" / f"{name}.yaml").write_text(f"_target_: {name}.models.Net\n")


def test_file_names_only_classes_in_the_yaml_of_a_plugin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package(tmp_path, "plug", touch=tmp_path / "imported")
    (tmp_path / "plug" / "models.py").write_text("class Net: ...\n")
    (tmp_path / "plug" / "danger.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w').close()\nclass Net: ...\n")
    monkeypatch.setattr(sys, "path", [*sys.path, str(tmp_path)])
    monkeypatch.setitem(sys.modules, "plug", None)
    monkeypatch.delitem(sys.modules, "plug")
    invalidate_caches()
    targets.refuse_foreign({"_target_": "plug.models.Net"}, "a file", remedy="no")
    for other in ("plug.danger.Net", "plug.__main__.Net", "plug.models.Other"):
        with pytest.raises(ValueError, match="which is no class of gnnpar or of an installed plugin"):
            targets.refuse_foreign({"_target_": other}, "a file", remedy="no")
    assert not (tmp_path / "ran").exists()


def test_key_beside_a_plan_changes_the_model_of_the_plan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder that is named like the key is no config group."""
    monkeypatch.chdir(tmp_path)
    made_for = ["model=sage", "model.hidden=32", "dataset=sbm", "dataset.num_nodes=80", "world_size=1", "--no-measure"]
    assert plan.run([*made_for, "--out", "plan"]) == 0
    settings = compose(["plan=plan/plan.json", "model.dropout=0.1"])
    assert settings.resolved["plan"] == "plan/plan.json"
    assert (settings.names["model"], settings.resolved["model"]["hidden"]) == ("sage", 32)
    assert settings.resolved["model"]["dropout"] == 0.1


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


TINY = ("debug=tiny", "comm=threads", "tracker=jsonl", "threads_per_rank=1", "checkpoint.keep=0", "epochs=1")
VALUES = (
    *("0", "1", "-1", "0.5", "64", "4097", "1e3", "1e400", "9223372036854775808", "nan", "-inf", "null", "true", "''"),
    *("x", "auto", "a/b", "../x", "[]", "[1,2]", "[null]", "[[1]]", "{}", "{a:1}", "{_target_:os.system}", "'\x1b[2J'"),
    *("${seed}", "${nothing}", "${oc.env:NOT_THERE}", "???", "'a=b'", "a:b", "#", "gcn", "x" * 300, "1,2", "range(3)"),
)
SHAPES = ("{key}={value}", "+{key}={value}", "++{key}={value}", "~{key}", "{key}", "={value}", "{key}.x={value}")


@cache
def keys(choice: str) -> tuple[str, ...]:
    """Return every key of the group that a choice such as model=gat is of; every key for no choice."""
    group = choice.partition("=")[0]
    found = paths(compose([choice] if choice else []).resolved, "")
    return tuple(path for path in found if path.startswith(f"{group}." if group else ""))


def paths(tree: Mapping[str, Any], prefix: str) -> Iterator[str]:
    for key, value in tree.items():
        yield f"{prefix}{key}"
        if isinstance(value, Mapping):
            yield from paths(value, f"{prefix}{key}.")


def overrides(number: int) -> list[str]:
    """Return the overrides of case `number`."""
    rng = random.Random(f"override/{number}")
    group = rng.choice(("strategy", "model", "optim", "partition", "codec", "comm", ""))
    choice = group and f"{group}={rng.choice(names(group))}"
    found = [choice] if choice else []
    for _ in range(rng.choice((1, 1, 2, 3))):
        if rng.random() < 0.1:
            other = rng.choice([*iter_groups()])
            found.append(f"{other}={rng.choice([*names(other), 'x', 'null', '../x', '[]'])}")
        else:
            shape = SHAPES[0] if rng.random() < 0.6 else rng.choice(SHAPES)
            found.append(shape.format(key=rng.choice(keys(choice) or keys("")), value=rng.choice(VALUES)))
    return found


def is_accepted(given: list[str], place: Path) -> bool:
    try:
        settings = compose([*TINY, f"data_dir={place}", f"cache_dir={place}", *given])
        check(settings, world_of(settings))
    except Exception as error:
        if not isinstance(error, ValueError) or not re.fullmatch(".{1,999}", str(error)):
            raise AssertionError(given) from error
        return False
    return True


@pytest.mark.slow
def test_many_random_overrides_are_accepted_or_refused_in_one_line(tmp_path: Path) -> None:
    accepted = [is_accepted(overrides(number), tmp_path) for number in range(1000)]
    assert any(accepted) and not all(accepted)


@pytest.mark.parametrize("given", ["codec=[null]", "optim=[1]", "shards=64"])
def test_group_or_shards_without_a_name_are_refused(given: str, tmp_path: Path) -> None:
    assert not is_accepted([given], tmp_path)


def test_write_of_an_existing_file_replaces_it(tmp_path):
    file = tmp_path / "a.txt"
    file.write_text("old")
    write_text_atomic(file, "new")
    assert file.read_text() == "new" and os.listdir(tmp_path) == ["a.txt"]


def test_error_while_writing_keeps_the_old_file(tmp_path):
    file = tmp_path / "a.txt"
    file.write_text("old")
    with pytest.raises(ZeroDivisionError), open_atomic(file) as out:
        out.write(b"half" * (1 // 0))
    assert file.read_text() == "old" and os.listdir(tmp_path) == ["a.txt"]


def test_full_disk_is_one_line_with_the_file(tmp_path):
    file = tmp_path / "a.txt"
    with pytest.raises(WriteError) as raised, open_atomic(file):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    assert str(raised.value) == f"{file} cannot be written: No space left on device"
    assert raised.value.errno == errno.ENOSPC and not os.listdir(tmp_path)


def test_missing_folder_is_one_line_with_the_file(tmp_path):
    with pytest.raises(OSError, match=r"b/a\.txt cannot be written: No such file or directory"):
        write_text_atomic(tmp_path / "b" / "a.txt", "")


def test_tilde_of_a_path_is_the_home_folder(monkeypatch):
    monkeypatch.setenv("HOME", "/home/mine")
    assert path_of("~/runs", "folder") == Path("/home/mine/runs")
    with pytest.raises(ValueError, match=r"folder=~nobodyx/runs: there is no such user; write the folder out$"):
        path_of("~nobodyx/runs", "folder")
    monkeypatch.setattr("os.path.expanduser", lambda path: path)  # a user without HOME and passwd entry
    with pytest.raises(ValueError, match="folder=~/runs: this user has no home folder; set HOME, or write the folder"):
        path_of("~/runs", "folder")


def test_relative_cache_of_the_user_is_ignored(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", ".cache")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert own_cache() == tmp_path / ".cache" / "gnnpar"
