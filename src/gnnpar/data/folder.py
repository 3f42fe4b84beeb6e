"""A graph of any size: a folder of .npy files, `dataset=folder dataset.path=my_graph`.

| file | shape | meaning |
|---|---|---|
| `src.npy`, `dst.npy` | [E] integers | edges in any order; dataset.symmetrize=true adds the reverse ones |
| or `indptr.npy`, `indices.npy` | [N + 1], [E] integers | CSR: row i has sources `indices[indptr[i]:indptr[i + 1]]` |
| `edge_weight.npy` | [E] numbers | optional: weights, in the order of the edges |
| `edge_type.npy` | [E] integers | optional: types 0, 1, 2, ... |
| `edge_attr.npy` | [E, D] numbers | optional: a row of attributes per edge |
| `x.npy` | [N, F] numbers | features |
| `y.npy` | [N] class ids, or [N, C] of 0/1 (multi-label) | labels; -1 or NaN = unlabelled |
| `{train,val,test}_mask.npy` | [N] or [N, S] booleans | optional, else split=random or per_class |

All files are written by numpy.save in C order. `gnnpar train` reads the folder as any dataset; `gnnpar partition`
passes through it in chunks (`stored`), with labels, masks and a few integers per node in memory, not features or edges.
Both give the same graph, bit for bit.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Annotated

import numpy as np
import torch
from annotated_types import Ge
from torch import Tensor

from gnnpar.data.columns import Column, tensor_of
from gnnpar.data.dataset import Dataset
from gnnpar.data.external import BUCKET_EDGES, EDGE_TYPES, EdgeChunk, PreparedRows, streamed
from gnnpar.data.files import find_path
from gnnpar.data.preprocess import Preprocess, prepare
from gnnpar.data.raw import (
    RawGraph,
    TaskChoice,
    checked,
    is_wide,
    masks_of,
    refuse_unread,
    stored_as,
    task_of,
)
from gnnpar.data.stored import CHUNK_EDGES, OnProgress, Stored, no_progress
from gnnpar.files import require_disk, require_memory
from gnnpar.folds.edge_data import EDGE_KINDS, EdgeData


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
        size = f"dataset {self.name} of {len(files.x):,} nodes and {files.num_edges:,} edges"
        nbytes = 4 * len(files.x) * files.x.shape[1] + (16 + files.bytes_carried) * files.num_edges
        require_memory(nbytes, size, "cut it with gnnpar partition, which passes through it in chunks")
        chunks = list(files.edges())
        src, dst = np.concatenate([chunk[0] for chunk in chunks]), np.concatenate([chunk[1] for chunk in chunks])
        x = _tensor(files.x)
        edge_index = torch.from_numpy(np.stack([src, dst]))
        carried = EdgeData(
            **{kind: torch.from_numpy(np.concatenate([chunk[2][kind] for chunk in chunks])) for kind in chunks[0][2]}
        )
        return prepare(files.raw(self, x, edge_index, carried), self, seed=seed)

    def stored(self, data_dir: Path | None, seed: int, scratch: Path, on_progress: OnProgress = no_progress) -> Stored:
        """Return the graph, its edges in canonical order in `scratch`. Disk: 12 bytes per edge, 8 of them temporary."""
        files = _Files.find(self, data_dir)
        wide_x = is_wide(_tensor(files.x, slice(0)))
        x = PreparedRows(self, self.name, files.x.shape, partial(_tensor, files.x), wide=wide_x)
        num_nodes = len(files.x)
        what = f"dataset {self.name} of {num_nodes:,} nodes and {files.num_edges:,} edges"
        if "attr" in files.carried:  # sorted with the edges
            wide = 12 * files.carried["attr"].shape[1] * min(files.num_edges, BUCKET_EDGES)
            require_memory(wide, f"{what}, even in chunks,", "give fewer columns of attributes")
        nbytes = (12 + files.bytes_carried) * files.num_edges * (1 + self.symmetrize)
        require_disk(nbytes, scratch, f"{what}, while its edges are sorted,", "name another place by out=")
        wide = {kind for kind, column in files.carried.items() if self.double and is_wide(_tensor(column, slice(0)))}
        types = {**EDGE_TYPES, **dict.fromkeys(wide - {"type"}, np.float64)}
        empty = torch.zeros(num_nodes, 1), torch.zeros(2, 0, dtype=torch.int64)
        raw = checked(files.raw(self, *empty), double=self.double)
        numbers = (files.x, *files.of_edges.values(), *([files.y] if raw.task == "regression" else []))
        return streamed(
            self,
            raw,
            x,
            partial(files.edges, types, self.name),
            scratch,
            seed=seed,
            num_edges=files.num_edges,
            kinds={kind: np.dtype((types[kind], column.shape[1:])) for kind, column in files.carried.items()},
            rounded=self.rounds(file.dtype == np.float64 for file in numbers),
            on_progress=on_progress,
        )


@dataclass(frozen=True, eq=False)
class _Files:
    """Files of a folder, with checked shapes. `pointers`: row pointers of CSR edges."""

    x: Column
    y: Column
    src: Column
    dst: Column | None
    pointers: Column | None
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

    @property
    def bytes_carried(self) -> int:
        """Bytes of edge data per edge."""
        return sum(EDGE_TYPES[kind]().itemsize * math.prod(column.shape[1:]) for kind, column in self.of_edges.items())

    @staticmethod
    def find(config: Folder, data_dir: Path | None) -> _Files:
        example = "dataset=folder dataset.path=my_graph"
        folder = find_path(config.name, config.path, data_dir, example=example, kind="folder")
        there = {file.stem: file for file in folder.glob("*.npy")}
        refuse_unread(config.name, sorted(there))
        if both := [name for name in ("src", "indices") if name in there][1:]:
            raise ValueError(
                f"dataset {config.name}: edges are src and dst, or indices and indptr; remove {both[0]}.npy."
            )
        edges = ("src", "dst") if "src" in there else ("indices", "indptr")
        if missing := [name for name in ("x", "y", *edges) if name not in there]:
            held = ", ".join(sorted(there)) or "nothing"
            raise ValueError(f"dataset {config.name}: {folder} has no {missing[0]}.npy (it holds {held}); add it.")
        opened = {name: Column(file) for name, file in there.items() if name in _KNOWN}
        rows = sum(there[name].stat().st_size for name in opened if name == "y" or name.endswith("_mask"))
        require_memory(rows, f"dataset {config.name}: its labels and masks", "store one of each a node")
        src, second = opened[edges[0]], opened[edges[1]]
        for name in edges:
            if opened[name].dtype.kind not in "iu" or len(opened[name].shape) != 1:
                raise ValueError(f"dataset {config.name}: {there[name]} must be integers in one row; store node ids.")
        if len(opened["x"].shape) != 2 or opened["x"].dtype.kind not in "biuf":
            raise ValueError(f"dataset {config.name}: {there['x']} must be numbers, [nodes, features].")
        wanted = len(src) if edges[0] == "src" else len(opened["x"]) + 1
        if len(second) != wanted:
            raise ValueError(
                f"dataset {config.name}: {edges[1]}.npy has {len(second)} entries, but {wanted} are needed; write them "
                "together."
            )
        coo = edges[0] == "src"
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
        ends = (second, None) if coo else (None, second)
        return _Files(opened["x"], opened["y"], src, *ends, masks, of_edges)

    def edges(self, types: Mapping[str, type[np.generic]] | None = None, name: str = "") -> Iterator[EdgeChunk]:
        """Yield (sources, destinations, edge data) in the order of the file; at least one chunk, which may be empty.
        Ids are int64. types: dtypes of edge data, by default of the files."""
        pointers = None if self.pointers is None else self.pointers[0 : len(self.pointers)].astype(np.int64)
        if pointers is not None and (
            pointers[0] != 0 or pointers[-1] != len(self.src) or bool((np.diff(pointers) < 0).any())
        ):
            raise ValueError(f"{self.pointers and self.pointers.file} does not rise from 0 to {len(self.src)}")
        for first in range(0, max(1, len(self.src)), CHUNK_EDGES):
            src = self.src[first : first + CHUNK_EDGES].astype(np.int64)
            values = {kind: column[first : first + CHUNK_EDGES] for kind, column in self.carried.items()}
            if types is not None:
                if "attr" in values:
                    stored_as(
                        name, "edge_attr", tensor_of(values["attr"], "edge_attr"), double=types["attr"] is np.float64
                    )
                values = {kind: value.astype(types[kind]) for kind, value in values.items()}
            if pointers is None:
                assert self.dst is not None
                yield src, self.dst[first : first + CHUNK_EDGES].astype(np.int64), values
            else:
                yield src, np.searchsorted(pointers, np.arange(first, first + len(src)), side="right") - 1, values

    def raw(self, config: Folder, x: Tensor, edge_index: Tensor, edges: EdgeData | None = None) -> RawGraph:
        y = _tensor(self.y)
        task = task_of(y, config.task)
        return RawGraph(
            name=config.name,
            x=x,
            y=y,
            edge_index=edge_index,
            edges=edges or EdgeData(),
            task=task,
            masks=masks_of({name: _tensor(column) for name, column in self.masks.items()}),
            num_classes=config.num_classes if task == "single_label" else None,
        )


_KNOWN = {"src", "dst", "indptr", "indices", "x", "y", "train_mask", "val_mask", "test_mask"}
_KNOWN |= {f"edge_{kind}" for kind in EDGE_KINDS}


def _tensor(column: Column, rows: slice = slice(None)) -> Tensor:
    return tensor_of(column[rows], str(column.file))
