"""Canonical edges of a list of any length: what `preprocess.canonical_edges` gives, by a bucket sort on disk.

Three passes over the list: count the in-edges of every row, deal the edges out to buckets of consecutive rows that fit
in memory, sort bucket after bucket. Memory is O(nodes) + one bucket; the disk holds 8 bytes an edge for a while.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path

import numpy as np

from gnnpar.data.columns import Column, ColumnWriter
from gnnpar.data.stored import OnProgress, no_progress

BUCKET_EDGES = 1 << 23
EdgeList = Callable[[], Iterator[tuple[np.ndarray, np.ndarray]]]  # (sources, destinations), a chunk at a time


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
    bucket_edges: int = BUCKET_EDGES,
    on_progress: OnProgress = no_progress,
) -> tuple[np.ndarray, Column]:
    """(indptr int64 [N + 1] in memory, indices [E] in `folder`/indices.npy), rows by destination, sources ascending.

    num_edges: of the list as it is, for progress alone.
    """

    outside = 0

    def listed(stage: str) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        nonlocal outside
        done = 0
        for src, dst in edges():
            on_progress(stage, done / max(1, num_edges))
            done += len(src)
            good = (np.minimum(src, dst) >= 0) & (np.maximum(src, dst) < num_nodes)
            outside += len(src) - int(good.sum())
            kept = good & (src != dst)
            src, dst = src[kept].astype(np.int64), dst[kept].astype(np.int64)
            yield src, dst
            if symmetrize:
                yield dst, src

    counts = np.full(num_nodes, int(self_loops), dtype=np.int64)
    for _, dst in listed("count edges"):
        counts += np.bincount(dst, minlength=num_nodes)
    if outside:
        raise ValueError(
            f"dataset {name}: {outside} of {num_edges} edges point outside nodes 0..{num_nodes - 1}"
            "; number nodes from 0, or give more feature rows."
        )
    bounds = _bounds(counts, bucket_edges)
    _deal(listed("sort edges"), folder, bounds, num_nodes)
    return _sort(
        folder, bounds, num_nodes, self_loops=self_loops, drop_duplicates=drop_duplicates, on_progress=on_progress
    )


def _bounds(counts: np.ndarray, most: int) -> np.ndarray:
    """First rows of buckets of about `most` edges, and the number of rows; a row is never divided."""
    bucket = (np.cumsum(counts) - 1) // most
    first = np.flatnonzero(np.diff(bucket, prepend=-1))
    return np.concatenate([first[:1] * 0, first[1:], [len(counts)]])


def _deal(edges: Iterator[tuple[np.ndarray, np.ndarray]], folder: Path, bounds: np.ndarray, num_nodes: int) -> None:
    """Every edge as one key, (row - first row of its bucket) * N + source, into the file of its bucket."""
    files = [(folder / f"bucket-{b}").open("wb") for b in range(len(bounds) - 1)]
    try:
        for src, dst in edges:
            bucket = (np.searchsorted(bounds, dst, side="right") - 1).astype(np.uint16 if len(files) < 65536 else int)
            order = np.argsort(bucket, kind="stable")
            keys = ((dst - bounds[bucket]) * num_nodes + src)[order]
            ends = np.cumsum(np.bincount(bucket, minlength=len(files)))
            for b in np.flatnonzero(np.diff(ends, prepend=0)):
                files[b].write(keys[ends[b - 1] if b else 0 : ends[b]].data)
    finally:
        for file in files:
            file.close()


def _sort(
    folder: Path,
    bounds: np.ndarray,
    num_nodes: int,
    *,
    self_loops: bool,
    drop_duplicates: bool,
    on_progress: OnProgress,
) -> tuple[np.ndarray, Column]:
    """Bucket after bucket in order, behind each other."""
    degrees = np.zeros(num_nodes, dtype=np.int64)
    with ColumnWriter(folder / "indices.npy", np.int32 if num_nodes < 2**31 else np.int64) as out:
        for b, (first, last) in enumerate(pairwise(bounds)):
            on_progress("sort buckets", b / (len(bounds) - 1))
            file = folder / f"bucket-{b}"
            keys = np.fromfile(file, dtype=np.int64)
            file.unlink()
            if self_loops:
                rows = np.arange(last - first, dtype=np.int64)
                keys = np.concatenate([keys, rows * num_nodes + rows + first])
            keys.sort()
            if drop_duplicates and len(keys):
                keys = keys[np.concatenate([[True], keys[1:] != keys[:-1]])]
            row, src = np.divmod(keys, num_nodes)
            degrees[first:last] = np.bincount(row, minlength=last - first)
            out.write(src)
    return np.concatenate([[0], np.cumsum(degrees)]), Column(folder / "indices.npy")
