"""Write the shards of `shard.cut` to disk, one folder per rank, while reading the graph in chunks.

Memory: O(nodes) and a chunk. Edges inside a part are written to its block, edges between parts to one scratch file per
pair until their sources are known. The folder has a temporary name until the manifest is written.
"""

from __future__ import annotations

import importlib.metadata
import math
import os
import tempfile
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from gnnpar.data.columns import Column, ColumnWriter
from gnnpar.data.stored import CHUNK_EDGES, OnProgress, Stored, no_progress, row_chunks
from gnnpar.files import JsonDict, file_hash, require_disk, require_files, sync_folder
from gnnpar.folds.block import index_dtype, layout
from gnnpar.partition.manifest import PARTITION, SCHEMA, FileFacts, Manifest, folder_of
from gnnpar.partition.shard import statistics_of
from gnnpar.placement import array_hash

INDEX_TYPES: dict[torch.dtype, type] = {torch.int32: np.int32, torch.int64: np.int64}


def write_shards(
    graph: Stored,
    part_of: Tensor,
    parts: int,
    out: Path,
    *,
    edge_ids: bool,
    setup: Mapping[str, JsonDict],
    on_progress: OnProgress = no_progress,
) -> Manifest:
    """Write all shards of a partition, int64 [N], to the new folder `out`. Scratch files need 8 more bytes per cut
    edge. Shapes of the files: as in `Shard` and `Block`; part_of.npy [N] is the partition."""
    if out.exists():
        raise ValueError(f"out={out} is there already: remove it, or name another folder")
    files = parts**2 * (1 + edge_ids + len(graph.carried)) + 64  # a scratch file per pair of parts
    require_files(files, f"writing {parts} parts", "cut fewer parts")
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        of_edge = 4 + sum(values.dtype.itemsize * math.prod(values.shape[1:]) for values in graph.carried.values())
        nbytes = graph.x.dtype.itemsize * graph.num_nodes * graph.num_features + of_edge * graph.num_edges
        require_disk(nbytes, out.parent, f"out={out}", "name another place")
        with tempfile.TemporaryDirectory(dir=out.parent, prefix=f".{out.name}.", suffix=".partial") as scratch:
            partial = Path(scratch) / "shards"
            partial.mkdir()
            writer = _Writer(graph, part_of, parts, partial, edge_ids, on_progress)
            writer.nodes()
            writer.features()
            writer.edges()
            writer.attributes()
            writer.cut_blocks()
            manifest = writer.manifest(setup, array_hash(part_of))
            manifest.save(partial)
            sync_folder(partial)
            partial.rename(out)
    except OSError as error:
        raise ValueError(
            f"out={out} cannot be written: {error.strerror or error}; give it room, or another place"
        ) from error
    return manifest


class _Writer:
    """Writes the shards of a partition; every method is a pass."""

    def __init__(
        self, graph: Stored, part_of: Tensor, parts: int, folder: Path, edge_ids: bool, on_progress: OnProgress
    ) -> None:
        self.graph, self.parts, self.folder = graph, parts, folder
        self.with_ids, self.on_progress = edge_ids, on_progress
        self.part_of = part_of.to(torch.int32).numpy()
        self.node_ids = [np.flatnonzero(self.part_of == p) for p in range(parts)]
        self.local_of = np.empty(graph.num_nodes, dtype=np.int32)
        for ids in self.node_ids:
            self.local_of[ids] = np.arange(len(ids), dtype=np.int32)
        self.inner_type = index_dtype(graph.num_edges, graph.num_nodes, graph.num_nodes)  # before its edges are counted
        self.num_edges = np.zeros((parts, parts), dtype=np.int64)  # into i from j
        self.inner_degree = [np.zeros(len(ids), dtype=np.int64) for ids in self.node_ids]
        self.halo_from = np.zeros((parts, parts), dtype=np.int64)

    def file(self, part: int, name: str) -> Path:
        return self.folder / folder_of(part) / f"{name}.npy"

    def nodes(self) -> None:
        """Write ids, labels, degrees and masks."""
        graph, degree = self.graph, self.graph.in_degree.to(torch.float32).numpy()
        np.save(self.folder / PARTITION, self.part_of)
        for p, ids in enumerate(self.node_ids):
            (self.folder / folder_of(p)).mkdir()
            rows = {"node_ids": ids, "y": graph.y[ids], "in_degree": degree[ids]}
            if graph.in_weight is not None:
                rows["in_weight"] = graph.in_weight.numpy()[ids]
            rows |= {f"{name}_mask": mask[ids] for name, mask in zip(_SPLITS, graph.masks, strict=True)}
            for name, array in rows.items():
                np.save(self.file(p, name), array)

    def features(self) -> None:
        graph = self.graph
        with ExitStack() as open_files:
            files = [
                open_files.enter_context(ColumnWriter(self.file(p, "x"), graph.x.dtype, tuple(graph.x.shape[1:])))
                for p in range(self.parts)
            ]
            for rows in row_chunks(graph.x):
                self.on_progress("features", rows.start / graph.num_nodes)
                x, part = graph.x[rows], self.part_of[rows]
                for p, file in enumerate(files):
                    file.write(x[part == p])

    def edges(self) -> None:
        """Write inner blocks, and other edges as (local row, local source) to scratch files."""
        with ExitStack() as opened:
            columns: dict[tuple[int, int], ColumnWriter] = {}
            values: dict[tuple[int, int, str], ColumnWriter] = {}  # ids, weights, types of edges
            for p in range(self.parts):
                file = ColumnWriter(self.file(p, "inner.indices"), INDEX_TYPES[self.inner_type])
                columns[p, p] = opened.enter_context(file)
            for edges in self.graph.edges():
                self.on_progress("edges", edges.first / self.graph.num_edges)
                pair = self.part_of[edges.dst].astype(np.uint32) * self.parts + self.part_of[edges.src]
                order = np.argsort(pair.astype(np.uint16) if self.parts < 256 else pair, kind="stable")
                ends = np.cumsum(np.bincount(pair, minlength=self.parts**2))
                for k in np.flatnonzero(np.diff(ends, prepend=0)).tolist():
                    p, q = divmod(k, self.parts)
                    chosen = order[ends[k - 1] if k else 0 : ends[k]]
                    row, src = self.local_of[edges.dst[chosen]], self.local_of[edges.src[chosen]]
                    self.num_edges[p, q] += len(chosen)
                    if (p, q) not in columns:
                        columns[p, q] = opened.enter_context(ColumnWriter(self._scratch(p, q), np.int32, (2,)))
                    if p == q:
                        low = int(row[0])  # rows come in ascending order
                        self.inner_degree[p][low : int(row[-1]) + 1] += np.bincount(row - low)
                        columns[p, p].write(src)
                    else:
                        columns[p, q].write(np.stack([row, src], axis=1))
                    for name, (kind, dtype) in self._of_edges.items():
                        if (p, q, name) not in values:
                            file = ColumnWriter(self._edge_file(p, q, name), dtype)
                            values[p, q, name] = opened.enter_context(file)
                        rows = chosen + edges.first if kind == "ids" else edges.values[kind][chosen]
                        values[p, q, name].write(rows)
        for p, degree in enumerate(self.inner_degree):
            self._save_rows(p, "inner", degree, self.inner_type, compress=False)
            for name, (_, dtype) in self._of_edges.items() if not self.num_edges[p, p] else ():
                np.save(self._edge_file(p, p, name), np.zeros(0, dtype=dtype))

    @property
    def _of_edges(self) -> dict[str, tuple[str, np.dtype]]:
        """Per-edge values of a block: name of the file -> kind, dtype."""
        ids = {"edge_ids": ("ids", np.dtype(np.int64))} if self.with_ids else {}
        carried = self.graph.carried
        return ids | {f"{kind}s": (kind, carried[kind].dtype) for kind in ("weight", "type") if kind in carried}

    def attributes(self) -> None:
        """Write the attributes of all in-edges of a part, in the order of the edges."""
        if "attr" not in self.graph.carried:
            return
        with ExitStack() as opened:
            width = (self.graph.edge_sizes.attr,)
            files = [
                opened.enter_context(ColumnWriter(self.file(p, "edge_attr"), self.graph.carried["attr"].dtype, width))
                for p in range(self.parts)
            ]
            for edges in self.graph.edges():
                self.on_progress("attributes", edges.first / self.graph.num_edges)
                part = self.part_of[edges.dst]
                for p, file in enumerate(files):
                    file.write(edges.values["attr"][part == p])

    def _scratch(self, p: int, q: int) -> Path:
        return self.folder / f"cut-{p}-{q}.npy"

    def _edge_file(self, p: int, q: int, name: str) -> Path:
        return self.file(p, f"{'inner' if p == q else f'halo-{q}'}.{name}")

    def _save_rows(self, p: int, block: str, counts: np.ndarray, dtype: torch.dtype, *, compress: bool) -> None:
        indptr, rows = layout(torch.from_numpy(counts), dtype, compress=compress)
        np.save(self.file(p, f"{block}.indptr"), indptr.numpy())
        if rows is not None:
            np.save(self.file(p, f"{block}.rows"), rows.numpy())

    def cut_blocks(self) -> None:
        """Write halo blocks and send lists, one pair of parts at a time."""
        degree = self.graph.in_degree.to(torch.float32).numpy()
        weight = None if self.graph.in_weight is None else self.graph.in_weight.numpy()
        for p in range(self.parts):
            halo_degree, halo_weight = [np.zeros(0, dtype=np.float32)], [np.zeros(0)]
            for q in range(self.parts):
                if p != q and self.num_edges[p, q]:
                    self.on_progress("halo blocks", (p * self.parts + q) / self.parts**2)
                    ids = self.node_ids[q][self._halo(p, q)]
                    halo_degree.append(degree[ids])
                    if weight is not None:
                        halo_weight.append(weight[ids])
                    np.save(self.file(p, f"halo-{q}.src_ids"), ids)
            np.save(self.file(p, "halo_in_degree"), np.concatenate(halo_degree))
            if weight is not None:
                np.save(self.file(p, "halo_in_weight"), np.concatenate(halo_weight))

    def _halo(self, p: int, q: int) -> np.ndarray:
        """Write the block of the in-edges of p from q; return the rows that q sends."""
        edges = Column(self._scratch(p, q))
        sent = np.zeros(len(self.node_ids[q]), dtype=bool)
        counts = np.zeros(len(self.node_ids[p]), dtype=np.int64)
        for first in range(0, len(edges), CHUNK_EDGES):
            row, src = edges[first : first + CHUNK_EDGES].T
            sent[src] = True
            counts[row[0] : row[-1] + 1] += np.bincount(row - row[0])
        rows = np.flatnonzero(sent)
        column_of = np.zeros(len(sent), dtype=np.int64)
        column_of[rows] = np.arange(len(rows))
        dtype = index_dtype(len(edges), len(counts), len(rows))
        with ColumnWriter(self.file(p, f"halo-{q}.indices"), INDEX_TYPES[dtype]) as out:
            for first in range(0, len(edges), CHUNK_EDGES):
                out.write(column_of[edges[first : first + CHUNK_EDGES][:, 1]])
        self._save_rows(p, f"halo-{q}", counts, dtype, compress=True)
        np.save(self.file(q, f"boundary-{p}"), rows)
        edges.file.unlink()
        self.halo_from[p, q] = len(rows)
        return rows

    def manifest(self, setup: Mapping[str, JsonDict], partition_hash: str) -> Manifest:
        graph = self.graph
        files = sorted(self.folder.rglob("*.npy"))
        facts = {}
        for i, file in enumerate(files):
            self.on_progress("checksums", i / len(files))
            facts[file.relative_to(self.folder).as_posix()] = _facts(file)
        train = torch.from_numpy(graph.masks[0])
        part_of = torch.from_numpy(self.part_of)
        if graph.task == "link":
            raise ValueError(
                "dataset.task=link has no labels to write beside nodes; leave it out, and train with task=link"
            )
        return Manifest(
            schema=SCHEMA,
            made_by=f"gnnpar {importlib.metadata.version('gnnpar')}",
            name=graph.name,
            task=graph.task,
            num_nodes=graph.num_nodes,
            num_edges=graph.num_edges,
            num_features=graph.num_features,
            num_classes=graph.num_classes,
            num_train=int(train.sum()),
            parts=self.parts,
            edge_ids=self.with_ids,
            edge_types=graph.edge_sizes.types,
            edge_attr=graph.edge_sizes.attr,
            rounded=graph.rounded,
            node_types="" if graph.edge_sizes.schema is None else graph.edge_sizes.schema.text,
            hashes={"graph": graph.graph_hash, "split": graph.split_hash, "partition": partition_hash},
            statistics=statistics_of(
                torch.tensor([len(ids) for ids in self.node_ids]),
                torch.bincount(part_of[train], minlength=self.parts),
                torch.from_numpy(self.num_edges),
                torch.from_numpy(self.halo_from),
            ),
            setup=dict(setup),
            files=facts,
        )


_SPLITS = ("train", "val", "test")


def _facts(file: Path) -> FileFacts:
    with file.open("rb") as written:
        os.fsync(written.fileno())
    column = Column(file)
    return FileFacts(shape=column.shape, dtype=column.dtype.str, nbytes=file.stat().st_size, sha256=file_hash(file))
