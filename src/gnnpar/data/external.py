"""Preprocess graphs beyond memory: the result of `prepare`, in chunks, with a bucket sort of the edges on disk.

Three passes over the edges: count the in-edges of every row, write the edges into buckets of consecutive rows that fit
in memory, sort each bucket. Memory is O(nodes) + one bucket. Scratch space per edge is 8 bytes, plus 4 for a weight, 8
for a type, and 4 for each attribute (8 for a float64).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from itertools import pairwise
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from gnnpar.data.columns import Column, ColumnWriter
from gnnpar.data.preprocess import (
    EdgeValues,
    LoopWeights,
    Preprocess,
    make_split,
    normalized,
    refuse_loops,
    sorted_edges,
)
from gnnpar.data.raw import RawGraph, check_finite, check_split, check_types, checked_features
from gnnpar.data.stored import OnProgress, Stored, no_progress
from gnnpar.folds.edge_data import SelfLoops

BUCKET_EDGES = 1 << 23
EdgeChunk = tuple[np.ndarray, np.ndarray, EdgeValues]  # sources, destinations, edge data
EdgeChunks = Callable[[], Iterator[EdgeChunk]]


def streamed(
    config: Preprocess,
    raw: RawGraph,
    x: PreparedRows,
    edges: EdgeChunks,
    scratch: Path,
    *,
    seed: int,
    num_edges: int,
    kinds: Mapping[str, np.dtype] | None = None,
    rounded: bool = False,
    on_progress: OnProgress = no_progress,
) -> Stored:
    """Return the same graph as `prepare`, with its edges in files in `scratch`. raw: checked, for labels and masks."""
    assert raw.num_classes is not None
    train, val, test = make_split(raw, config, seed=seed)
    check_split(raw, (train, val, test))
    indptr, indices, carried = canonical_csr(
        edges,
        scratch,
        name=raw.name,
        num_nodes=len(x),
        num_edges=num_edges,
        symmetrize=config.symmetrize or raw.pairs,
        self_loops=config.loops,
        drop_duplicates=config.merges,
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
        carried=carried,
        rounded=rounded,
    )
    return stored.hashed(on_progress)


class PreparedRows:
    """Features by slices of rows, checked and normalised as in `prepare`. wide: given in a wide dtype."""

    def __init__(
        self, config: Preprocess, name: str, shape: tuple[int, ...], read: Callable[[slice], Tensor], *, wide: bool
    ) -> None:
        if config.normalize == "standard":
            raise ValueError(
                f"dataset {name}: dataset.normalize=standard needs all features in memory; set none or row, or "
                "standardise the features."
            )
        self.config, self.name, self.shape, self.read = config, name, shape, read
        double = config.double and (config.normalize != "none" or wide)
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
    *,
    name: str,
    num_nodes: int,
    num_edges: int,
    symmetrize: bool,
    self_loops: SelfLoops,
    drop_duplicates: bool,
    kinds: Mapping[str, np.dtype] | None = None,
    bucket_edges: int = BUCKET_EDGES,
    on_progress: OnProgress = no_progress,
) -> tuple[np.ndarray, Column, dict[str, Column]]:
    """Return (indptr int64 [N + 1] in memory, indices [E] in `folder`/indices.npy, edge data in `folder`/KIND.npy).

    Rows are destinations, sources ascend. num_edges: length of the unsorted list. `kinds`: kinds of edge data with the
    dtype of a row, a number or a subarray (D,).
    """
    outside = 0
    kinds = kinds or {}
    if self_loops is True:
        refuse_loops(name, kinds)
    loops = LoopWeights(name, num_nodes, kinds["weight"]) if kinds and self_loops is True else None

    def listed(stage: str) -> Iterator[EdgeChunk]:
        nonlocal outside
        done = 0
        for src, dst, values in edges():
            for kind, value in values.items():
                if kind == "type":
                    check_types(name, value, first=done, most=num_edges)
                else:
                    check_finite(name, f"edge_{kind}", value, first=done)
            on_progress(stage, done / max(1, num_edges))
            done += len(src)
            good = (np.minimum(src, dst) >= 0) & (np.maximum(src, dst) < num_nodes)
            outside += len(src) - int(good.sum())
            apart = good & (src != dst)
            kept = good if self_loops == "keep" else apart
            if loops is not None:
                own = good & (src == dst)
                loops.add(src[own], values["weight"][own])
            yield _chosen(src, dst, values, kept)
            if symmetrize:
                yield _chosen(dst, src, values, apart)

    counts = np.full(num_nodes, int(self_loops is True), dtype=np.int64)
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
            if self_loops is True:
                rows = np.arange(last - first)
                keys = np.concatenate([keys, rows * num_nodes + rows + first])
            if loops is not None:
                values = {"weight": np.concatenate([values["weight"], loops.weights[first:last]])}
            keys, values = sorted_edges(name, keys, values, num_nodes, drop_duplicates=drop_duplicates, first_row=first)
            row, src = np.divmod(keys, num_nodes)
            degrees[first:last] = np.bincount(row, minlength=last - first)
            out.write(src)
            for kind, value in values.items():
                files[kind].write(value)
    columns = {kind: Column(file.file) for kind, file in files.items()}
    return np.concatenate([[0], np.cumsum(degrees)]), Column(out.file), columns


def _chosen(src: np.ndarray, dst: np.ndarray, values: EdgeValues, kept: np.ndarray) -> EdgeChunk:
    """Select the edges of a mask."""
    return src[kept].astype(np.int64), dst[kept].astype(np.int64), {k: value[kept] for k, value in values.items()}


EDGE_TYPES: dict[str, type[np.generic]] = {"weight": np.float32, "type": np.int64, "attr": np.float32}


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
