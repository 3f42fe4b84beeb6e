"""Shards on disk, one folder per rank: cut a graph as `shard.cut` while reading it in chunks, and open a shard.

Memory of writing: O(nodes) and a chunk. Edges inside a part are written to its block, edges between parts to one
scratch file per pair until their sources are known. The folder has a temporary name until the manifest is written.
Arrays of an open shard are memory-mapped, and pages are read on use. Mappings are private (copy on write), since torch
needs writable memory; no write reaches the file. Only this rank's folder is opened.
"""

from __future__ import annotations

import importlib.metadata
import math
import os
import tempfile
from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from gnnpar.data.columns import Column, ColumnWriter, load_npy
from gnnpar.data.dataset import MATRICES
from gnnpar.data.raw import MASKS
from gnnpar.data.stored import CHUNK_EDGES, OnProgress, Slices, Stored, no_progress, row_chunks
from gnnpar.files import JsonDict, file_hash, require_disk, require_files, sync_folder
from gnnpar.folds.block import Block, index_dtype, layout
from gnnpar.folds.edge_data import EdgeData
from gnnpar.partition.manifest import PARTITION, SCHEMA, Check, FileFacts, Manifest, clear, folder_of, verify
from gnnpar.partition.shard import Shard, degrees_by_type, statistics_of
from gnnpar.placement import array_hash

Array = np.ndarray
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
            rows |= {name: mask[ids] for name, mask in zip(MASKS, graph.masks, strict=True)}
            for name, array in rows.items():
                np.save(self.file(p, name), array)

    def features(self) -> None:
        """Write the features of the nodes of every part."""
        graph = self.graph
        chunks = ((r.start / graph.num_nodes, graph.x[r], self.part_of[r]) for r in row_chunks(graph.x))
        self._deal("x", "features", graph.x, chunks)

    def attributes(self) -> None:
        """Write the attributes of all in-edges of every part, in the order of the edges."""
        if (attr := self.graph.carried.get("attr")) is not None:
            edges, count = self.graph.edges(), self.graph.num_edges
            chunks = ((each.first / count, each.values["attr"], self.part_of[each.dst]) for each in edges)
            self._deal("edge_attr", "attributes", attr, chunks)

    def _deal(self, name: str, stage: str, column: Slices, chunks: Iterable[tuple[float, Array, Array]]) -> None:
        """Write rows to the files of their parts. chunks: (share done, rows [n, D], their parts [n])."""
        with ExitStack() as opened:
            width = tuple(column.shape[1:])
            files = [
                opened.enter_context(ColumnWriter(self.file(p, name), column.dtype, width)) for p in range(self.parts)
            ]
            for share, rows, part in chunks:
                self.on_progress(stage, share)
                for p, file in enumerate(files):
                    file.write(rows[part == p])

    def edges(self) -> None:
        """Write inner blocks, and other edges as (local row, local source) to scratch files."""
        index, carried = INDEX_TYPES[self.inner_type], self._of_edges
        with ExitStack() as opened:
            files: dict[Path, ColumnWriter] = {}

            def out(file: Path, dtype: np.dtype | type, width: tuple[int, ...] = ()) -> ColumnWriter:
                if file not in files:
                    files[file] = opened.enter_context(ColumnWriter(file, dtype, width))
                return files[file]

            for p in range(self.parts):  # files of inner blocks without edges
                for name, (_, dtype) in {"indices": ("", index), **carried}.items():
                    out(self._edge_file(p, p, name), dtype)
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
                    if p == q:
                        low = int(row[0])  # rows come in ascending order
                        self.inner_degree[p][low : int(row[-1]) + 1] += np.bincount(row - low)
                        out(self._edge_file(p, p, "indices"), index).write(src)
                    else:
                        out(self._scratch(p, q), np.int32, (2,)).write(np.stack([row, src], axis=1))
                    for name, (kind, dtype) in carried.items():
                        rows = chosen + edges.first if kind == "ids" else edges.values[kind][chosen]
                        out(self._edge_file(p, q, name), dtype).write(rows)
        for p, degree in enumerate(self.inner_degree):
            self._save_rows(p, "inner", degree, self.inner_type, compress=False)

    @property
    def _of_edges(self) -> dict[str, tuple[str, np.dtype]]:
        """Per-edge values of a block: name of the file -> kind, dtype."""
        ids = {"edge_ids": ("ids", np.dtype(np.int64))} if self.with_ids else {}
        carried = self.graph.carried
        return ids | {f"{kind}s": (kind, carried[kind].dtype) for kind in ("weight", "type") if kind in carried}

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
            halo = [np.zeros(0, dtype=np.int64)]
            for q in range(self.parts):
                if p != q and self.num_edges[p, q]:
                    self.on_progress("halo blocks", (p * self.parts + q) / self.parts**2)
                    halo.append(self.node_ids[q][self._halo(p, q)])
                    np.save(self.file(p, f"halo-{q}.src_ids"), halo[-1])
            ids = np.concatenate(halo)
            np.save(self.file(p, "halo_in_degree"), degree[ids])
            if weight is not None:
                np.save(self.file(p, "halo_in_weight"), weight[ids])

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


def _facts(file: Path) -> FileFacts:
    with file.open("rb") as written:
        os.fsync(written.fileno())
    column = Column(file)
    return FileFacts(shape=column.shape, dtype=column.dtype.str, nbytes=file.stat().st_size, sha256=file_hash(file))


def open_part(folder: Path, manifest: Manifest, part: int, *, edge_ids: bool = False, check: Check = "full") -> Shard:
    """Return the mapped shard of a part. Raises ValueError for a missing or damaged file, or one of another shape."""
    files = manifest.of_part(part)
    for name, facts in files.items():
        verify(folder, f"{folder_of(part)}/{name}", facts, check)
    with clear(folder / folder_of(part)):
        return _Part(folder / folder_of(part), files, manifest, part, edge_ids).shard()


def in_degrees(folder: Path, manifest: Manifest, part: int) -> Tensor:
    """Return the mapped in-degrees of a part's nodes, [n]."""
    with clear(folder / folder_of(part)):
        files = _Part(folder / folder_of(part), manifest.of_part(part), manifest, part, edge_ids=False)
        found = files.array("in_degree", torch.float32)
        if len(found) and not 0 <= float(found.min()) <= float(found.max()) <= manifest.num_edges:
            raise ValueError(f"in_degree goes from {float(found.min()):g} to {float(found.max()):g}")
        return found


class _Part:
    """The files of one part."""

    def __init__(
        self, folder: Path, files: Mapping[str, FileFacts], manifest: Manifest, part: int, edge_ids: bool
    ) -> None:
        self.folder, self.files, self.manifest, self.part = folder, files, manifest, part
        self.edge_ids = edge_ids

    def shard(self) -> Shard:
        manifest = self.manifest
        ids = self.index("node_ids", manifest.num_nodes)
        count = len(ids)
        labels = (count, manifest.num_classes) if manifest.task in MATRICES else (count,)
        train, val, test = (self.array(name, torch.bool, (count,)) for name in MASKS)
        halo = {q: self.block(f"halo-{q}", count) for q in self.peers("halo", ".indptr")}
        halo_rows = sum(block.num_src for block in halo.values())
        inner = self.block("inner", count, ids)
        num_edges = inner.num_edges + sum(block.num_edges for block in halo.values())
        in_weight = self.array("in_weight", torch.float64, (count,)) if "in_weight.npy" in self.files else None
        return Shard(
            part=self.part,
            parts=manifest.parts,
            node_ids=ids,
            x=self.array("x", self.real("x"), (count, manifest.num_features)),
            y=self.array("y", self.real("y") if manifest.task in MATRICES else torch.int64, labels),
            train_mask=train,
            val_mask=val,
            test_mask=test,
            in_degree=self.array("in_degree", torch.float32, (count,)),
            inner=inner,
            halo=halo,
            boundary={q: self.index(f"boundary-{q}", count) for q in self.peers("boundary", "")},
            halo_in_degree=self.array("halo_in_degree", torch.float32, (halo_rows,)),
            num_nodes=manifest.num_nodes,
            num_train=manifest.num_train,
            num_classes=manifest.num_classes,
            num_edges=manifest.num_edges,
            in_weight=in_weight,
            halo_in_weight=None if in_weight is None else self.array("halo_in_weight", torch.float64, (halo_rows,)),
            type_degree=degrees_by_type([inner, *halo.values()], manifest.edge_types).float()
            if manifest.edge_types
            else None,
            edge_attr=self.array("edge_attr", self.real("edge_attr"), (num_edges, manifest.edge_attr))
            if manifest.edge_attr
            else None,
            edge_sizes=manifest.edge_sizes,
        )

    def peers(self, kind: str, ending: str) -> list[int]:
        """Return the parts in the names of files of a kind, ascending."""
        names = [n.removeprefix(f"{kind}-").removesuffix(f"{ending}.npy") for n in self.files if n.startswith(kind)]
        found = sorted(int(name) for name in names if name.isdecimal())
        if bad := [q for q in found if q == self.part or q >= self.manifest.parts]:
            raise ValueError(f"part {self.part} has a {kind} of part {bad[0]} of {self.manifest.parts}")
        return found

    def block(self, name: str, count: int, ids: Tensor | None = None) -> Block:
        ids = self.index(f"{name}.src_ids", self.manifest.num_nodes) if ids is None else ids
        rows = self.index(f"{name}.rows", count) if f"{name}.rows.npy" in self.files else None
        listed = self.files[f"{name}.indices.npy"]
        num_edges, dtype = listed.shape[0], torch.int32 if listed.dtype == "<i4" else torch.int64
        indptr = self.array(f"{name}.indptr", dtype, (count + 1 if rows is None else len(rows) + 1,))
        indices = self.array(f"{name}.indices", dtype, (num_edges,))
        edge_ids = self.array(f"{name}.edge_ids", torch.int64, (num_edges,)) if self.edge_ids else None
        if int(indptr[0]) or int(indptr[-1]) != num_edges or not ascends(indptr):
            raise ValueError(f"{name} lists {int(indptr[-1])} edges and holds {num_edges}")
        check_range(f"{name} reads rows", indices, len(ids))  # kernels read them without a check of bounds
        weighted = "in_weight.npy" in self.files
        weights = self.array(f"{name}.weights", self.real(f"{name}.weights"), (num_edges,)) if weighted else None
        types = self.array(f"{name}.types", torch.int64, (num_edges,)) if self.manifest.edge_types else None
        if types is not None:
            check_range(f"{name}.types go from", types, self.manifest.edge_types)
        return Block(indptr, indices, count, len(ids), rows, ids, EdgeData(edge_ids, weights, types))

    def index(self, name: str, limit: int) -> Tensor:
        """Return ascending ids in [0, limit)."""
        ids = self.array(name, torch.int64)
        if not ascends(ids, strictly=True):
            raise ValueError(f"{name} does not ascend")
        check_range(f"{name} goes from", ids, limit)
        return ids

    def real(self, name: str) -> torch.dtype:
        """Return the dtype of a floating-point file: float64 if precision=fp64 kept it, else float32."""
        return torch.float64 if self.files[f"{name}.npy"].dtype == "<f8" else torch.float32

    def array(self, name: str, dtype: torch.dtype, shape: tuple[int, ...] | None = None) -> Tensor:
        """Return a memory-mapped file. Raises ValueError if it has another dtype or shape."""
        listed = self.files[f"{name}.npy"].shape
        shape = (listed[0],) if shape is None else shape
        mapped = bool(listed) and 0 not in listed
        array = torch.from_numpy(load_npy(self.folder / f"{name}.npy", mapped=mapped))
        if tuple(array.shape) != shape or array.dtype != dtype or listed != shape:
            raise ValueError(f"{name} is {array.dtype} {list(array.shape)}, not {dtype} {list(shape)}")
        return array


def check_range(title: str, values: Tensor, limit: int) -> None:
    """Raise ValueError if a whole number is outside [0, limit)."""
    low, high = (int(v) for v in torch.aminmax(values)) if len(values) else (0, 0)
    if low < 0 or high >= max(1, limit):
        raise ValueError(f"{title} {low} to {high} of {limit}")


def ascends(values: Tensor, *, strictly: bool = False) -> bool:
    """Return True if values never decrease, or always increase (strictly)."""
    before, after = values[:-1], values[1:]
    return bool((after > before if strictly else after >= before).all())
