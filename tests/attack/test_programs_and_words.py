"""What the twenty-eighth to the thirtieth attack found: gnnpar's functions in programs, classes of the user's that
partition, what words of a file name, and what is looked for in the folder of another run."""

# attributes of torch and PyG, and JSON, have no types here
# pyright: reportArgumentType=false

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest
import torch
from scipy.sparse import coo_array
from torch import Tensor
from torch_geometric.data import Data

import gnnpar
from conftest import environment
from gnnpar.cli.main import run
from gnnpar.config.compose import compose, with_references
from gnnpar.data.dataset import Dataset
from gnnpar.data.files import find_folder
from gnnpar.data.given import as_data
from gnnpar.data.saved import raw_graph
from gnnpar.data.stored import Stored
from gnnpar.partition.chunking import chunk
from gnnpar.partition.partition import partition
from gnnpar.paths import path_of
from gnnpar.settings import ConfigError
from gnnpar.training.result.record import agreed_on
from gnnpar.verify.conformance import small_graph

QUICK = {"dataset.num_nodes": 60, "epochs": 1, "threads_per_rank": 1, "comm": "threads"}
"""The number of another user."""


# --- programs


def test_a_sweep_of_a_program_has_a_folder_without_runs(tmp_path: Path) -> None:
    """Some runs of an earlier one were replaced, and the others were compared with those of the second."""
    gnnpar.sweep("gcn", "sbm", strategy=["single"], seed=[0, 1], folder=tmp_path, **QUICK)
    before = (tmp_path / "0" / "result.json").read_bytes()
    with pytest.raises(ConfigError, match="holds run 0 of an earlier sweep: choose another folder="):
        gnnpar.sweep("gcn", "sbm", strategy=["single"], seed=[5], folder=tmp_path, **QUICK)
    assert (tmp_path / "0" / "result.json").read_bytes() == before


@pytest.mark.parametrize("call", [gnnpar.train, gnnpar.sweep, gnnpar.plan, gnnpar.distribute])
def test_a_graph_that_is_none_is_not_the_default_one(call: Callable[..., object]) -> None:
    """A function that forgot its `return` had a model trained on a block model of gnnpar's."""
    with pytest.raises(ConfigError, match=r"data is None: give a graph, or the name of a dataset|none of the 1 runs"):
        call("gcn", None, comm="threads", epochs=1)


@pytest.mark.parametrize("key", ["hydra.run.dir", "hydra/launcher", "+hydra.job.name"])
def test_functions_refuse_keys_that_commands_read(key: str) -> None:
    with pytest.raises(ConfigError, match="is read by the commands alone: leave it out, and give folder="):
        gnnpar.train("gcn", "sbm", **{key: "x"})


def test_a_tilde_is_the_home_of_the_user(monkeypatch: pytest.MonkeyPatch) -> None:
    """`folder="~/runs"` made a folder called ~."""
    monkeypatch.setenv("HOME", "/home/mine")
    assert path_of("~/runs", "folder") == Path("/home/mine/runs")
    with pytest.raises(ValueError, match=r"folder=~nobodyx/runs: .*home directory\. Give it in full\.$"):
        path_of("~nobodyx/runs", "folder")


# --- classes of the user's that cut a graph


@dataclass(frozen=True)
class Shares:
    """Gives the first nodes, or as many as there are numbers in a file, to part 0; or those that train."""

    count: int = 10
    file: Path | str | None = None
    by_split: bool = False

    def part_of(self, dataset: Dataset | Stored, parts: int) -> Tensor:
        assert isinstance(dataset, Dataset)
        if self.by_split:
            return (~dataset.train_mask).long()
        count = self.count if self.file is None else int(Path(self.file).read_text())
        return (torch.arange(dataset.num_nodes) >= count).long()

    def assign(self, graph: object, part_of: Tensor, chunks_per_part: int, seed: int) -> Tensor:
        assert isinstance(graph, Dataset)
        return self.part_of(graph, chunks_per_part)


class Plain:
    """No dataclass."""

    def __init__(self, count: int) -> None:
        self.count = count

    def part_of(self, dataset: Dataset | Stored, parts: int) -> Tensor:
        return Shares(self.count).part_of(dataset, parts)

    def assign(self, graph: object, part_of: Tensor, chunks_per_part: int, seed: int) -> Tensor:
        return Shares(self.count).assign(graph, part_of, chunks_per_part, seed)


def sizes(dataset: Dataset, by: Shares | Plain | Nested, cache: Path) -> tuple[int, int]:
    """Nodes of part 0, and of chunk 0, of two each."""
    part_of = partition(dataset, 2, by=by, cache=cache)
    chunk_of = chunk(dataset, torch.zeros(dataset.num_nodes, dtype=torch.int64), 2, by=by, cache=cache)
    return int((part_of == 0).sum()), int((chunk_of == 0).sum())


def test_what_is_cached_of_a_class_of_the_users_is_of_its_arguments(tmp_path: Path) -> None:
    """A class that is no dataclass got the parts of its first arguments for all others."""
    dataset = small_graph(seed=0)
    assert [sizes(dataset, Plain(count), tmp_path / "cache") for count in (5, 9)] == [(5, 5), (9, 9)]
    assert [sizes(dataset, Shares(count), tmp_path / "cache") for count in (5, 9, 5)] == [(5, 5), (9, 9), (5, 5)]


@pytest.mark.parametrize("kind", [str, Path])
def test_it_is_of_the_file_that_it_reads(tmp_path: Path, kind: type[str | Path]) -> None:
    """And a path among its arguments was a traceback."""
    dataset, found = small_graph(seed=0), list[tuple[int, int]]()
    for count in (5, 11):
        (tmp_path / "count").write_text(f"{count}")
        found.append(sizes(dataset, Shares(file=kind(tmp_path / "count")), tmp_path / "cache"))
    assert found == [(5, 5), (11, 11)]


def test_it_is_of_the_split_that_it_reads(tmp_path: Path) -> None:
    dataset = small_graph(seed=0)
    for count in (5, 9):
        split = replace(dataset, train_mask=torch.arange(dataset.num_nodes) < count, split_hash=f"{count}")
        assert sizes(split, Shares(by_split=True), tmp_path / "cache") == (count, count)


@dataclass(frozen=True)
class Some:
    count: int

    def nodes(self) -> int:
        return self.count


@dataclass(frozen=True)
class Double:
    count: int

    def nodes(self) -> int:
        return 2 * self.count


class Unnamed:
    """Of no dataclass, and each is called as the others."""

    def __init__(self, count: int) -> None:
        self.nodes = lambda: count

    def __repr__(self) -> str:
        return "Unnamed()"


@dataclass(frozen=True)
class Nested:
    """Gives as many nodes to part 0 as an object says, or as there are numbers in the files of a folder."""

    of: Some | Double | Unnamed | str

    def part_of(self, dataset: Dataset | Stored, parts: int) -> Tensor:
        if isinstance(self.of, str):
            place = Path(self.of)
            numbers = [int(file.read_text()) for file in (place.iterdir() if place.is_dir() else [place])]
            return Shares(sum(numbers)).part_of(dataset, parts)
        return Shares(self.of.nodes()).part_of(dataset, parts)

    def assign(self, graph: object, part_of: Tensor, chunks_per_part: int, seed: int) -> Tensor:
        assert isinstance(graph, Dataset)
        return self.part_of(graph, chunks_per_part)


def test_it_is_of_the_objects_that_it_is_made_with(tmp_path: Path) -> None:
    """Another class with the same fields, or an object that is called as another, got the parts of the first."""
    dataset = small_graph(seed=0)
    found = [sizes(dataset, Nested(of), tmp_path) for of in (Some(4), Double(4), Unnamed(5), Unnamed(7))]
    assert found == [(4, 4), (8, 8), (5, 5), (7, 7)]


def test_it_is_of_a_file_that_was_put_in_the_place_of_another(tmp_path: Path) -> None:
    """With its time kept (cp -p, rsync -t, tar), and of a folder's files."""
    dataset, found = small_graph(seed=0), list[tuple[int, int]]()
    (tmp_path / "numbers").mkdir()
    (file := tmp_path / "numbers" / "count").write_text("5")
    for _ in range(2):
        found += [sizes(dataset, Nested(f"{of}"), tmp_path / "cache") for of in (file, file.parent)]
        (tmp_path / "new").write_text("9")
        os.utime(tmp_path / "new", ns=(file.stat().st_atime_ns, file.stat().st_mtime_ns))
        os.replace(tmp_path / "new", file)
    assert found == [(5, 5), (5, 5), (9, 9), (9, 9)]


# --- what a file brings, and what the user's YAML takes from it


def test_settings_that_refer_to_a_dataset_are_of_the_one_that_a_file_brings() -> None:
    """Arguments of a PyG model, which lie below `kwargs`, and parts of a text kept the default dataset's."""
    model = {"_target_": "gnnpar.models.pyg.model.PyG", "kwargs": {"of": "${dataset.classes}", "all": ["a ${seed}"]}}
    written = {
        "seed": 0,
        "model": model,
        "optim": {"note": "on ${dataset.name}"},
        "dataset": {"name": "a", "classes": 8},
    }
    kwargs = {"of": 8, "all": ["a 0"]}
    before = {**written, "model": {**model, "kwargs": kwargs}, "optim": {"note": "on a"}}
    assert with_references(before, written, before) == before
    brought = {**before, "dataset": {"name": "b", "classes": 4}}
    made = with_references(brought, written, before)
    assert made == {**brought, "model": {**model, "kwargs": {**kwargs, "of": 4}}, "optim": {"note": "on b"}}
    assert with_references({**before, "seed": 3}, written, before)["model"]["kwargs"]["all"] == ["a 3"]


@pytest.mark.parametrize(
    ("dataset", "line"),
    [
        ({"name": "${oc.env:HOME}"}, r"dataset of a file may hold no \$\{"),
        ({}, "dataset of a file: .*name.* not found"),
    ],
)
def test_what_a_file_brings_holds_no_references(dataset: dict[str, str], line: str) -> None:
    written = {"model": {"text": "${dataset.name}"}, "dataset": {"name": "a"}}
    before = {**written, "model": {"text": "a"}}
    with pytest.raises(ConfigError, match=line):
        with_references({**before, "dataset": dataset}, written, before)


def test_an_experiment_is_not_replaced_by_what_a_file_brings(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """What is typed beside plan= or shards= is refused; one that a file chose was dropped silently."""
    monkeypatch.chdir(tmp_path)
    rmat = ["dataset=rmat", "dataset.scale=6"]
    assert run("train", [*rmat, "strategy=single", "epochs=1", "threads_per_rank=1", "hydra.run.dir=run"]) == 0
    setup = {"names": {"dataset": "rmat"}, "dataset": compose(rmat).resolved["dataset"]}
    plan = json.loads(Path("run", "plan.json").read_text())
    Path("run", "plan.json").write_text(json.dumps(plan | {"setup": setup}))
    Path("experiment").mkdir()
    begins = "# @package _global_\n"
    Path("experiment", "other.yaml").write_text(f"{begins}defaults:\n  - override /dataset: sbm_typed\n")
    Path("experiment", "longer.yaml").write_text(f"{begins}epochs: 2\n")
    for several in ("+experiment=other", "debug=tiny"):
        assert run("predict", ["run", several, "--out", "logits.npy"]) == 2
        assert f"{several} sets what a prediction takes from run/checkpoint" in capsys.readouterr().err
        assert run("check", ["strategy=single", several, "--worlds", "1"]) == 2
        assert f"{several} sets what gnnpar check does not read, too" in capsys.readouterr().err
    common = ["plan=run/plan.json", "threads_per_rank=1"]
    assert run("train", [*common, "+experiment=longer", "hydra.run.dir=a"]) == 0
    assert json.loads(Path("a", "result.json").read_text())["epochs_done"] == 2
    capsys.readouterr()
    assert run("train", [*common, "+experiment=other", "hydra.run.dir=b"]) == 2
    said = "experiment=other sets the dataset, and so does the file of plan= or shards=: leave one of them out"
    assert said in capsys.readouterr().err
    assert run("train", [*common, "debug=overfit", "hydra.run.dir=b"]) == 2
    assert "debug=overfit sets the" in capsys.readouterr().err


# --- the working directory


# --- graphs


def test_weights_that_are_there_twice_are_to_be_added() -> None:
    """In CSR the same matrix was another graph: the second weight was dropped where it was equal to the first."""
    row, col, weight = [0, 0, 1, 2], [1, 1, 2, 0], np.array([0.5, 0.5, 2.0, 1.0])
    data = {"x": np.ones((3, 1)), "y": np.array([0, 1, 0])}
    matrix = coo_array((weight, (row, col)), shape=(3, 3))
    with pytest.raises(ValueError, match=r"adjacency has 1 repeated weight, .*: call its sum_duplicates\(\)"):
        as_data({**data, "adjacency": matrix})
    matrix.sum_duplicates()
    found = raw_graph("given", as_data({**data, "adjacency": matrix}))
    assert found.edges.weight is not None and sorted(found.edges.weight.tolist()) == [1.0, 1.0, 2.0]


def test_masks_without_the_one_that_trains_are_refused() -> None:
    """`dataset.split=random` trained on nodes that the caller had kept for the test."""
    data = Data(x=torch.ones(3, 1), y=torch.tensor([0, 1, 0]), edge_index=torch.tensor([[0], [1]]))
    data.test_mask = torch.tensor([True, False, False])
    with pytest.raises(ValueError, match="there is a test_mask, and no train_mask; give it, too"):
        raw_graph("given", data)


def test_one_of_two_folders_is_not_taken_for_the_dataset(tmp_path: Path) -> None:
    """The first in the order of their names was read; somebody's archive had brought it."""
    (tmp_path / "Tolokers").mkdir()
    assert find_folder(tmp_path, "tolokers") == tmp_path / "Tolokers"
    (tmp_path / "TOLOKERS").mkdir()
    with pytest.raises(ValueError, match="has TOLOKERS and Tolokers; rename the one that is to be read to tolokers"):
        find_folder(tmp_path, "tolokers")
    (tmp_path / "tolokers").mkdir()
    assert find_folder(tmp_path, "tolokers") == tmp_path / "tolokers"


@pytest.mark.parametrize("name", ["valid_mask", "validation_mask", "dev_mask"])
def test_a_mask_of_another_name_is_refused(name: str) -> None:
    """The run had no validation, and no line said so."""
    data = Data(x=torch.ones(3, 1), y=torch.tensor([0, 1, 0]), edge_index=torch.tensor([[0], [1]]))
    data[name] = data.train_mask = torch.tensor([True, False, False])
    with pytest.raises(ValueError, match=f"{name} is not read; call it val_mask"):
        raw_graph("given", data)


# --- sweeps, ranks and logs


def test_what_was_made_of_an_earlier_run_is_not_of_this_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Predictions and a program of another model lay beside the result of the second run, and `gnnpar dashboard` showed
    the curves of the first."""
    monkeypatch.chdir(tmp_path)
    few = ["dataset=sbm", "dataset.num_nodes=60", "epochs=1", "threads_per_rank=1", "strategy=single"]
    given = ["hydra.run.dir=run", *few]
    assert run("train", given) == 0 and run("predict", ["run"]) == 0 and run("export", ["run"]) == 0
    Path("run", "wandb.json").touch()
    capsys.readouterr()
    assert run("train", [*given, "model=sage"]) == 0
    said = capsys.readouterr().out
    for name in ("predictions.npy", "export", "wandb.json"):
        aside = Path(name).with_stem(f"{Path(name).stem}-before").name
        assert f"run/{name} is of an earlier run: moved to {aside}" in said
        assert not Path("run", name).exists() and Path("run", aside).exists()
    Path("run", "predictions.npy").touch()
    assert run("train", [*given, "model=sage", "epochs=2", "resume=auto"]) == 0
    assert Path("run", "predictions.npy").exists()


OWN_DATA = """
from dataclasses import dataclass
import numpy as np
from torch_geometric.data import Data
from gnnpar.data.given import as_data
from gnnpar.data.preprocess import Preprocess, prepare
from gnnpar.data.saved import raw_graph

@dataclass(frozen=True, kw_only=True)
class Of(Preprocess):
    name: str = "of"
    file: str = "edges.npy"
    def load(self, data_dir, seed):
        y = np.arange(60) % 3
        data = as_data({"x": np.eye(60, 8), "y": y, "edge_index": np.load(self.file)})
        return prepare(raw_graph("of", data), self, seed=seed)
"""


@pytest.mark.parametrize("swept", ["checkpoint.every=0,1", "trace=true,false", "tracker=jsonl,console"])
def test_jobs_that_are_the_same_are_not_swept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], swept: str
) -> None:
    """The second value was never run, and the sweep was done."""
    monkeypatch.chdir(tmp_path)
    few = ["dataset=sbm", "dataset.num_nodes=60", "epochs=1", "strategy=single", "-m"]
    assert run("train", [*few, swept, "hydra.sweep.dir=s"]) == 2
    assert "a job is the same wherever its data lies, and whatever it keeps" in capsys.readouterr().err


def test_hosts_with_and_without_shards_do_not_meet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One gathered what the other did not, until the time of the transport was over."""
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


@pytest.mark.parametrize("number", [signal.SIGHUP, signal.SIGQUIT])
def test_a_run_of_one_rank_hears_that_its_terminal_is_gone(tmp_path: Path, number: signal.Signals) -> None:
    """It died by the signal, without a result, and left its lock."""
    few = ["dataset=sbm", "dataset.num_nodes=60", "epochs=1000000", "threads_per_rank=1", "strategy=single"]
    heard = ["env", "--default-signal", sys.executable]  # also where tests run under nohup
    command = [*heard, "-m", "gnnpar", "train", *few, "hydra.run.dir=run"]
    with subprocess.Popen(command, cwd=tmp_path, env=environment(), stdout=subprocess.DEVNULL) as process:
        rows = tmp_path / "run" / "metrics.jsonl"
        for _ in range(600):
            if rows.exists() and rows.stat().st_size:
                break
            time.sleep(0.1)
        process.send_signal(number)
        assert process.wait(60) == 1
    assert json.loads((tmp_path / "run" / "result.json").read_text())["status"] == "interrupted"


def test_a_prediction_of_another_first_layer_is_not_compared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    few = ["dataset=sbm", "dataset.num_nodes=60", "epochs=1", "threads_per_rank=1"]
    assert run("train", [*few, "strategy=single", "hydra.run.dir=run"]) == 0
    plan = json.loads(Path("run", "plan.json").read_text())
    plan |= {
        "setup": {"first_layer": "cached"},
        "predicted": {"epoch_seconds": 1.0, "label": "of the plan", "peak_bytes": [1]},
    }
    Path("run", "plan.json").write_text(json.dumps(plan))
    for layer, said in (("cached", True), ("live", False)):
        assert run("train", [*few, "plan=run/plan.json", f"first_layer={layer}", f"hydra.run.dir={layer}"]) == 0
        result = json.loads(Path(layer, "result.json").read_text())
        assert (result.get("predicted") is not None) == said


def test_a_plan_wants_a_folder_before_it_is_searched_for(tmp_path: Path) -> None:
    (tmp_path / "plan.json").touch()
    with pytest.raises(ConfigError, match=r"is a file: name a folder, for plan\.json"):
        gnnpar.plan("gcn", "sbm", "pcie_server", out=tmp_path / "plan.json")
