"""What a twenty-eighth attack found: gnnpar's functions in programs, classes of the user's that partition, and what
words of a file name."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

import gnnpar
from gnnpar import scratch
from gnnpar.config.compose import of_what_is_brought
from gnnpar.data.dataset import Dataset
from gnnpar.data.stored import Stored
from gnnpar.partition.chunking import chunk
from gnnpar.partition.partition import partition
from gnnpar.paths import path_of
from gnnpar.settings import ConfigError
from gnnpar.training.result import trained
from gnnpar.verify.conformance import small_graph

QUICK = {"dataset.num_nodes": 60, "epochs": 1, "threads_per_rank": 1, "comm": "threads"}
OTHER = 4242
"""The number of another user."""


# --- programs


@pytest.mark.parametrize(("name", "call"), [("outputs", gnnpar.train), ("multirun", gnnpar.sweep)])
def test_runs_of_a_program_are_not_led_to_a_folder_of_another_user(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, call: Callable[..., object]
) -> None:
    """The commands refused such a link of a project that was unpacked."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "elsewhere").mkdir(mode=0o777)
    Path(name).symlink_to(tmp_path / "elsewhere")
    os.chown(tmp_path / "elsewhere", OTHER, OTHER)
    with pytest.raises(OSError, match=f"{name} cannot be written: it is a symbolic link .* belongs to another user"):
        call("gcn", "sbm", strategy="single", **QUICK)
    assert not list((tmp_path / "elsewhere").iterdir())


@pytest.mark.parametrize("ended_by", ["load", "model"])
def test_the_end_of_a_load_in_another_thread_moves_no_temporary_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ended_by: str
) -> None:
    """It put TMPDIR back to /tmp while a training that had begun in between went on: PyG runs what it finds there."""
    run = gnnpar.train("gcn", "sbm", strategy="single", folder=tmp_path / "run", **QUICK)
    begun, ends, places = threading.Event(), threading.Event(), list[bool]()
    opened = trained.opened

    def slowly(*given: object) -> object:
        begun.set()
        ends.wait(10)
        return opened(*given)  # type: ignore[arg-type]

    def another() -> None:
        with scratch.own_temporary_files(lasting=True):
            ends.set()
            first.join(0.5)
            places.append(scratch._is_own(scratch._asked()))

    monkeypatch.setattr(trained, "opened", slowly)
    first = threading.Thread(target=lambda: gnnpar.load(run.folder) if ended_by == "load" else run.model)
    second = threading.Thread(target=another)
    first.start()
    assert begun.wait(10)
    second.start()
    second.join(0.5)
    assert second.is_alive(), "it waits"
    ends.set()
    second.join(20)
    first.join(20)
    assert places == [True]


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
        gnnpar.train("gcn", "sbm", **{key: "x"})  # type: ignore[arg-type]


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


def sizes(dataset: Dataset, by: Shares | Plain, cache: Path) -> tuple[int, int]:
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
    masks = torch.arange(dataset.num_nodes) % 3
    for part, count in enumerate(torch.bincount(masks).tolist()):
        split = replace(dataset, train_mask=masks == part, split_hash=f"{part}")
        assert sizes(split, Shares(by_split=True), tmp_path / "cache") == (count, count)


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
    assert of_what_is_brought(before, written, before) == before
    brought = {**before, "dataset": {"name": "b", "classes": 4}}
    made = of_what_is_brought(brought, written, before)
    assert made == {**brought, "model": {**model, "kwargs": {**kwargs, "of": 4}}, "optim": {"note": "on b"}}
    assert of_what_is_brought({**before, "seed": 3}, written, before)["model"]["kwargs"]["all"] == ["a 3"]


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
        of_what_is_brought({**before, "dataset": dataset}, written, before)
