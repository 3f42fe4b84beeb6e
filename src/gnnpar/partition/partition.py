"""Partitioners: assign nodes to parts. Results are cached on disk by content hash."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, is_dataclass
from functools import partial
from itertools import accumulate
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
        weight = None if parts == 1 else self._weights(dataset)
        objective = _OBJECTIVES[self.objective]
        edges, num_nodes = dataset.edge_index, dataset.num_nodes
        return metis(edges, num_nodes, parts, seed=self.seed, weight=weight, shares=shares, objective=objective)

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


@dataclass(frozen=True, kw_only=True)
class Shares:
    """Parts of unequal size, for devices of unequal speed: a partitioner with `shares` of the nodes, by part. kind,
    balance: part of the cache key."""

    by: Partitioner
    shares: tuple[float, ...]
    kind: str
    balance: str

    @staticmethod
    def wrap(by: Partitioner, shares: tuple[float, ...]) -> Shares:
        total = sum(shares)
        if not shares or min(shares) <= 0:
            raise ValueError(f"shares={shares} must all be above 0: a part without nodes cannot be a rank's")
        normal = tuple(s / total for s in shares)
        balance = by.balance if isinstance(by, Metis) else "nodes"
        return Shares(by=by, shares=normal, kind=type(by).__qualname__, balance=balance)

    @staticmethod
    def supported(by: Partitioner) -> bool:
        return isinstance(by, Metis | Random | Range)

    def part_of(self, dataset: Dataset, parts: int) -> Tensor:
        if parts != len(self.shares):
            raise ValueError(f"{len(self.shares)} shares make no {parts} parts: give one a part")
        if isinstance(self.by, Metis):
            return self.by.part_of(dataset, parts, shares=self.shares)
        count = dataset.num_nodes
        ends = torch.tensor([round(s * count) for s in accumulate(self.shares)][:-1])
        in_order = torch.bucketize(torch.arange(count), ends, right=True)
        if isinstance(self.by, Random):
            return in_order[torch.randperm(count, generator=torch.Generator().manual_seed(self.by.seed))]
        if isinstance(self.by, Range):
            return in_order
        raise ValueError(f"{self.kind} makes equal parts only: use partition=metis, random or range")


def metis(
    edge_index: Tensor,
    num_nodes: int,
    parts: int,
    *,
    seed: int,
    weight: np.ndarray | None = None,
    shares: tuple[float, ...] | None = None,
    objective: int = _OBJECTIVES["cut"],
) -> Tensor:
    """Return a METIS k-way partition, int64 [N]; a part may be empty in a small graph. weight: int64 [N]."""
    if parts == 1:
        return torch.zeros(num_nodes, dtype=torch.int64)
    import pymetis

    _, membership = pymetis.part_graph(
        parts,
        pymetis.CSRAdjacency(*symmetric_csr(edge_index, num_nodes)),
        vweights=weight,
        tpwgts=shares,
        recursive=False,
        options=pymetis.Options(seed=seed, objtype=objective),
    )
    return torch.tensor(np.asarray(membership), dtype=torch.int64)


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
        part_of = by.part_of(dataset, parts)
        if empty := (torch.bincount(part_of, minlength=parts) == 0).nonzero().flatten().tolist():
            raise ValueError(
                f"{type(by).__name__} left {len(empty)} of {parts} parts without nodes (parts {empty[:8]}) of a graph "
                f"with {dataset.num_nodes} nodes: use fewer ranks, or partition=range."
            )
        return part_of

    done = f"partitioned {dataset.num_nodes} nodes into {parts} parts in"
    return cached(cache, by, lambda: _key(dataset, parts, by), dataset.num_nodes, parts, "partition", say, make, done)


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
    if not dataset.num_edges:
        return by.edge_part_of(dataset, parts)
    make = partial(by.edge_part_of, dataset, parts)
    return cached(cache, by, lambda: _key(dataset, parts, by), dataset.num_edges, parts, "vertex cut", say, make)


def _key(dataset: Dataset | Stored, parts: int, by: Partitioner) -> list[object]:
    train = dataset.split_hash if vars(by).get("balance") == "train" else ""
    return [dataset.graph_hash, train, parts, type(by).__qualname__, fields_of(by)]


def fields_of(by: object) -> dict[str, object]:
    """Return the fields of a partitioner or a chunker that is a dataclass."""
    assert is_dataclass(by)
    assert not isinstance(by, type)
    return asdict(by)


def cached(
    cache: Path | None,
    by: object,
    key: Callable[[], list[object]],
    num_rows: int,
    count: int,
    title: str,
    say: Callable[[str], None],
    make: Callable[[], Tensor],
    done: str = "",
) -> Tensor:
    """Return int64 [num_rows] in [0, count) from the file of `key` in the cache, or make and write it: sha256 and int32
    [num_rows]. Results of classes outside gnnpar are not cached, since their code may change. done: said with the
    seconds of `make`."""
    file = None
    if cache is not None and type(by).__module__.partition(".")[0] == "gnnpar":
        name = hashlib.sha256(json.dumps(key(), sort_keys=True, default=str).encode()).hexdigest()
        file = cache / f"{name}.{'edges' if title == 'vertex cut' else 'part'}"
        if (kept := _read(file, num_rows, count, title, say)) is not None:
            return kept
    began = time.perf_counter()
    made = make()
    if done:
        say(f"{done} {time.perf_counter() - began:.1f} s")
    if file is not None:
        payload = made.to(torch.int32).numpy().tobytes()
        try:
            file.parent.mkdir(parents=True, exist_ok=True)
            with open_atomic(file) as out:  # two runs may partition at once
                out.write(hashlib.sha256(payload).digest() + payload)
        except OSError as error:
            say(f"{title} not cached: {error.strerror} ({file})")
    return made


def _read(file: Path, num_rows: int, count: int, title: str, say: Callable[[str], None]) -> Tensor | None:
    """Return the numbers in a file of `cached`, or None; say a line if it is damaged."""
    try:
        data = file.read_bytes() if file.stat().st_size == 32 + 4 * num_rows else b""
    except FileNotFoundError:
        return None
    except OSError as error:
        say(f"the cached {title} {file} cannot be read ({error.strerror}): making it again")
        return None
    digest, payload = data[:32], data[32:]
    if payload and hashlib.sha256(payload).digest() == digest:
        number_of = torch.from_numpy(np.frombuffer(payload, dtype=np.int32).astype(np.int64))
        within = int(number_of.min()) >= 0 and int(number_of.max()) < count
        if within and (title != "partition" or len(number_of.unique()) == count):  # every part has nodes
            return number_of
    say(f"the cached {title} {file} is corrupt: making it again")
    return None
