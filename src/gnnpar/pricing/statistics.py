"""Counts of a graph and its partitions, the input of the cost model.

`even` describes a graph by numbers only, for graphs and clusters that are not available.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache, partial

import torch
from torch import Tensor

from gnnpar.data.dataset import Dataset
from gnnpar.folds.cover import count_cover


@dataclass(frozen=True)
class GraphStats:
    """Counts of the whole graph. `train`: labelled nodes."""

    nodes: int
    edges: int
    features: int
    classes: int
    train: int

    @staticmethod
    def of(dataset: Dataset) -> GraphStats:
        train = int(dataset.train_mask.sum())
        return GraphStats(dataset.num_nodes, dataset.num_edges, dataset.num_features, dataset.num_classes, train)


@dataclass(frozen=True)
class PartStats:
    """By part: nodes, in-edges from inside, [p][q] in-edges of p from q, [p][q] halo rows that p reads from q.

    `cover`: (weights, types) -> `count_cover`, if the graph is available."""

    nodes: tuple[float, ...]
    inner: tuple[float, ...]
    cut: tuple[tuple[float, ...], ...]
    halo: tuple[tuple[float, ...], ...]
    cover: Callable[[tuple[int, int], int], Tensor] | None = field(default=None, compare=False, repr=False)

    @property
    def parts(self) -> int:
        return len(self.nodes)

    @property
    def alpha(self) -> float:
        """Return the halo rows of all parts over all nodes."""
        return self.copies / max(1.0, sum(self.nodes))

    @property
    def copies(self) -> float:
        """Return the halo rows of all parts."""
        return sum(map(sum, self.halo))

    def edges(self, p: int) -> float:
        return self.inner[p] + sum(self.cut[p])

    def sent(self, q: int) -> float:
        """Return the rows that part q sends in an exchange, each counted once per reader."""
        return sum(row[q] for row in self.halo)

    @staticmethod
    def of(edge_index: Tensor, part_of: Tensor, parts: int, edge_type: Tensor | None = None) -> PartStats:
        """Count a partition. Shapes: edge_index [2, E], part_of [N], edge_type [E]."""
        src, dst = edge_index
        count = len(part_of)
        pair = part_of[dst] * parts + part_of[src]
        edges = torch.bincount(pair, minlength=parts * parts).view(parts, parts)
        crossing = part_of[dst] != part_of[src]
        copies = torch.unique(part_of[dst[crossing]] * count + src[crossing])
        owner = part_of[copies % max(1, count)]
        halo = torch.bincount(copies // max(1, count) * parts + owner, minlength=parts * parts).view(parts, parts)
        nodes = torch.bincount(part_of, minlength=parts)
        inner = edges.diagonal().tolist()
        cut = edges - torch.diag(edges.diagonal())
        cover = cache(partial(count_cover, edge_index, part_of, parts, edge_type))
        return PartStats(tuple(nodes.tolist()), tuple(inner), as_table(cut), as_table(halo), cover)

    @staticmethod
    def even(nodes: float, edges: float, parts: int, *, alpha: float, cut_share: float) -> PartStats:
        """Return a partition into equal parts with equal pairs. `cut_share`: share of cut edges."""
        others = max(1, parts - 1)
        cut = edges * cut_share / parts / others if parts > 1 else 0.0
        halo = alpha * nodes / parts / others if parts > 1 else 0.0
        inner = edges * (1 - cut_share if parts > 1 else 1.0) / parts

        def matrix(value: float) -> tuple[tuple[float, ...], ...]:
            return tuple(tuple(0.0 if p == q else value for q in range(parts)) for p in range(parts))

        return PartStats((nodes / parts,) * parts, (inner,) * parts, matrix(cut), matrix(halo))

    def reshaped(self, shares: Sequence[float]) -> PartStats:
        """Return an estimate of the same partitioner's parts with these shares of the nodes. Edges and halos between
        two parts scale with the geometric mean of their shares; the number of edges is conserved. Make and count the
        real parts before choosing them."""
        total, factors = sum(self.nodes), [share * self.parts / sum(shares) for share in shares]
        inner = [value * f for value, f in zip(self.inner, factors, strict=True)]
        roots = [[(a * b) ** 0.5 for b in factors] for a in factors]
        cut, halo = (
            [[v * r for v, r in zip(row, root, strict=True)] for row, root in zip(table, roots, strict=True)]
            for table in (self.cut, self.halo)
        )
        edges = sum(self.inner) + sum(map(sum, self.cut))
        scale = edges / max(1.0, sum(inner) + sum(map(sum, cut)))
        nodes = tuple(total * f / self.parts for f in factors)
        cut = [[v * scale for v in row] for row in cut]
        return PartStats(nodes, tuple(v * scale for v in inner), tuple(map(tuple, cut)), tuple(map(tuple, halo)))


def as_table(counts: Tensor) -> tuple[tuple[float, ...], ...]:
    return tuple(tuple(map(float, row)) for row in counts.tolist())
