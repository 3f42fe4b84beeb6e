"""Shards on disk are those of `cut`, bit for bit; what is missing, damaged or foreign is one line."""

from __future__ import annotations

import re
import warnings
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from checkpoints import damage
from gnnpar.data import stored
from gnnpar.data.stored import Stored
from gnnpar.files import file_hash, read_checked_json, write_checked_json
from gnnpar.folds.block import Block
from gnnpar.folds.edge_data import EdgeData
from gnnpar.partition import on_disk
from gnnpar.partition.manifest import Check, Manifest, read_manifest
from gnnpar.partition.on_disk import open_part, write_shards
from gnnpar.partition.partition import Random, partition
from gnnpar.partition.shard import Shard, cut, partition_statistics
from gnnpar.verify.conformance import small_graph
from graphs import ODD, with_edge_data, with_weights
from outcomes import refused


def differences(a: Any, b: Any, at: str) -> list[str]:
    """Where two shards differ, types and shapes included."""
    if isinstance(a, Tensor):
        return [] if a.dtype == b.dtype and a.shape == b.shape and torch.equal(a, b) else [at]
    if isinstance(a, (Block, EdgeData, Shard)):
        return [d for f in fields(a) for d in differences(getattr(a, f.name), getattr(b, f.name), f"{at}.{f.name}")]
    if isinstance(a, dict):
        if a.keys() != b.keys():
            return [at]
        return [d for key in a for d in differences(a[key], b[key], f"{at}[{key}]")]
    return [] if a == b else [at]


@pytest.fixture(autouse=True)
def small_chunks_and_no_waiting_for_the_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (stored, on_disk):
        monkeypatch.setattr(module, "CHUNK_EDGES", 37)
    monkeypatch.setattr(stored, "CHUNK_ROWS", 11)
    monkeypatch.setattr(Stored.edges, "__defaults__", (37,))
    monkeypatch.setattr("os.fsync", lambda handle: None)  # a hundred small files


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    dataset = small_graph()
    part_of = partition(dataset, 3, by=Random())
    write_shards(Stored.of(dataset), part_of, 3, tmp_path / "shards", edge_ids=False, setup={})
    return tmp_path / "shards"


@pytest.mark.quick(3)
@pytest.mark.parametrize("name", [*ODD, "small", "weighted", "carrying"])
def test_the_blocks_are_those_of_a_cut_in_memory(tmp_path: Path, name: str) -> None:
    dataset = ODD[name]() if name in ODD else small_graph()
    dataset = with_weights(dataset) if name in ("weighted", "multi_edges") else dataset
    dataset = with_edge_data(dataset) if name == "carrying" else dataset
    graph = Stored.of(dataset)
    hashed = graph.hashed()
    assert (hashed.graph_hash, hashed.split_hash) == (dataset.graph_hash, dataset.split_hash)
    for parts in range(1, min(dataset.num_nodes, 3) + 1):
        part_of, ids, out = partition(dataset, parts, by=Random(seed=1)), parts != 2, tmp_path / str(parts)
        manifest = write_shards(graph, part_of, parts, out, edge_ids=ids, setup={"names": {}})
        assert read_manifest(out) == manifest
        assert manifest.statistics == partition_statistics(dataset, part_of, parts)
        for part, want in enumerate(cut(dataset, part_of, parts, edge_ids=ids)):
            assert differences(want, open_part(out, manifest, part, edge_ids=ids), "shard") == []
    assert not list(tmp_path.glob("*.partial"))


def test_features_are_mapped_and_no_write_reaches_the_file(folder: Path) -> None:
    manifest = read_manifest(folder)
    before = (folder / "part-1/x.npy").read_bytes()
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # torch warns of memory it may not write to
        shard = open_part(folder, manifest, 1).to(torch.device("cpu"), torch.float32)
    shard.x.add_(1.0)
    assert f"{folder}/part-1/x.npy" in Path("/proc/self/maps").read_text(encoding="utf-8")
    assert f"{folder}/part-0" not in Path("/proc/self/maps").read_text(encoding="utf-8")
    assert (folder / "part-1/x.npy").read_bytes() == before


def test_damage_is_found_by_its_checksum_and_by_its_size(folder: Path) -> None:
    manifest = read_manifest(folder)
    for file in sorted((folder / "part-1").iterdir()):
        whole = file.read_bytes()
        damage(file, 0.99)
        with pytest.raises(ValueError, match=rf"^shards=.*/part-1/{file.name} is corrupt .*; partition again"):
            open_part(folder, manifest, 1)
        file.write_bytes(whole[:-1])
        with pytest.raises(ValueError, match=rf"part-1/{file.name} is {len(whole) - 1} bytes, not {len(whole)}"):
            open_part(folder, manifest, 1, check="header")
        file.unlink()
        with pytest.raises(ValueError, match=rf"part-1/{file.name} is missing"):
            open_part(folder, manifest, 1, check="header")
        file.write_bytes(whole)
    open_part(folder, manifest, 1)
    damage(folder / "part-0/x.npy", 0.99)
    open_part(folder, manifest, 1)  # another rank's files are none of its business
    open_part(folder, manifest, 0, check="header")


def test_a_file_of_another_type_is_found_without_its_checksum(folder: Path) -> None:
    manifest = read_manifest(folder)
    told = manifest.files["part-1/x.npy"]
    np.save(folder / "part-1/x.npy", np.zeros(told.shape, dtype=np.int32))
    with pytest.raises(ValueError, match=r"x is torch\.int32 .*, not torch\.float32"):
        open_part(folder, manifest, 1, check="header")


@pytest.mark.parametrize("check", ["full", "header"])
def test_indices_that_lie_outside_are_found_in_every_check(folder: Path, check: Check) -> None:
    """Kernels read where they say; forged, with a checksum that fits."""
    file = folder / "part-1/inner.indices.npy"
    indices = np.load(file)
    indices[3] = 1 << 30
    np.save(file, indices)
    told = read_checked_json(folder / "manifest.json")
    told["files"]["part-1/inner.indices.npy"]["sha256"] = file_hash(file)
    write_checked_json(folder / "manifest.json", told)
    with pytest.raises(ValueError, match=f"inner reads rows 0 to {1 << 30} of"):
        open_part(folder, read_manifest(folder), 1, check=check)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"schema": 2}, "are of schema 2, this gnnpar reads 1: partition again"),
        ({"parts": 0}, "parts: Input should be greater than or equal to 1"),
        ({"parts": 4}, "statistics are of 3 parts, there are 4"),
        ({"task": "ranking"}, "task: Input should be"),
        ({"hashes": {"graph": "", "split": ""}}, "hashes lack partition"),
        ({"files": {"../x.npy": {"shape": [1], "dtype": "<f4", "nbytes": 1, "sha256": ""}}}, "outside the folder"),
        ({"num_nodes": "60"}, "num_nodes: Input should be a valid integer"),
    ],
    ids=lambda value: "" if isinstance(value, str) else next(iter(value)),
)
def test_a_foreign_manifest_is_one_line(folder: Path, change: dict, said: str) -> None:
    file = folder / "manifest.json"
    write_checked_json(file, read_checked_json(file) | change)
    with refused(f"{re.escape(str(folder))}.*{said}"):
        read_manifest(folder)


def test_a_manifest_that_was_changed_or_is_not_there(folder: Path, tmp_path: Path) -> None:
    file = folder / "manifest.json"
    file.write_text(file.read_text().replace('"num_edges": ', '"num_edges": 1'))
    with pytest.raises(ValueError, match="its checksum is wrong"):
        read_manifest(folder)
    with pytest.raises(ValueError, match=r"holds no manifest\.json: give a folder that `gnnpar partition"):
        read_manifest(tmp_path)


def test_peers_that_contradict_each_other(folder: Path) -> None:
    manifest = read_manifest(folder)
    files = {name.replace("part-1/halo-0", "part-1/halo-7"): facts for name, facts in manifest.files.items()}
    for name in manifest.files:
        if name.startswith("part-1/halo-0"):
            (folder / name).rename(folder / name.replace("halo-0", "halo-7"))
    with pytest.raises(ValueError, match="part 1 has a halo of part 7 of 3"):
        open_part(folder, replace(manifest, files=files), 1)


def test_nothing_is_left_of_a_failure_and_nothing_is_overwritten(tmp_path: Path, folder: Path) -> None:
    dataset = small_graph()
    graph, part_of = Stored.of(dataset), partition(dataset, 2, by=Random())
    with pytest.raises(ValueError, match="is there already: remove it, or name another folder"):
        write_shards(graph, part_of, 2, folder, edge_ids=False, setup={})

    def full(stage: str, share: float) -> None:
        if stage == "checksums":
            raise OSError(28, "No space left on device")

    with pytest.raises(ValueError, match=r"out=.*new cannot be written: No space left on device"):
        write_shards(graph, part_of, 2, tmp_path / "new", edge_ids=False, setup={}, on_progress=full)
    assert [file.name for file in tmp_path.iterdir()] == ["shards"]


def test_equal_inputs_equal_files(tmp_path: Path) -> None:
    dataset = small_graph()
    graph, part_of = Stored.of(dataset), partition(dataset, 2, by=Random())
    made: list[Manifest] = [
        write_shards(graph, part_of, 2, tmp_path / name, edge_ids=True, setup={}) for name in ("a", "b")
    ]
    assert made[0].fingerprint == made[1].fingerprint
