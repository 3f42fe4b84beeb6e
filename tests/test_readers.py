"""Files that anybody may have written or cut: every reader says in one line what is wrong, or reads; nothing else."""

import json
import os
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from checkpoints import train
from gnnpar.cli.partition import run as partition
from gnnpar.codecs.adaptive.links import Profile, nominal
from gnnpar.config.jobs import Job, jobs_below, snapshot
from gnnpar.files import write_checked_json
from gnnpar.partition.manifest import Check, read_manifest
from gnnpar.partition.on_disk import open_part
from gnnpar.placement import Plan
from gnnpar.report.runs import collect
from gnnpar.settings import ConfigError
from gnnpar.track.jsonl import read_rows
from gnnpar.training.checkpoint import files as checkpoint
from gnnpar.training.result.result import read_result

NIGHTLY = os.environ.get("HYPOTHESIS_PROFILE") == "nightly"
FUZZ = settings(
    max_examples=1000 if NIGHTLY else 25,
    deadline=None,
    derandomize=not NIGHTLY,
    database=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)

LEAVES = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8)
TREES = st.recursive(LEAVES, lambda t: st.lists(t, max_size=3) | st.dictionaries(st.text(max_size=8), t, max_size=3))


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("readers") / "run"
    assert train(folder, "strategy=graph_parallel", "epochs=2").exit_code == 0
    (folder / "profile.json").write_text(json.dumps(nominal(2).as_json()))
    Job(folder.parent, "run", "k", ("seed=1",), started=1.0).save()
    argv = ["dataset.num_nodes=60", "dataset.num_features=3", "world_size=2", f"out={folder / 'shards'}"]
    assert partition(argv) == 0
    return folder


def read_shards(folder: Path, check: Check) -> None:
    manifest = read_manifest(folder)
    for part in range(min(manifest.parts, 4)):
        open_part(folder, manifest, part, check=check)


READERS: dict[str, Callable[[Path], Any]] = {
    "plan.json": lambda file: Plan.load(file),
    "result.json": lambda file: (read_result(file.parent), collect([file.parent])),
    "metrics.jsonl": lambda file: read_rows(file.parent),
    "profile.json": lambda file: Profile.read(file, 2),
    "job.json": lambda file: snapshot(jobs_below(file.parent)),
    "checkpoint/epoch-000002/manifest.json": lambda file: checkpoint.read(file.parent),
    "checkpoint/epoch-000002/rank-0.pt": lambda file: checkpoint.read(file.parent),
    "shards/manifest.json": lambda file: read_shards(file.parent, "full"),
    "shards/part-0/x.npy": lambda file: read_shards(file.parent.parent, "full"),
    "shards/part-0/inner.indptr.npy": lambda file: read_shards(file.parent.parent, "header"),
}


def reads_or_says_why(reader: Callable[[Path], Any], file: Path) -> None:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            reader(file)
    except (ValueError, ConfigError) as error:
        text = str(error)
        assert text, "an error without a word"
        assert "\n" not in text
        assert str(file) in text or str(file.parent) in text, text


@pytest.mark.quick(2)
@pytest.mark.parametrize("name", READERS)
@FUZZ
@given(data=st.data())
def test_bytes_that_are_damaged(run: Path, name: str, data: st.DataObject) -> None:
    """Cut, overwritten, replaced by anything."""
    file = run / name
    whole = file.read_bytes()
    at = data.draw(st.integers(0, len(whole)), label="at")
    junk = data.draw(st.binary(max_size=20), label="junk")
    cut = data.draw(st.sampled_from([at, len(whole)]), label="from")
    damaged = data.draw(st.sampled_from([whole[:at] + junk + whole[cut:], whole[:at] + junk, junk]))
    try:
        file.write_bytes(damaged)
        reads_or_says_why(READERS[name], file)
    finally:
        file.write_bytes(whole)


@pytest.mark.quick(1)
@pytest.mark.parametrize("name", [name for name in READERS if name.endswith(".json")])
@FUZZ
@given(data=st.data())
def test_json_that_says_something_else(run: Path, name: str, data: st.DataObject) -> None:
    """Some values replaced by any others; checksums, where there are any, made to fit."""
    file = run / name
    whole = file.read_bytes()
    tree: Any = json.loads(whole)
    tree.pop("checksum", None)
    for _ in range(data.draw(st.integers(1, 3), label="changes")):
        tree = changed(tree, data)
    try:
        if name.endswith("manifest.json") and isinstance(tree, dict):
            write_checked_json(file, tree)
        else:
            file.write_text(json.dumps(tree))
        reads_or_says_why(READERS[name], file)
    finally:
        file.write_bytes(whole)


def changed(tree: Any, data: st.DataObject) -> Any:
    """A tree with one node, somewhere, made anew or left out."""
    if isinstance(tree, (dict, list)) and tree and data.draw(st.integers(0, 4)):
        keys = sorted(tree) if isinstance(tree, dict) else range(len(tree))
        key = data.draw(st.sampled_from(list(keys)))
        copy = dict(tree) if isinstance(tree, dict) else list(tree)
        if not data.draw(st.integers(0, 4)):
            del copy[key]
        else:
            copy[key] = changed(tree[key], data)
        return copy
    return data.draw(TREES)


def test_json_nested_without_end(run: Path) -> None:
    for name, reader in READERS.items():
        if name.endswith(".json"):
            file = run / name
            whole = file.read_bytes()
            try:
                file.write_text("[" * 100_000 + "]" * 100_000)
                reads_or_says_why(reader, file)
            finally:
                file.write_bytes(whole)
