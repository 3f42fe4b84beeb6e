"""Graphs beyond memory. `Stored`: a preprocessed graph with O(nodes) memory; features and edges are read in chunks.
`streamed`: the result of `prepare` as a Stored, with a bucket sort of the edges on disk.

Three passes over the edges: count the in-edges of every row, write the edges into buckets of consecutive rows that fit
in memory, sort each bucket. Memory is O(nodes) + one bucket. Scratch space per edge is 8 bytes, plus 4 for a weight, 8
for a type, and 4 for each attribute (8 for a float64).
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import chain, pairwise
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple, Protocol, Union, runtime_checkable

import numpy as np
import torch
from torch import Tensor

from gnnpar.data.columns import Column, ColumnWriter, tensor_of
from gnnpar.data.dataset import Dataset, TaskName, content_hash
from gnnpar.data.preprocess import EdgeValues, Preprocess, added_loops, make_split, normalized, sorted_edges
from gnnpar.data.raw import RawGraph, check_edges, checked, checked_features, is_wide, stored_as
from gnnpar.files import require_disk, require_memory
from gnnpar.folds.edge_data import EDGE_KINDS, EdgeSizes, Schema, degree_histogram

BUCKET_EDGES = 1 << 23
CHUNK_EDGES = 1 << 20
CHUNK_ROWS = 1 << 16
CHUNK_VALUES = 1 << 25  # elements of wide rows: 128 MiB
OnProgress = Callable[[str, float], None]  # (stage, share done)
EdgeChunk = tuple[np.ndarray, np.ndarray, EdgeValues]  # sources, destinations, edge data
EdgeChunks = Callable[[], Iterator[EdgeChunk]]
Slices = Union[np.ndarray, Column, "PreparedRows"]  # rows by slices: an array, or a file


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
        spans = [slice(first, first + CHUNK_EDGES) for first in range(0, self.num_edges, CHUNK_EDGES)]
        rows = list(row_chunks(self.x))
        src = (self.indices[span].astype(np.int64) for span in spans)
        dst = (np.repeat(np.arange(r.start, r.stop), np.diff(self.indptr[r.start : r.stop + 1])) for r in rows)
        arrays: list[tuple[np.dtype, tuple[int, ...], Iterable[np.ndarray]]] = [
            (np.dtype(np.int64), (2, self.num_edges), chain(src, dst)),
            (self.x.dtype, self.x.shape, (self.x[r] for r in rows)),
            (self.y.dtype, self.y.shape, [self.y]),
        ]
        for column in (self.carried[kind] for kind in EDGE_KINDS if kind in self.carried):
            arrays.append((column.dtype, column.shape, map(column.__getitem__, spans)))
        total = sum(dtype.itemsize * math.prod(shape) for dtype, shape, _ in arrays)
        digest, done = hashlib.sha256(f"{self.task}/{self.num_classes}".encode()), 0
        for dtype, shape, chunks in arrays:
            digest.update(f"|torch.{dtype}{tuple(shape)}|".encode())
            for chunk in chunks:
                digest.update(np.ascontiguousarray(chunk).data)
                done += chunk.nbytes
                on_progress("hash", done / total)
        split_hash = content_hash([torch.from_numpy(mask) for mask in self.masks], label="split")
        return replace(self, graph_hash=digest.hexdigest(), split_hash=split_hash)

    @staticmethod
    def of(dataset: Dataset) -> Stored:
        """Return a view of a dataset in memory; only row pointers are copied."""
        indptr = np.concatenate([[0], np.cumsum(dataset.in_degree.numpy())]).astype(np.int64)
        train, val, test = (mask.numpy() for mask in (dataset.train_mask, dataset.val_mask, dataset.test_mask))
        same = ("name", "num_classes", "task", "graph_hash", "split_hash", "rounded")
        return Stored(
            **{name: vars(dataset)[name] for name in same},
            x=dataset.x.numpy(),
            y=dataset.y.numpy(),
            indptr=indptr,
            indices=dataset.edge_index[0].numpy(),
            masks=(train, val, test),
            carried={kind: dataset.edges.tensors[kind].numpy() for kind in dataset.edges.kinds},
            num_edge_types=dataset.edge_sizes.types or None,
            schema=dataset.edge_sizes.schema,
        )


@runtime_checkable
class Streamed(Protocol):
    """The configuration of a dataset that can be read in chunks."""

    def stored(self, data_dir: Path | None, seed: int, scratch: Path, on_progress: OnProgress = ...) -> Stored:
        """Return the graph, its edges in canonical order in the folder `scratch`. on_progress: (stage, share done)."""
        ...


def streamed(
    x: PreparedRows,
    make_raw: Callable[[], RawGraph],
    edges: EdgeChunks,
    scratch: Path,
    *,
    seed: int,
    num_edges: int,
    pairs: bool = False,
    carried: Mapping[str, Slices] = MappingProxyType({}),
    rounded: bool = False,
    title: str,
    remedy: str,
    on_progress: OnProgress = no_progress,
) -> Stored:
    """Return the same graph as `prepare`, with its edges in files in `scratch`. make_raw: returns labels and masks.
    edges: `num_edges` of them, with data of the dtypes and widths of `carried`. pairs: as in RawGraph. title, remedy:
    for a full disk.

    Disk: 12 bytes per edge, 8 of them temporary, and its data. Raises ValueError.
    """
    config = x.config
    kinds = {kind: _stored_type(config, kind, column) for kind, column in carried.items()}
    if "attr" in carried:  # sorted with the edges
        nbytes = 12 * carried["attr"].shape[1] * min(num_edges, BUCKET_EDGES)
        require_memory(nbytes, f"{title}, even in chunks,", "give fewer columns of attributes")
    nbytes = (12 + sum(kind.itemsize for kind in kinds.values())) * num_edges * (1 + (config.symmetrize or pairs))
    require_disk(nbytes, scratch, f"{title}, while its edges are sorted,", remedy)
    raw = checked(make_raw(), double=config.double)
    assert raw.num_classes is not None
    train, val, test = make_split(raw, config, seed=seed)
    indptr, indices, columns = canonical_csr(
        edges,
        scratch,
        config,
        name=raw.name,
        num_nodes=len(x),
        num_edges=num_edges,
        pairs=pairs,
        kinds=kinds,
        on_progress=on_progress,
    )
    stored = Stored(
        name=raw.name,
        x=x,
        y=raw.y.numpy(),
        indptr=indptr,
        indices=indices,
        masks=(train.numpy(), val.numpy(), test.numpy()),
        num_classes=raw.num_classes,
        task=raw.task,
        carried=columns,
        rounded=rounded,
    )
    return stored.hashed(on_progress)


def _stored_type(config: Preprocess, kind: str, column: Slices) -> np.dtype:
    """Return the dtype of a row of edge data after preprocessing: a number, or a subarray (D,)."""
    if kind == "type":
        return np.dtype(np.int64)
    wide = config.double and is_wide(tensor_of(column[0:0], kind))
    return np.dtype((np.float64 if wide else np.float32, column.shape[1:]))


class PreparedRows:
    """Features [N, F] by slices of rows, checked and normalised as in `prepare`."""

    def __init__(self, config: Preprocess, name: str, shape: tuple[int, ...], read: Callable[[slice], Tensor]) -> None:
        if config.normalize == "standard":
            raise ValueError(
                f"dataset {name}: dataset.normalize=standard needs all features in memory; set none or row, or "
                "standardise the features."
            )
        self.config, self.name, self.shape, self.read = config, name, shape, read
        double = config.double and (config.normalize != "none" or is_wide(read(slice(0))))
        self.dtype = np.dtype(np.float64 if double else np.float32)

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, rows: slice, /) -> np.ndarray:
        double, how = self.config.double, self.config.normalize
        x = checked_features(self.name, self.read(rows), double=double or how != "none", first=rows.start or 0)
        no_mask = torch.zeros(0, dtype=torch.bool)
        return normalized(x, how, train_mask=no_mask, double=double, name=self.name).numpy()


def canonical_csr(
    edges: EdgeChunks,
    folder: Path,
    config: Preprocess,
    *,
    name: str,
    num_nodes: int,
    num_edges: int,
    pairs: bool = False,
    kinds: Mapping[str, np.dtype] | None = None,
    bucket_edges: int = BUCKET_EDGES,
    on_progress: OnProgress = no_progress,
) -> tuple[np.ndarray, Column, dict[str, Column]]:
    """Return (indptr int64 [N + 1] in memory, indices [E] in `folder`/indices.npy, edge data in `folder`/KIND.npy).

    Rows are destinations, sources ascend. num_edges: length of the unsorted list. pairs: as in `canonical_edges`.
    `kinds`: kinds of edge data with the dtype of a row, a number or a subarray (D,).
    """
    outside = 0
    kinds = kinds or {}
    loops = added_loops(name, num_nodes, kinds) if config.loops is True else None

    def listed(stage: str) -> Iterator[EdgeChunk]:
        nonlocal outside
        done = 0
        for src, dst, given in edges():
            values = {
                kind: _checked_values(name, kind, value, kinds[kind].base, first=done, most=num_edges)
                for kind, value in given.items()
            }
            on_progress(stage, done / max(1, num_edges))
            done += len(src)
            good = (np.minimum(src, dst) >= 0) & (np.maximum(src, dst) < num_nodes)
            outside += len(src) - int(good.sum())
            apart = good & (src != dst)
            kept = good if config.loops == "keep" else apart
            if loops is not None:
                own = good & (src == dst)
                loops.add(src[own], values["weight"][own])
            yield _chosen(src, dst, values, kept)
            if config.symmetrize or pairs:
                yield _chosen(dst, src, values, apart)

    counts = np.full(num_nodes, int(config.loops is True), dtype=np.int64)
    for _, dst, _ in listed("count edges"):
        counts += np.bincount(dst, minlength=num_nodes)
    if outside:
        raise ValueError(
            f"dataset {name}: {outside} of {num_edges} edges point outside nodes 0..{num_nodes - 1}"
            "; number nodes from 0, or give more feature rows."
        )
    bounds = _bounds(counts, bucket_edges)
    record = np.dtype([("key", np.int64), *sorted(kinds.items())])
    _deal(listed("sort edges"), folder, bounds, num_nodes, record)
    degrees = np.zeros(num_nodes, dtype=np.int64)
    with ExitStack() as opened:
        index = np.int32 if num_nodes < 2**31 else np.int64
        out = opened.enter_context(ColumnWriter(folder / "indices.npy", index))
        files = {
            kind: opened.enter_context(ColumnWriter(folder / f"{kind}.npy", dtype.base, dtype.shape))
            for kind, dtype in kinds.items()
        }
        for b, (first, last) in enumerate(pairwise(bounds.tolist())):
            on_progress("sort buckets", b / (len(bounds) - 1))
            bucket = folder / f"bucket-{b}"
            records = np.fromfile(bucket, dtype=record)
            bucket.unlink()
            keys, values = records["key"], {kind: records[kind] for kind in kinds}
            if config.loops is True:
                rows = np.arange(last - first)
                keys = np.concatenate([keys, rows * num_nodes + rows + first])
            if loops is not None:
                values = {"weight": np.concatenate([values["weight"], loops.weights[first:last]])}
            keys, values = sorted_edges(name, keys, values, num_nodes, drop_duplicates=config.merges, first_row=first)
            row, src = np.divmod(keys, num_nodes)
            degrees[first:last] = np.bincount(row, minlength=last - first)
            out.write(src)
            for kind, value in values.items():
                files[kind].write(value)
    columns = {kind: Column(file.file) for kind, file in files.items()}
    return np.concatenate([[0], np.cumsum(degrees)]), Column(out.file), columns


def _checked_values(name: str, kind: str, values: np.ndarray, dtype: np.dtype, *, first: int, most: int) -> np.ndarray:
    """Return edge data of some edges, from edge `first`, in its stored dtype. most: number of types."""
    if kind == "attr":
        stored_as(name, "edge_attr", tensor_of(values, "edge_attr"), double=dtype == np.float64)
    values = values.astype(dtype)
    check_edges(name, kind, values, first=first, most=most)
    return values


def _chosen(src: np.ndarray, dst: np.ndarray, values: EdgeValues, kept: np.ndarray) -> EdgeChunk:
    """Select the edges of a mask."""
    return src[kept].astype(np.int64), dst[kept].astype(np.int64), {k: value[kept] for k, value in values.items()}


def _bounds(counts: np.ndarray, most: int) -> np.ndarray:
    """Return the first rows of buckets of about `most` edges, and the number of rows. A row is never divided."""
    bucket = (np.cumsum(counts) - 1) // most
    first = np.flatnonzero(np.diff(bucket, prepend=-1))
    return np.concatenate([first[:1] * 0, first[1:], [len(counts)]])


def _deal(edges: Iterator[EdgeChunk], folder: Path, bounds: np.ndarray, num_nodes: int, record: np.dtype) -> None:
    """Write each edge into its bucket's file: key = (row - first row of the bucket) * N + source, then its data."""
    files = [(folder / f"bucket-{b}").open("wb") for b in range(len(bounds) - 1)]
    try:
        for src, dst, values in edges:
            bucket = (np.searchsorted(bounds, dst, side="right") - 1).astype(np.uint16 if len(files) < 65536 else int)
            order = np.argsort(bucket, kind="stable")
            records = np.empty(len(src), record)
            records["key"] = ((dst - bounds[bucket]) * num_nodes + src)[order]
            for kind, value in values.items():
                records[kind] = value[order]
            ends = np.cumsum(np.bincount(bucket, minlength=len(files)))
            for b in np.flatnonzero(np.diff(ends, prepend=0)):
                files[b].write(records[ends[b - 1] if b else 0 : ends[b]].data)
    finally:
        for file in files:
            file.close()
