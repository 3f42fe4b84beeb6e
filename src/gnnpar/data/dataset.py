"""Dataset: a graph after preprocessing and before partitioning. `in_degree` is global: it is counted here and sent with
the rows, so that ranks do not normalise by local degrees."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor

from gnnpar.folds.edge_data import EdgeData, EdgeSizes, Schema, degree_histogram

if TYPE_CHECKING:
    from gnnpar.data.links import Pairs

TaskName = Literal["single_label", "binary", "multi_label", "regression", "link"]
MATRICES: frozenset[TaskName] = frozenset({"multi_label", "regression"})  # labels are rows [C]

NO_FEATURES = "the graph has no features: features=learned gives each node a vector to train"
_HASH_ROWS = 1 << 20


class Learned(NamedTuple):
    """Trained vectors of nodes, in addition to x: their width, and the seed of their initial values."""

    width: int
    seed: int


class EdgeChanges(NamedTuple):
    """Counts of edges that preprocessing added or removed."""

    self_loops_added: int = 0
    self_loops_removed: int = 0
    repeated_edges_dropped: int = 0  # 0 if the reverse of every edge was added


@dataclass(frozen=True, eq=False, kw_only=True)
class Dataset:
    """A whole graph with features, labels and a split.

    Shapes: N nodes, E edges, F features, C classes or targets. Edge j -> i is column (j, i) of `edge_index`; columns
    are sorted by (destination, source), and an edge's id is its position in that order. y: [N] int64 (single_label,
    binary; -1 = unlabelled) or [N, C] float32 (multi_label, regression; nan = unknown, a row of nan = unlabelled).
    Unlabelled nodes are in no split. pairs: for link prediction, which reads neither y nor masks. With precision=fp64,
    float64 x, targets, weights and attributes stay float64. rounded: they were rounded to float32.
    """

    name: str
    x: Tensor  # [N, F] float32
    y: Tensor
    edge_index: Tensor  # [2, E] int64; row 0 sources, row 1 destinations
    in_degree: Tensor  # [N] int64, self loops included
    train_mask: Tensor  # [N] bool
    val_mask: Tensor  # [N] bool
    test_mask: Tensor  # [N] bool
    num_classes: int
    task: TaskName
    graph_hash: str  # sha256 of edges, features, labels, weights, types and attributes of edges if any, task
    split_hash: str  # sha256 of the three masks
    edges: EdgeData = field(default_factory=EdgeData)  # weight [E] float32, type [E] int64, attr [E, D] float32
    edge_sizes: EdgeSizes = EdgeSizes()
    in_weight: Tensor | None = None  # [N] float64, sums of the weights of in-edges
    pairs: Pairs | None = None
    edge_changes: EdgeChanges = EdgeChanges()
    learned: Learned | None = None
    rounded: bool = False

    @property
    def num_nodes(self) -> int:
        return self.x.shape[0]

    @property
    def num_edges(self) -> int:
        return self.edge_index.shape[1]

    @property
    def num_features(self) -> int:
        return self.x.shape[1] + (self.learned.width if self.learned else 0)

    def with_features(self, how: Literal["given", "learned", "both"], width: int, seed: int) -> Dataset:
        """Return the dataset with learned vectors instead of x, or in addition (both). ValueError without either."""
        if how != "learned" and not self.num_features:
            raise ValueError(f"dataset {self.name}: {NO_FEATURES}")
        if how == "given":
            return self
        if self.edge_sizes.schema is not None:
            raise ValueError(f"features={how}: types of nodes have features of their own widths; set features=given")
        x = self.x[:, :0] if how == "learned" else self.x
        return replace(self, x=x, learned=Learned(width, seed))

    @classmethod
    def of(
        cls,
        name: str,
        *,
        x: Tensor,
        y: Tensor,
        edge_index: Tensor,
        masks: tuple[Tensor, Tensor, Tensor],
        num_classes: int,
        task: TaskName,
        edges: EdgeData | None = None,
        num_edge_types: int | None = None,
        schema: Schema | None = None,
        edge_changes: EdgeChanges = EdgeChanges(),
    ) -> Dataset:
        """Count degrees and hash contents of preprocessed tensors (edges sorted, multi-edges allowed).

        Shapes: x [N, F], y [N] or [N, C], edge_index [2, E], masks 3 x [N]. edges: data of the E edges. num_edge_types:
        needed if some types have no edge. schema: of a HeteroData.
        """
        num_nodes = x.shape[0]
        src, dst = edge_index
        assert edge_index.dtype == torch.int64
        assert x.dtype in (torch.float32, torch.float64)
        edges = edges or EdgeData()
        assert all(len(t) == edge_index.shape[1] for t in edges.tensors.values())
        if edge_index.shape[1] > 1:
            key = dst * num_nodes + src
            assert bool((key[1:] >= key[:-1]).all()), "edges must be sorted by (destination, source)"
        in_degree, in_weight, types = torch.bincount(dst, minlength=num_nodes), None, 0
        if edges.weight is not None:  # in the order of the edges
            weights = edges.weight.double().numpy()
            in_weight = torch.from_numpy(np.bincount(dst.numpy(), weights=weights, minlength=num_nodes))
        if edges.type is not None:
            types = max(num_edge_types or 1, int(edges.type.max()) + 1 if len(edges.type) else 1)
        width = 0 if edges.attr is None else edges.attr.shape[1]
        return cls(
            name=name,
            x=x,
            y=y,
            edge_index=edge_index,
            in_degree=in_degree,
            train_mask=masks[0],
            val_mask=masks[1],
            test_mask=masks[2],
            num_classes=num_classes,
            task=task,
            edges=edges,
            edge_sizes=EdgeSizes(types, width, degree_histogram(in_degree), schema, bool((src == dst).any())),
            in_weight=in_weight,
            graph_hash=content_hash((edge_index, x, y, *edges.tensors.values()), label=f"{task}/{num_classes}"),
            split_hash=content_hash(masks, label="split"),
            edge_changes=edge_changes,
        )


def content_hash(tensors: Iterable[Tensor], *, label: str) -> str:
    """Return the sha256 over dtype, shape and bytes of each tensor, in order."""
    digest = hashlib.sha256(label.encode())
    for tensor in tensors:
        digest.update(f"|{tensor.dtype}{tuple(tensor.shape)}|".encode())
        array = np.ascontiguousarray(tensor.detach().cpu().numpy())
        for start in range(0, max(len(array), 1), _HASH_ROWS):
            digest.update(np.ascontiguousarray(array[start : start + _HASH_ROWS]).data)
    return digest.hexdigest()
