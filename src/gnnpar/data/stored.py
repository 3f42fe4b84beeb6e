"""Stored: a preprocessed graph with O(nodes) memory; features and edges are read in chunks."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import NamedTuple, Protocol, runtime_checkable

import numpy as np
import torch
from torch import Tensor

from gnnpar.data.columns import Slices
from gnnpar.data.dataset import Dataset, TaskName, content_hash
from gnnpar.folds.edge_data import EDGE_KINDS, EdgeSizes, Schema, degree_histogram

CHUNK_EDGES = 1 << 20
CHUNK_ROWS = 1 << 16
CHUNK_VALUES = 1 << 25  # elements of wide rows: 128 MiB
OnProgress = Callable[[str, float], None]  # (stage, share done)


def no_progress(stage: str, share: float) -> None:
    """Do nothing."""


def row_chunks(x: Slices) -> Iterator[slice]:
    """Yield slices of all rows of x [N, F], in order, of at most CHUNK_ROWS rows and CHUNK_VALUES numbers."""
    at_once = max(1, min(CHUNK_ROWS, CHUNK_VALUES // max(1, x.shape[1])))
    for first in range(0, x.shape[0], at_once):
        yield slice(first, min(first + at_once, x.shape[0]))


class Edges(NamedTuple):
    """In-edges of some rows, in order. first: id of the first edge. Shapes: src, dst [n]; values [n] or [n, D]."""

    first: int
    src: np.ndarray
    dst: np.ndarray
    values: Mapping[str, np.ndarray]


@dataclass(frozen=True, eq=False, kw_only=True)
class Stored:
    """A whole graph as `Dataset` describes it, in-edges as CSR by destination, sources ascending.

    Shapes: x [N, F], indices [E] and edge data (weight [E], type [E] int64, attr [E, D]) by slices; y [N] or [N, C],
    masks 3 x [N] and indptr [N + 1] int64 in memory.
    """

    name: str
    x: Slices
    y: np.ndarray
    indptr: np.ndarray
    indices: Slices
    masks: tuple[np.ndarray, np.ndarray, np.ndarray]
    num_classes: int
    task: TaskName
    graph_hash: str = ""
    split_hash: str = ""
    num_edge_types: int | None = None  # None: largest type + 1
    schema: Schema | None = None
    carried: Mapping[str, Slices] = field(default_factory=dict[str, Slices])
    rounded: bool = False

    @property
    def num_nodes(self) -> int:
        return self.x.shape[0]

    @property
    def num_edges(self) -> int:
        return len(self.indices)

    @property
    def num_features(self) -> int:
        return self.x.shape[1]

    @cached_property
    def in_degree(self) -> Tensor:
        return torch.from_numpy(np.diff(self.indptr))

    @property
    def train_mask(self) -> Tensor:
        return torch.from_numpy(self.masks[0])

    @property
    def edge_index(self) -> Tensor:
        """int64 [2, E]: the whole structure in memory, for partitioners that need it."""
        src = torch.from_numpy(np.asarray(self.indices[0 : self.num_edges], dtype=np.int64))
        return torch.stack([src, torch.arange(self.num_nodes).repeat_interleave(self.in_degree)])

    def edges(self, limit: int = CHUNK_EDGES) -> Iterator[Edges]:
        """Yield all edges in the order of their ids, at most `limit` at a time."""
        for first in range(0, self.num_edges, limit):
            last = min(first + limit, self.num_edges)
            row, end = np.searchsorted(self.indptr, [first, last - 1], side="right") - 1
            counts = np.diff(np.clip(self.indptr[row : end + 2], first, last))
            values = {kind: column[first:last] for kind, column in self.carried.items()}
            yield Edges(first, self.indices[first:last], np.repeat(np.arange(row, end + 1), counts), values)

    @cached_property
    def in_weight(self) -> Tensor | None:
        """[N] float64: sums of the weights of in-edges, added in their order; None without weights."""
        if "weight" not in self.carried:
            return None
        total = np.zeros(self.num_nodes)
        for edges in self.edges():
            np.add.at(total, edges.dst, edges.values["weight"].astype(np.float64))
        return torch.from_numpy(total)

    @cached_property
    def edge_sizes(self) -> EdgeSizes:
        """Equal to `Dataset.edge_sizes`."""
        if self.num_edge_types is not None or "type" not in self.carried:
            types = self.num_edge_types or 0
        else:
            types = max((int(edges.values["type"].max()) for edges in self.edges()), default=0) + 1
        width = self.carried["attr"].shape[1] if "attr" in self.carried else 0
        loops = any(bool((edges.src == edges.dst).any()) for edges in self.edges())
        return EdgeSizes(types, width, degree_histogram(self.in_degree), self.schema, loops)

    def hashed(self, on_progress: OnProgress = no_progress) -> Stored:
        """Return the graph with the hashes of `Dataset.of`, read in chunks."""
        digest = hashlib.sha256(f"{self.task}/{self.num_classes}".encode())
        num_edges, num_nodes = self.num_edges, self.num_nodes
        digest.update(f"|torch.int64(2, {num_edges})|".encode())
        for first in range(0, num_edges, CHUNK_EDGES):
            on_progress("hash", 0.5 * first / num_edges)
            digest.update(self.indices[first : first + CHUNK_EDGES].astype(np.int64).data)
        for first in range(0, num_nodes, CHUNK_ROWS):
            last = min(first + CHUNK_ROWS, num_nodes)
            digest.update(np.repeat(np.arange(first, last), np.diff(self.indptr[first : last + 1])).data)
        digest.update(f"|torch.{self.x.dtype}{tuple(self.x.shape)}|".encode())
        for rows in row_chunks(self.x):
            on_progress("hash", 0.5 + 0.5 * rows.start / num_nodes)
            digest.update(np.ascontiguousarray(self.x[rows]).data)
        digest.update(f"|{torch.from_numpy(self.y).dtype}{tuple(self.y.shape)}|".encode())
        digest.update(np.ascontiguousarray(self.y).data)
        for column in (self.carried[kind] for kind in EDGE_KINDS if kind in self.carried):
            digest.update(f"|torch.{column.dtype}{tuple(column.shape)}|".encode())
            for first in range(0, num_edges, CHUNK_EDGES):
                digest.update(np.ascontiguousarray(column[first : first + CHUNK_EDGES]).data)
        split_hash = content_hash([torch.from_numpy(mask) for mask in self.masks], label="split")
        return replace(self, graph_hash=digest.hexdigest(), split_hash=split_hash)

    @staticmethod
    def of(dataset: Dataset) -> Stored:
        """Return a view of a dataset in memory; only row pointers are copied."""
        indptr = np.concatenate([[0], np.cumsum(dataset.in_degree.numpy())]).astype(np.int64)
        train, val, test = (mask.numpy() for mask in (dataset.train_mask, dataset.val_mask, dataset.test_mask))
        return Stored(
            name=dataset.name,
            x=dataset.x.numpy(),
            y=dataset.y.numpy(),
            indptr=indptr,
            indices=dataset.edge_index[0].numpy(),
            masks=(train, val, test),
            num_classes=dataset.num_classes,
            task=dataset.task,
            graph_hash=dataset.graph_hash,
            split_hash=dataset.split_hash,
            carried={kind: dataset.edges.tensors[kind].numpy() for kind in dataset.edges.kinds},
            num_edge_types=dataset.edge_sizes.types or None,
            schema=dataset.edge_sizes.schema,
            rounded=dataset.rounded,
        )


@runtime_checkable
class Streamed(Protocol):
    """The configuration of a dataset that can be read in chunks."""

    def stored(self, data_dir: Path | None, seed: int, scratch: Path, on_progress: OnProgress = ...) -> Stored:
        """Return the graph, its edges in canonical order in the folder `scratch`. on_progress: (stage, share done)."""
        ...
