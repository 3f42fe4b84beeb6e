"""Open one rank's shard from a folder of `write.write_shards`, with every array memory-mapped from its file.

Mappings are private (copy on write), since torch needs writable memory; no write reaches the file. Only this rank's
folder is opened, and pages are read on use.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from gnnpar.data.columns import load_npy
from gnnpar.data.dataset import MATRICES
from gnnpar.folds.block import Block
from gnnpar.folds.edge_data import EdgeData
from gnnpar.partition.manifest import Check, FileFacts, Manifest, clear, folder_of, verify
from gnnpar.partition.shard import Shard, degrees_by_type


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
        train, val, test = (self.array(f"{name}_mask", torch.bool, (count,)) for name in ("train", "val", "test"))
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
        if num_edges:  # kernels read these indices without a check of bounds
            low, high = (int(v) for v in torch.aminmax(indices))
            if low < 0 or high >= len(ids):
                raise ValueError(f"{name} reads rows {low} to {high} of {len(ids)}")
        weighted = "in_weight.npy" in self.files
        weights = self.array(f"{name}.weights", self.real(f"{name}.weights"), (num_edges,)) if weighted else None
        types = self.types(f"{name}.types", num_edges) if self.manifest.edge_types else None
        return Block(indptr, indices, count, len(ids), rows, ids, EdgeData(edge_ids, weights, types))

    def index(self, name: str, limit: int) -> Tensor:
        """Return ascending ids in [0, limit)."""
        ids = self.array(name, torch.int64)
        if not ascends(ids, strictly=True):
            raise ValueError(f"{name} does not ascend")
        if len(ids) and not 0 <= int(ids[0]) <= int(ids[-1]) < limit:
            raise ValueError(f"{name} goes from {int(ids[0])} to {int(ids[-1])} of {limit}")
        return ids

    def types(self, name: str, count: int) -> Tensor:
        """Return types of edges. Raises ValueError if one is out of range."""
        types = self.array(name, torch.int64, (count,))
        if count:
            low, high = (int(v) for v in torch.aminmax(types))
            if low < 0 or high >= self.manifest.edge_types:
                raise ValueError(f"{name} goes from {low} to {high} of {self.manifest.edge_types} types")
        return types

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


def ascends(values: Tensor, *, strictly: bool = False) -> bool:
    """Return True if values never decrease, or always increase (strictly)."""
    before, after = values[:-1], values[1:]
    return bool((after > before if strictly else after >= before).all())
