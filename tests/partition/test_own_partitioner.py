"""Cached parts and chunks of the user's own partitioners."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from gnnpar.data.dataset import Dataset
from gnnpar.data.stored import Stored
from gnnpar.partition.chunking import chunk
from gnnpar.partition.partition import partition
from gnnpar.verify.conformance import small_graph


@dataclass(frozen=True)
class Shares:
    """Gives as many nodes to part 0 as `of` says: a number, an object, the numbers in a file or in those of a folder.

    Without it the nodes that train.
    """

    of: Any = None

    def part_of(self, dataset: Dataset | Stored, parts: int) -> Tensor:
        assert isinstance(dataset, Dataset)
        if self.of is None:
            return (~dataset.train_mask).long()
        if isinstance(self.of, str | Path):
            place = Path(self.of)
            count = sum(int(file.read_text()) for file in (place.iterdir() if place.is_dir() else [place]))
        else:
            count = self.of if isinstance(self.of, int) else self.of.nodes()
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


def shares(by: Shares | Plain, cache: Path, dataset: Dataset | None = None) -> int:
    """Nodes of part 0, and of chunk 0, of two each."""
    dataset = dataset or small_graph(seed=0)
    part_of = partition(dataset, 2, by=by, cache=cache)
    chunk_of = chunk(dataset, torch.zeros(dataset.num_nodes, dtype=torch.int64), 2, by=by, cache=cache)
    assert torch.equal(part_of, chunk_of)
    return int((part_of == 0).sum())


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


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ([Plain(5), Plain(9)], [5, 9]),
        ([Shares(5), Shares(9), Shares(5)], [5, 9, 5]),
        ([Shares(Some(4)), Shares(Double(4)), Shares(Unnamed(5)), Shares(Unnamed(7))], [4, 8, 5, 7]),
    ],
    ids=["no dataclass", "arguments", "nested objects"],
)
def test_cached_parts_depend_on_what_is_given(given: list[Any], expected: list[int], tmp_path: Path) -> None:
    assert [shares(by, tmp_path) for by in given] == expected


@pytest.mark.parametrize("kind", [str, Path])
@pytest.mark.parametrize("replaced", [False, True])
def test_cached_parts_depend_on_the_files_read(tmp_path: Path, kind: type[str | Path], replaced: bool) -> None:
    """In a file or in its folder; written again, or replaced by one of the same times."""
    (tmp_path / "numbers").mkdir()
    (file := tmp_path / "numbers" / "count").write_text("5")
    places = [Shares(kind(of)) for of in (file, file.parent)]
    assert [shares(by, tmp_path / "cache") for by in places] == [5, 5]
    (tmp_path / "new").write_text("9")
    if replaced:
        os.utime(tmp_path / "new", ns=(file.stat().st_atime_ns, file.stat().st_mtime_ns))
        os.replace(tmp_path / "new", file)
    else:
        file.write_text("11")
    assert [shares(by, tmp_path / "cache") for by in places] == ([9, 9] if replaced else [11, 11])


def test_cached_parts_depend_on_the_split(tmp_path: Path) -> None:
    dataset = small_graph(seed=0)
    for count in (5, 9):
        split = replace(dataset, train_mask=torch.arange(dataset.num_nodes) < count, split_hash=f"{count}")
        assert shares(Shares(), tmp_path / "cache", split) == count
