"""One rank's shard from the folder that `write.write_shards` made: every array a mapping of its file.

Mappings are private (copy on write): torch needs memory that it might write to, and no write reaches the file. Only
this rank's folder is opened; what is never touched is never in memory, and what was may be dropped by the kernel again.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

from gnnpar.data.columns import load_npy
from gnnpar.data.dataset import MATRICES
from gnnpar.data.raw import has_label
from gnnpar.folds.block import Block
from gnnpar.folds.edge_data import EdgeData
from gnnpar.partition.manifest import Check, FileFacts, Manifest, clear, folder_of, verify
from gnnpar.partition.shard import Shard, degrees_by_type

_ROWS_AT_ONCE = 1 << 16
_ROUNDING = 1e-9  # of sums in fp64 that add in another order


def open_part(folder: Path, manifest: Manifest, part: int, *, edge_ids: bool = False, check: Check = "full") -> Shard:
    """The shard of a part, mapped; ValueError in one line where a file is missing, damaged or contradicts the rest."""
    files = manifest.of_part(part)
    for name, facts in files.items():
        verify(folder, f"{folder_of(part)}/{name}", facts, check)
    with clear(folder / folder_of(part)):
        return _Part(folder / folder_of(part), files, manifest, part, edge_ids, check).shard()


def in_degrees(folder: Path, manifest: Manifest, part: int) -> Tensor:
    """Of a part's nodes, mapped, as they are before `open_part` compares them with the edges. Shapes: -> [n]."""
    with clear(folder / folder_of(part)):
        files = _Part(folder / folder_of(part), manifest.of_part(part), manifest, part, edge_ids=False, check="header")
        found = files.array("in_degree", torch.float32)
        if len(found) and not 0 <= float(found.min()) <= float(found.max()) <= manifest.num_edges:
            raise ValueError(f"in_degree goes from {float(found.min()):g} to {float(found.max()):g}")
        return found


class _Part:
    """The files of one part."""

    def __init__(
        self, folder: Path, files: Mapping[str, FileFacts], manifest: Manifest, part: int, edge_ids: bool, check: Check
    ) -> None:
        self.folder, self.files, self.manifest, self.part = folder, files, manifest, part
        self.edge_ids, self.check = edge_ids, check

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
        in_degree = self.array("in_degree", torch.float32, (count,))
        check_degrees(in_degree, [inner, *halo.values()])
        in_weight = self.finite("in_weight", torch.float64, count) if "in_weight.npy" in self.files else None
        if in_weight is not None and self.check == "full":
            check_weights(in_weight, [inner, *halo.values()])
        if self.edge_ids and self.check == "full":
            check_edge_ids([inner, *halo.values()], manifest.num_edges)
        y = self.array("y", self.real("y") if manifest.task in MATRICES else torch.int64, labels)
        self.check_labels(y, {"train_mask": train, "val_mask": val, "test_mask": test})
        return Shard(
            part=self.part,
            parts=manifest.parts,
            node_ids=ids,
            x=self.array("x", self.real("x"), (count, manifest.num_features)),
            y=y,
            train_mask=train,
            val_mask=val,
            test_mask=test,
            in_degree=in_degree,
            inner=inner,
            halo=halo,
            boundary={q: self.index(f"boundary-{q}", count) for q in self.peers("boundary", "")},
            halo_in_degree=self.array("halo_in_degree", torch.float32, (halo_rows,)),
            num_nodes=manifest.num_nodes,
            num_train=manifest.num_train,
            num_classes=manifest.num_classes,
            num_edges=manifest.num_edges,
            in_weight=in_weight,
            halo_in_weight=None if in_weight is None else self.finite("halo_in_weight", torch.float64, halo_rows),
            type_degree=degrees_by_type([inner, *halo.values()], manifest.edge_types).float()
            if manifest.edge_types
            else None,
            edge_attr=self.finite("edge_attr", self.real("edge_attr"), num_edges, manifest.edge_attr)
            if manifest.edge_attr
            else None,
            edge_sizes=manifest.edge_sizes,
        )

    def peers(self, kind: str, ending: str) -> list[int]:
        """Parts that a file is named after, ascending."""
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
        if num_edges:  # kernels read where they say: in every check
            low, high = (int(v) for v in torch.aminmax(indices))
            if low < 0 or high >= len(ids):
                raise ValueError(f"{name} reads rows {low} to {high} of {len(ids)}")
        weighted = "in_weight.npy" in self.files
        weights = self.finite(f"{name}.weights", self.real(f"{name}.weights"), num_edges) if weighted else None
        types = self.types(f"{name}.types", num_edges) if self.manifest.edge_types else None
        return Block(indptr, indices, count, len(ids), rows, ids, EdgeData(edge_ids, weights, types))

    def check_labels(self, y: Tensor, masks: Mapping[str, Tensor]) -> None:
        """Class ids below num_classes, labels of 0 and 1, finite targets, and one for every node that a mask names."""
        if not len(y):
            return
        if self.manifest.task not in MATRICES:
            low, high = (int(v) for v in torch.aminmax(y))
            if low < -1 or high >= self.manifest.num_classes:
                raise ValueError(f"y goes from {low} to {high} of {self.manifest.num_classes} classes")
        elif self.manifest.task == "multi_label":
            if not bool(((y == 0) | (y == 1) | torch.isnan(y)).all()):
                raise ValueError("y has labels that are neither 0 nor 1")
        elif bool(torch.isinf(y).any()):
            raise ValueError("y has targets that are not finite")
        labelled = has_label(y, self.manifest.task)
        for name, mask in masks.items():
            if self.manifest.task not in MATRICES and bool((mask & ~labelled).any()):
                raise ValueError(f"{name} names nodes without a label")

    def index(self, name: str, limit: int) -> Tensor:
        """Ids in ascending order, which lie in [0, limit)."""
        ids = self.array(name, torch.int64)
        if not ascends(ids, strictly=True):
            raise ValueError(f"{name} does not ascend")
        if len(ids) and not 0 <= int(ids[0]) <= int(ids[-1]) < limit:
            raise ValueError(f"{name} goes from {int(ids[0])} to {int(ids[-1])} of {limit}")
        return ids

    def types(self, name: str, count: int) -> Tensor:
        """Types of edges; ValueError if one is out of range."""
        types = self.array(name, torch.int64, (count,))
        if count:
            low, high = (int(v) for v in torch.aminmax(types))
            if low < 0 or high >= self.manifest.edge_types:
                raise ValueError(f"{name} goes from {low} to {high} of {self.manifest.edge_types} types")
        return types

    def real(self, name: str) -> torch.dtype:
        """The type of a file of numbers: float64 where precision=fp64 has kept it, else float32."""
        return torch.float64 if self.files[f"{name}.npy"].dtype == "<f8" else torch.float32

    def finite(self, name: str, dtype: torch.dtype, *shape: int) -> Tensor:
        """Numbers; where their bytes are read for their checksum, ValueError if one is not finite."""
        values = self.array(name, dtype, shape)
        if self.check == "full" and not bool(torch.isfinite(values).all()):
            raise ValueError(f"{name} holds numbers that are not finite")
        return values

    def array(self, name: str, dtype: torch.dtype, shape: tuple[int, ...] | None = None) -> Tensor:
        """A mapped file; ValueError where it is not of this type and shape."""
        listed = self.files[f"{name}.npy"].shape
        shape = (listed[0],) if shape is None else shape
        mapped = bool(listed) and 0 not in listed
        array = torch.from_numpy(load_npy(self.folder / f"{name}.npy", mapped=mapped))
        if tuple(array.shape) != shape or array.dtype != dtype or listed != shape:
            raise ValueError(f"{name} is {array.dtype} {list(array.shape)}, not {dtype} {list(shape)}")
        return array


def ascends(values: Tensor, *, strictly: bool = False) -> bool:
    """Whether no value is below the one before it, or strictly, none is equal to it either."""
    before, after = values[:-1], values[1:]
    return bool((after > before if strictly else after >= before).all())


def check_degrees(in_degree: Tensor, blocks: Sequence[Block]) -> None:
    """ValueError where the degrees of a part's nodes are not those of its edges, which are all of their in-edges."""
    counted = torch.zeros(len(in_degree), dtype=torch.int64)
    for block in blocks:
        rows, degrees = block.rows, block.indptr.diff().long()
        counted += degrees if rows is None else torch.zeros_like(counted).index_add_(0, rows, degrees)
    if bad := (counted.to(in_degree.dtype) != in_degree).nonzero().flatten().tolist():
        node = bad[0]
        raise ValueError(f"in_degree of row {node} is {float(in_degree[node]):g}, its edges are {int(counted[node])}")


def check_edge_ids(blocks: Sequence[Block], num_edges: int) -> None:
    """ValueError where two in-edges of a part are the same edge, or one is none of the graph's."""
    ids = torch.cat([block.edge_ids for block in blocks if block.edge_ids is not None]).sort().values
    if not ascends(ids, strictly=True):
        raise ValueError("edge_ids name an edge twice")
    if len(ids) and not 0 <= int(ids[0]) <= int(ids[-1]) < num_edges:
        raise ValueError(f"edge_ids go from {int(ids[0])} to {int(ids[-1])} of {num_edges}")


def check_weights(in_weight: Tensor, blocks: Sequence[Block]) -> None:
    """ValueError where the sums of the weights of a part's in-edges are not those of its edges, but for rounding."""
    total, size = torch.zeros_like(in_weight), torch.zeros_like(in_weight)
    for block in blocks:
        assert block.weights is not None
        rows = torch.arange(block.num_dst) if block.rows is None else block.rows
        for first in range(0, len(rows), _ROWS_AT_ONCE):
            ends = block.indptr[first : first + _ROWS_AT_ONCE + 1].long()
            weights = block.weights[int(ends[0]) : int(ends[-1])].double()
            into = rows[first : first + _ROWS_AT_ONCE].repeat_interleave(ends.diff())
            total.index_add_(0, into, weights)
            size.index_add_(0, into, weights.abs())
    if bad := ((total - in_weight).abs() > _ROUNDING * size).nonzero().flatten().tolist():
        row = bad[0]
        raise ValueError(
            f"in_weight of row {row} is {float(in_weight[row]):g}, its edges sum up to {float(total[row]):g}"
        )
