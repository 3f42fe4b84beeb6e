"""Cached parts and chunks of the user's own partitioners."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from pathlib import Path

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


def test_cached_parts_depend_on_arguments(tmp_path: Path) -> None:
    dataset = small_graph(seed=0)
    assert [sizes(dataset, Plain(count), tmp_path / "cache") for count in (5, 9)] == [(5, 5), (9, 9)]
    assert [sizes(dataset, Shares(count), tmp_path / "cache") for count in (5, 9, 5)] == [(5, 5), (9, 9), (5, 5)]


@pytest.mark.parametrize("kind", [str, Path])
def test_cached_parts_depend_on_the_file_read(tmp_path: Path, kind: type[str | Path]) -> None:
    dataset, found = small_graph(seed=0), list[tuple[int, int]]()
    for count in (5, 11):
        (tmp_path / "count").write_text(f"{count}")
        found.append(sizes(dataset, Shares(file=kind(tmp_path / "count")), tmp_path / "cache"))
    assert found == [(5, 5), (11, 11)]


def test_cached_parts_depend_on_the_split(tmp_path: Path) -> None:
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


def test_cached_parts_depend_on_nested_objects(tmp_path: Path) -> None:
    dataset = small_graph(seed=0)
    found = [sizes(dataset, Nested(of), tmp_path) for of in (Some(4), Double(4), Unnamed(5), Unnamed(7))]
    assert found == [(4, 4), (8, 8), (5, 5), (7, 7)]


def test_cached_parts_of_a_replaced_file_are_made_again(tmp_path: Path) -> None:
    dataset, found = small_graph(seed=0), list[tuple[int, int]]()
    (tmp_path / "numbers").mkdir()
    (file := tmp_path / "numbers" / "count").write_text("5")
    for _ in range(2):
        found += [sizes(dataset, Nested(f"{of}"), tmp_path / "cache") for of in (file, file.parent)]
        (tmp_path / "new").write_text("9")
        os.utime(tmp_path / "new", ns=(file.stat().st_atime_ns, file.stat().st_mtime_ns))
        os.replace(tmp_path / "new", file)
    assert found == [(5, 5), (5, 5), (9, 9), (9, 9)]
