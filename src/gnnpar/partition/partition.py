"""Partitioners: assign nodes to parts. Results are cached on disk by content hash."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, is_dataclass
from pathlib import Path
from typing import Annotated, Literal, Protocol, runtime_checkable

import numpy as np
import torch
from annotated_types import Ge
from torch import Tensor

from gnnpar.data.dataset import Dataset
from gnnpar.data.stored import Stored
from gnnpar.files import open_atomic
from gnnpar.partition.vertex_cut import following
from gnnpar.track.text import counted


class Partitioner(Protocol):
    """A partitioner of nodes. A frozen dataclass; fields are YAML keys. Results of gnnpar's own classes are cached by
    their fields. Results of other classes are not, since their code may change or read files."""

    def part_of(self, dataset: Dataset | Stored, parts: int) -> Tensor:
        """Return the part of every node, int64 [N]; every part has at least one node."""
        ...


@runtime_checkable
class EdgePartitioner(Partitioner, Protocol):
    """A vertex cut: a partitioner that cuts nodes and assigns edges."""

    def edge_part_of(self, dataset: Dataset | Stored, parts: int) -> Tensor:
        """Return the part of every edge, int64 [E]."""
        ...


_OBJECTIVES = {"cut": 0, "volume": 1}  # METIS_OBJTYPE_CUT, METIS_OBJTYPE_VOL


_LARGEST_SUM = 2**31 - 1  # limit of the weights of all nodes: METIS adds them in 32 bits


@dataclass(frozen=True, kw_only=True)
class Metis:
    """METIS through pymetis. objective: cut edges or communication volume. balance: quantity to balance. METIS gets the
    graph symmetrised and without self loops."""

    objective: Literal["cut", "volume"] = "cut"
    balance: Literal["nodes", "edges", "train"] = "nodes"
    seed: Annotated[int, Ge(0)] = 0

    def part_of(self, dataset: Dataset | Stored, parts: int, *, shares: tuple[float, ...] | None = None) -> Tensor:
        """Return the part of every node. shares: of the balanced quantity by part, with sum 1; None: equal shares."""
        if parts == 1:
            return torch.zeros(dataset.num_nodes, dtype=torch.int64)
        import pymetis

        offsets, neighbours = symmetric_csr(dataset.edge_index, dataset.num_nodes)
        options = pymetis.Options(seed=self.seed, objtype=_OBJECTIVES[self.objective])
        _, membership = pymetis.part_graph(
            parts,
            pymetis.CSRAdjacency(offsets, neighbours),
            vweights=self._weights(dataset),
            tpwgts=shares,
            recursive=False,
            options=options,
        )
        return torch.tensor(np.asarray(membership), dtype=torch.int64)

    def _weights(self, dataset: Dataset | Stored) -> np.ndarray | None:
        if self.balance == "edges":
            return (dataset.in_degree + 1).numpy().astype(np.int64)
        if self.balance == "train":
            return train_weights(dataset.train_mask)
        return None


def train_weights(train_mask: Tensor) -> np.ndarray:
    """Return weights of nodes that balance training nodes. Shapes: [N] bool -> [N] int64."""
    train, nodes = train_mask.numpy().astype(np.int64), max(1, len(train_mask))
    return train * min(nodes, (_LARGEST_SUM - nodes) // max(1, int(train.sum()))) + 1


@dataclass(frozen=True, kw_only=True)
class Random:
    """Random nodes in equal parts, with the worst cut."""

    seed: Annotated[int, Ge(0)] = 0

    def part_of(self, dataset: Dataset | Stored, parts: int) -> Tensor:
        shuffled = torch.randperm(dataset.num_nodes, generator=torch.Generator().manual_seed(self.seed))
        return Range().part_of(dataset, parts)[shuffled]


@dataclass(frozen=True, kw_only=True)
class Range:
    """Consecutive node ids in equal parts."""

    def part_of(self, dataset: Dataset | Stored, parts: int) -> Tensor:
        return torch.arange(dataset.num_nodes) * parts // max(1, dataset.num_nodes)


def symmetric_csr(edge_index: Tensor, num_nodes: int) -> tuple[np.ndarray, np.ndarray]:
    """Return (offsets [N + 1], neighbours) of the undirected graph without self loops and repeated edges."""
    from scipy.sparse import csr_matrix

    src, dst = (row.numpy() for row in edge_index)
    keep = src != dst
    ones = np.ones(2 * int(keep.sum()), dtype=np.int8)
    ends = np.concatenate([src[keep], dst[keep]]), np.concatenate([dst[keep], src[keep]])
    adjacency = csr_matrix((ones, ends), shape=(num_nodes, num_nodes))
    adjacency.sum_duplicates()
    return adjacency.indptr.astype(np.int64), adjacency.indices.astype(np.int64)


def partition(
    dataset: Dataset | Stored,
    parts: int,
    *,
    by: Partitioner,
    cache: Path | None = None,
    say: Callable[[str], None] = lambda _: None,
) -> Tensor:
    """Return a partition, from the cache if possible, int64 [N]. Raises ValueError for parts without nodes."""
    if parts > dataset.num_nodes:
        raise ValueError(
            f"{dataset.num_nodes} nodes cannot fill {parts} parts: launch at most {counted(dataset.num_nodes, 'rank')}."
        )

    def make() -> Tensor:
        began = time.perf_counter()
        part_of = by.part_of(dataset, parts)
        sizes = torch.bincount(part_of, minlength=parts)
        if empty := (sizes == 0).nonzero().flatten().tolist():
            raise ValueError(
                f"{type(by).__name__} left {len(empty)} of {parts} parts without nodes (parts {empty[:8]}) of a graph "
                f"with {dataset.num_nodes} nodes: use fewer ranks, or partition=range."
            )
        say(f"partitioned {dataset.num_nodes} nodes into {parts} parts in {time.perf_counter() - began:.1f} s")
        return part_of

    cache = cache_of(by, cache)
    file = cache and cache / f"{_key(dataset, parts, by)}.part"
    return cached(file, dataset.num_nodes, parts, "partition", say, make)


def partition_edges(
    dataset: Dataset | Stored,
    parts: int,
    part_of: Tensor,
    *,
    by: Partitioner,
    cache: Path | None = None,
    say: Callable[[str], None] = lambda _: None,
) -> Tensor:
    """Return a vertex cut, from the cache if possible. For a partitioner of nodes, derive it from its parts
    (`following`). Shapes: part_of [N] of `partition` -> int64 [E]."""
    if not isinstance(by, EdgePartitioner):
        return following(part_of, dataset.edge_index)
    cache = cache_of(by, cache) if dataset.num_edges else None
    file = cache and cache / f"{_key(dataset, parts, by)}.edges"
    return cached(file, dataset.num_edges, parts, "vertex cut", say, lambda: by.edge_part_of(dataset, parts))


def cache_of(by: object, cache: Path | None) -> Path | None:
    """Return `cache` for gnnpar's own partitioners and chunkers; None for others, since their code may change."""
    return cache if type(by).__module__.partition(".")[0] == "gnnpar" else None


def cached(
    file: Path | None, num_rows: int, count: int, what: str, say: Callable[[str], None], make: Callable[[], Tensor]
) -> Tensor:
    """Return numbers in [0, count) from a cache file, or make and write them. int64 [num_rows]."""
    if file is not None and (kept := read_cached(file, num_rows, count, what, say)) is not None:
        return kept
    made = make()
    if file is not None:
        write_cached(file, made, what, say)
    return made


def write_cached(file: Path, number_of: Tensor, what: str, say: Callable[[str], None]) -> None:
    """Write sha256 and int32 [n]; say a line if the cache cannot be written."""
    payload = number_of.to(torch.int32).numpy().tobytes()
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        with open_atomic(file) as out:  # two runs may partition at once
            out.write(hashlib.sha256(payload).digest() + payload)
    except OSError as error:
        say(f"{what} not cached: {error.strerror} ({file})")


def read_cached(file: Path, num_rows: int, count: int, what: str, say: Callable[[str], None]) -> Tensor | None:
    """Return int64 [num_rows] in [0, count) as `write_cached` wrote it, or None; say a line if it is damaged."""
    try:
        size = file.stat().st_size
        data = file.read_bytes() if size == 32 + 4 * num_rows else b""
    except FileNotFoundError:
        return None
    except OSError as error:
        say(f"the cached {what} {file} cannot be read ({error.strerror}): making it again")
        return None
    digest, payload = data[:32], data[32:]
    if payload and hashlib.sha256(payload).digest() == digest:
        number_of = torch.from_numpy(np.frombuffer(payload, dtype=np.int32).astype(np.int64))
        within = int(number_of.min()) >= 0 and int(number_of.max()) < count
        if within and (what != "partition" or len(number_of.unique()) == count):  # every part has nodes
            return number_of
    say(f"the cached {what} {file} is corrupt: making it again")
    return None


def _key(dataset: Dataset | Stored, parts: int, by: Partitioner) -> str:
    given = fields_of(by)
    train = dataset.split_hash if given.get("balance") == "train" else ""
    return hashed([dataset.graph_hash, train, parts, type(by).__qualname__, given])


def fields_of(by: object) -> dict[str, object]:
    """Return the fields of a partitioner or a chunker; none unless it is a dataclass."""
    return asdict(by) if is_dataclass(by) and not isinstance(by, type) else {}


def hashed(named: Sequence[object]) -> str:
    """Return the name of a cached file."""
    return hashlib.sha256(json.dumps(named, sort_keys=True, default=str).encode()).hexdigest()
