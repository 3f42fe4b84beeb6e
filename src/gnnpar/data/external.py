"""Canonical edges of a list of any length: what `preprocess` gives in memory, by a bucket sort on disk.

Three passes over the list: count the in-edges of every row, deal the edges out to buckets of consecutive rows that fit
in memory, sort bucket after bucket. Memory is O(nodes) + one bucket; the disk holds 8 bytes an edge for a while, and
4 more where edges have weights.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path

import numpy as np

from gnnpar.data.columns import Column, ColumnWriter
from gnnpar.data.preprocess import LoopWeights, sorted_weights
from gnnpar.data.raw import check_weights
from gnnpar.data.stored import OnProgress, no_progress

BUCKET_EDGES = 1 << 23
EdgeChunk = tuple[np.ndarray, np.ndarray, np.ndarray | None]  # sources, destinations, weights if any
EdgeList = Callable[[], Iterator[EdgeChunk]]  # a chunk at a time


def canonical_csr(
    edges: EdgeList,
    folder: Path,
    *,
    name: str,
    num_nodes: int,
    num_edges: int,
    symmetrize: bool,
    self_loops: bool,
    drop_duplicates: bool,
    weighted: bool = False,
    bucket_edges: int = BUCKET_EDGES,
    on_progress: OnProgress = no_progress,
) -> tuple[np.ndarray, Column, Column | None]:
    """(indptr int64 [N + 1] in memory, indices [E] in `folder`/indices.npy, `weighted`: float32 [E] in weights.npy),
    rows by destination, sources ascending.

    num_edges: of the list as it is, for progress alone.
    """

    outside = 0
    loops = LoopWeights(name, num_nodes) if weighted and self_loops else None

    def listed(stage: str) -> Iterator[EdgeChunk]:
        nonlocal outside
        done = 0
        for src, dst, weight in edges():
            if weight is not None:
                check_weights(name, weight, first=done)
            on_progress(stage, done / max(1, num_edges))
            done += len(src)
            good = (np.minimum(src, dst) >= 0) & (np.maximum(src, dst) < num_nodes)
            outside += len(src) - int(good.sum())
            kept = good & (src != dst)
            if loops is not None and weight is not None:
                own = good & (src == dst)
                loops.add(src[own], weight[own])
            src, dst = src[kept].astype(np.int64), dst[kept].astype(np.int64)
            weight = None if weight is None else weight[kept]
            yield src, dst, weight
            if symmetrize:
                yield dst, src, weight

    counts = np.full(num_nodes, int(self_loops), dtype=np.int64)
    for _, dst, _ in listed("count edges"):
        counts += np.bincount(dst, minlength=num_nodes)
    if outside:
        raise ValueError(
            f"dataset {name}: {outside} of {num_edges} edges point outside nodes 0..{num_nodes - 1}"
            "; number nodes from 0, or give more feature rows."
        )
    bounds = _bounds(counts, bucket_edges)
    kind = _WEIGHTED if weighted else np.dtype(np.int64)
    _deal(listed("sort edges"), folder, bounds, num_nodes, kind)
    sort = _Sort(name, folder, bounds, num_nodes, self_loops=self_loops, drop_duplicates=drop_duplicates)
    return sort.weighted(loops, on_progress) if weighted else sort.plain(on_progress)


_WEIGHTED = np.dtype([("key", np.int64), ("weight", np.float32)])


def _bounds(counts: np.ndarray, most: int) -> np.ndarray:
    """First rows of buckets of about `most` edges, and the number of rows; a row is never divided."""
    bucket = (np.cumsum(counts) - 1) // most
    first = np.flatnonzero(np.diff(bucket, prepend=-1))
    return np.concatenate([first[:1] * 0, first[1:], [len(counts)]])


def _deal(edges: Iterator[EdgeChunk], folder: Path, bounds: np.ndarray, num_nodes: int, kind: np.dtype) -> None:
    """Every edge as one key, (row - first row of its bucket) * N + source, with its weight if any, into the file of its
    bucket."""
    files = [(folder / f"bucket-{b}").open("wb") for b in range(len(bounds) - 1)]
    try:
        for src, dst, weight in edges:
            bucket = (np.searchsorted(bounds, dst, side="right") - 1).astype(np.uint16 if len(files) < 65536 else int)
            order = np.argsort(bucket, kind="stable")
            keys = ((dst - bounds[bucket]) * num_nodes + src)[order]
            if weight is not None:
                records = np.empty(len(keys), kind)
                records["key"], records["weight"] = keys, weight[order]
                keys = records
            ends = np.cumsum(np.bincount(bucket, minlength=len(files)))
            for b in np.flatnonzero(np.diff(ends, prepend=0)):
                files[b].write(keys[ends[b - 1] if b else 0 : ends[b]].data)
    finally:
        for file in files:
            file.close()


class _Sort:
    """Bucket after bucket in order, behind each other."""

    def __init__(
        self, name: str, folder: Path, bounds: np.ndarray, num_nodes: int, *, self_loops: bool, drop_duplicates: bool
    ) -> None:
        self.name, self.folder, self.bounds, self.num_nodes = name, folder, bounds, num_nodes
        self.self_loops, self.drop_duplicates = self_loops, drop_duplicates
        self.degrees = np.zeros(num_nodes, dtype=np.int64)

    def plain(self, on_progress: OnProgress) -> tuple[np.ndarray, Column, None]:
        with self._indices() as out:
            for first, last, keys in self._buckets(np.dtype(np.int64), on_progress):
                if self.self_loops:
                    keys = np.concatenate([keys, self._loops(first, last)])
                keys.sort()
                if self.drop_duplicates and len(keys):
                    keys = keys[np.concatenate([[True], keys[1:] != keys[:-1]])]
                out.write(self._counted(first, last, keys))
        return self._pointers(), Column(out.file), None

    def weighted(self, loops: LoopWeights | None, on_progress: OnProgress) -> tuple[np.ndarray, Column, Column]:
        with self._indices() as out, ColumnWriter(self.folder / "weights.npy", np.float32) as weights_out:
            for first, last, records in self._buckets(_WEIGHTED, on_progress):
                keys, weights = records["key"], records["weight"]
                if loops is not None:
                    keys = np.concatenate([keys, self._loops(first, last)])
                    weights = np.concatenate([weights, loops.weights[first:last]])
                keys, weights = sorted_weights(
                    self.name, keys, weights, self.num_nodes, drop_duplicates=self.drop_duplicates, first_row=first
                )
                out.write(self._counted(first, last, keys))
                weights_out.write(weights)
        return self._pointers(), Column(out.file), Column(weights_out.file)

    def _indices(self) -> ColumnWriter:
        return ColumnWriter(self.folder / "indices.npy", np.int32 if self.num_nodes < 2**31 else np.int64)

    def _buckets(self, kind: np.dtype, on_progress: OnProgress) -> Iterator[tuple[int, int, np.ndarray]]:
        """(first row, last row, what was dealt out) of every bucket, whose file goes."""
        for b, (first, last) in enumerate(pairwise(self.bounds.tolist())):
            on_progress("sort buckets", b / (len(self.bounds) - 1))
            file = self.folder / f"bucket-{b}"
            found = np.fromfile(file, dtype=kind)
            file.unlink()
            yield first, last, found

    def _loops(self, first: int, last: int) -> np.ndarray:
        rows = np.arange(last - first, dtype=np.int64)
        return rows * self.num_nodes + rows + first

    def _counted(self, first: int, last: int, keys: np.ndarray) -> np.ndarray:
        """The sources of sorted keys, whose rows are counted."""
        row, src = np.divmod(keys, self.num_nodes)
        self.degrees[first:last] = np.bincount(row, minlength=last - first)
        return src

    def _pointers(self) -> np.ndarray:
        return np.concatenate([[0], np.cumsum(self.degrees)])
