"""A graph of any size: a folder of .npy files, `dataset=folder dataset.path=my_graph`.

| file | shape | meaning |
|---|---|---|
| `src.npy`, `dst.npy` | [E] integers | edges in any order; dataset.symmetrize=true adds the reverse ones |
| or `indptr.npy`, `indices.npy` | [N + 1], [E] integers | CSR: row i has sources `indices[indptr[i]:indptr[i + 1]]` |
| `x.npy`, `y.npy`, `edge_weight.npy`, ... | | each key of an .npz file (`gnnpar.data.npz`), masks [N] or [N, S] |

All files are written by numpy.save in C order. `gnnpar train` reads the folder as any dataset; `gnnpar partition`
passes through it in chunks (`stored`), with labels, masks and a few integers per node in memory, not features or edges.
Both give the same graph, bit for bit.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Annotated

import numpy as np
import torch
from annotated_types import Ge
from torch import Tensor

from gnnpar.data.columns import Column, tensor_of
from gnnpar.data.dataset import Dataset
from gnnpar.data.files import find_path
from gnnpar.data.preprocess import Preprocess, prepare
from gnnpar.data.raw import MASKS, RawGraph, TaskChoice, refuse_unread
from gnnpar.data.stored import CHUNK_EDGES, EdgeChunk, OnProgress, PreparedRows, Stored, no_progress, streamed
from gnnpar.files import require_memory
from gnnpar.folds.edge_data import EDGE_KINDS


@dataclass(frozen=True, kw_only=True)
class Folder(Preprocess):
    """A graph in a folder of .npy files; `path` is relative to the working folder or to data_dir.

    num_classes: null counts the classes in y.
    """

    name: str = "folder"
    path: str | None = None
    task: TaskChoice = "auto"  # multi_label if y is [N, C > 1]
    num_classes: Annotated[int, Ge(2)] | None = None

    def load(self, data_dir: Path | None, seed: int) -> Dataset:
        files = _Files.find(self, data_dir)
        nbytes = 4 * math.prod(files.x.shape) + 16 * files.num_edges
        nbytes += sum(column.dtype.itemsize * math.prod(column.shape) for column in files.of_edges.values())
        require_memory(nbytes, files.title(self), "cut it with gnnpar partition, which passes through it in chunks")
        ((src, dst, values),) = files.edges(limit=max(1, files.num_edges))
        edge_index = torch.from_numpy(np.stack([src, dst]))
        edges = {f"edge_{kind}": torch.from_numpy(value) for kind, value in values.items()}
        return prepare(files.raw(self, _tensor(files.x), edge_index, edges), self, seed=seed)

    def stored(self, data_dir: Path | None, seed: int, scratch: Path, on_progress: OnProgress = no_progress) -> Stored:
        """Return the graph, its edges in canonical order in `scratch`."""
        files = _Files.find(self, data_dir)
        num_nodes = len(files.x)
        raw = files.raw(self, torch.zeros(num_nodes, 1), torch.zeros(2, 0, dtype=torch.int64))
        numbers = (files.x, *files.of_edges.values(), *([files.y] if raw.task == "regression" else []))
        return streamed(
            PreparedRows(self, self.name, files.x.shape, partial(_tensor, files.x)),
            lambda: raw,
            files.edges,
            scratch,
            seed=seed,
            num_edges=files.num_edges,
            carried=files.carried,
            rounded=self.rounds(file.dtype == np.float64 for file in numbers),
            title=files.title(self),
            remedy="name another place by out=",
            on_progress=on_progress,
        )


@dataclass(frozen=True, eq=False)
class _Files:
    """Files of a folder, with checked shapes. coo: `ends` are destinations, else row pointers of CSR edges."""

    x: Column
    y: Column
    src: Column
    ends: Column
    coo: bool
    masks: dict[str, Column]
    of_edges: dict[str, Column]

    @property
    def num_edges(self) -> int:
        return len(self.src)

    @cached_property
    def carried(self) -> dict[str, Column]:
        """Edge data, without weights that are all 1."""
        weight = self.of_edges.get("weight")
        chunks = range(0, self.num_edges, CHUNK_EDGES)
        plain = weight is None or not any(bool((weight[at : at + CHUNK_EDGES] != 1).any()) for at in chunks)
        return {kind: column for kind, column in self.of_edges.items() if not (kind == "weight" and plain)}

    def title(self, config: Folder) -> str:
        return f"dataset {config.name} of {len(self.x):,} nodes and {self.num_edges:,} edges"

    @staticmethod
    def find(config: Folder, data_dir: Path | None) -> _Files:
        example = "dataset=folder dataset.path=my_graph"
        folder = find_path(config.name, config.path, data_dir, example=example, kind="folder")
        there = {file.stem: file for file in folder.glob("*.npy")}
        refuse_unread(config.name, sorted(there))
        coo = "src" in there
        if coo and "indices" in there:
            raise ValueError(
                f"dataset {config.name}: edges are src and dst, or indices and indptr; remove indices.npy."
            )
        edges = ("src", "dst") if coo else ("indices", "indptr")
        if missing := [name for name in ("x", "y", *edges) if name not in there]:
            held = ", ".join(sorted(there)) or "nothing"
            raise ValueError(f"dataset {config.name}: {folder} has no {missing[0]}.npy (it holds {held}); add it.")
        opened = {name: Column(file) for name, file in there.items() if name in _KNOWN}
        rows = sum(there[name].stat().st_size for name in opened if name == "y" or name.endswith("_mask"))
        require_memory(rows, f"dataset {config.name}: its labels and masks", "store one of each a node")
        src, ends = opened[edges[0]], opened[edges[1]]
        for name in edges:
            if opened[name].dtype.kind not in "iu" or len(opened[name].shape) != 1:
                raise ValueError(f"dataset {config.name}: {there[name]} must be integers in one row; store node ids.")
        if len(opened["x"].shape) != 2 or opened["x"].dtype.kind not in "biuf":
            raise ValueError(f"dataset {config.name}: {there['x']} must be numbers, [nodes, features].")
        if len(ends) != (wanted := len(src) if coo else len(opened["x"]) + 1):
            raise ValueError(
                f"dataset {config.name}: {edges[1]}.npy has {len(ends)} entries, but {wanted} are needed; write them "
                "together."
            )
        masks = {name: column for name, column in opened.items() if name.endswith("_mask")}
        of_edges: dict[str, Column] = {kind: opened[f"edge_{kind}"] for kind in EDGE_KINDS if f"edge_{kind}" in opened}
        for kind, column in of_edges.items():
            kinds, wanted = ("iu", "integer") if kind == "type" else ("biuf", "row" if kind == "attr" else "number")
            shape = (len(src), *column.shape[1:2]) if kind == "attr" and len(column.shape) > 1 else (len(src),)
            if column.dtype.kind not in kinds or column.shape != shape or (kind == "attr" and len(shape) != 2):
                raise ValueError(
                    f"dataset {config.name}: {column.file} is {column.dtype} {list(column.shape)}, but it must be one "
                    f"{wanted} an edge, [{len(src)}{', width' if kind == 'attr' else ''}]."
                )
        return _Files(opened["x"], opened["y"], src, ends, coo, masks, of_edges)

    def edges(self, limit: int | None = None) -> Iterator[EdgeChunk]:
        """Yield (sources, destinations, edge data) in the order of the file; at least one chunk, which may be empty.
        Ids are int64, data is of the dtypes of the files. limit: edges of a chunk."""
        limit, num_edges = limit or CHUNK_EDGES, self.num_edges
        pointers = np.zeros(0) if self.coo else self.ends[0 : len(self.ends)].astype(np.int64)
        if not self.coo and (pointers[0] != 0 or pointers[-1] != num_edges or bool((np.diff(pointers) < 0).any())):
            raise ValueError(f"{self.ends.file} does not rise from 0 to {num_edges}")
        for first in range(0, max(1, num_edges), limit):
            span = slice(first, first + limit)
            src = self.src[span].astype(np.int64)
            values = {kind: column[span] for kind, column in self.carried.items()}
            if self.coo:
                yield src, self.ends[span].astype(np.int64), values
            else:
                yield src, np.searchsorted(pointers, np.arange(first, first + len(src)), side="right") - 1, values

    def raw(self, config: Folder, x: Tensor, edge_index: Tensor, edges: Mapping[str, Tensor] | None = None) -> RawGraph:
        rows = {"x": x, "edge_index": edge_index, **(edges or {})}
        rows |= {key: _tensor(column) for key, column in {"y": self.y, **self.masks}.items()}
        raw = RawGraph.of(config.name, rows, config.task)
        return replace(raw, num_classes=config.num_classes if raw.task == "single_label" else None)


_KNOWN = {"src", "dst", "indptr", "indices", "x", "y", *MASKS, *(f"edge_{kind}" for kind in EDGE_KINDS)}


def _tensor(column: Column, rows: slice = slice(None)) -> Tensor:
    return tensor_of(column[rows], str(column.file))
