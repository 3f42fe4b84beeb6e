"""Streaming partitioners: place each node once, in order, by the parts of its in-neighbours.

LDG: Stanton and Kliot, Streaming Graph Partitioning for Large Distributed Graphs, KDD 2012: part i with the largest
|N(v) n P_i| (1 - |P_i| / C). Fennel: Tsourakakis, Gkantsidis, Radunovic, Vojnovic, FENNEL: Streaming Graph Partitioning
for Massive Scale Graphs, WSDM 2014: the largest |N(v) n P_i| - alpha gamma |P_i|^(gamma - 1), with gamma = 3/2 and
alpha = sqrt(k) m / n^(3/2). Nodes come in the order of their ids; memory is O(nodes) and one block of edges.

Deviations: `balance=edges` counts in-edges for the sizes; `passes` > 1 streams again with all neighbours known
(Nishimura and Ugander, KDD 2013); no part stays empty. Scores are whole numbers (Fennel's cost in 2^-20 of an edge,
rounded down by an exact square root), so rounding is equal on all machines. Ties go to the emptier part, then to the
lower number.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from math import isqrt
from typing import Annotated, Literal

import numpy as np
import torch
from annotated_types import Ge, Le
from torch import Tensor

from gnnpar.data.dataset import Dataset
from gnnpar.data.stored import Stored

BLOCK_NODES = 1 << 12
UNIT = 1 << 20  # one neighbour in Fennel's scores
Price = Callable[[int], int]  # function of the load of a part


@dataclass(frozen=True, kw_only=True)
class _Streamed(ABC):
    """Fields of streaming partitioners. slack: allowed excess of a part over its share. balance: quantity to balance.
    passes: number of passes over all nodes."""

    slack: Annotated[float, Ge(0)] = 0.05
    balance: Literal["nodes", "edges"] = "nodes"
    passes: Annotated[int, Ge(1), Le(1000)] = 1

    def part_of(self, dataset: Dataset | Stored, parts: int) -> Tensor:
        graph = dataset if isinstance(dataset, Stored) else Stored.of(dataset)
        weight = np.ones(graph.num_nodes, dtype=np.int64) if self.balance == "nodes" else np.diff(graph.indptr) + 1
        total = int(weight.sum())
        share = -(-total // parts)
        capacity = max(share, int(share * (1 + self.slack)))  # so that all nodes fit
        stream = _Stream(graph, parts, weight, capacity, *self._prices(graph, parts, total, capacity))
        for _ in range(self.passes):
            stream.run()
        return torch.from_numpy(stream.part).long()

    @abstractmethod
    def _prices(self, graph: Stored, parts: int, total: int, capacity: int) -> tuple[Price, Price]:
        """Return the factor of a neighbour in a part, and the cost of the part. total: weight of all nodes."""


@dataclass(frozen=True, kw_only=True)
class LDG(_Streamed):
    """Linear deterministic greedy."""

    def _prices(self, graph: Stored, parts: int, total: int, capacity: int) -> tuple[Price, Price]:
        return lambda load: capacity - load, lambda load: 0


@dataclass(frozen=True, kw_only=True)
class Fennel(_Streamed):
    """Greedy by the interpolated objective: cut edges plus alpha times the sizes to the power of 3/2."""

    slack: Annotated[float, Ge(0)] = 0.1

    def _prices(self, graph: Stored, parts: int, total: int, capacity: int) -> tuple[Price, Price]:
        loops = sum(int((edges.src == edges.dst).sum()) for edges in graph.edges())
        nodes, entries = graph.num_nodes, graph.num_edges - loops  # 2 m: every edge is counted from both ends
        scale, unit = 9 * entries**2 * UNIT**2 * parts, 16 * nodes**2 * total
        return lambda load: UNIT, lambda load: isqrt(scale * load // unit)


class _Stream:
    """Nodes placed so far. Neighbours outside a block are counted at once, neighbours inside it one by one."""

    def __init__(
        self, graph: Stored, parts: int, weight: np.ndarray, capacity: int, factor: Price, cost: Price
    ) -> None:
        self.graph, self.parts, self.weight, self.capacity = graph, parts, weight, capacity
        self.part = np.full(graph.num_nodes, -1, dtype=np.int32)
        self.load, self.size = [0] * parts, [0] * parts
        self.factor, self.cost = factor, cost

    def run(self) -> None:
        """Place every node once, in the order of ids."""
        num_nodes = self.graph.num_nodes
        for first in range(0, num_nodes, BLOCK_NODES):
            self._block(first, min(first + BLOCK_NODES, num_nodes))

    def _block(self, first: int, last: int) -> None:
        counts, successors = self._neighbours(first, last)
        weight, old = self.weight[first:last].tolist(), self.part[first:last].tolist()
        factors, costs = [self.factor(x) for x in self.load], [self.cost(x) for x in self.load]
        placed: list[int] = []
        for i, mine in enumerate(counts):
            old_part = old[i]
            if old_part >= 0:
                self._move(old_part, -weight[i], factors, costs)
            left = self.graph.num_nodes - first - i
            alone = old_part >= 0 and not self.size[old_part]  # the only node of its part
            chosen = old_part if alone else self._choose(mine, weight[i], left, factors, costs)
            self._move(chosen, weight[i], factors, costs)
            placed.append(chosen)
            if chosen != old_part:
                for j in successors.get(i, ()):
                    counts[j][chosen] += 1
                    if old_part >= 0:
                        counts[j][old_part] -= 1
        self.part[first:last] = placed

    def _move(self, part: int, weight: int, factors: list[int], costs: list[int]) -> None:
        self.load[part] += weight
        self.size[part] += 1 if weight > 0 else -1
        factors[part], costs[part] = self.factor(self.load[part]), self.cost(self.load[part])

    def _choose(self, counts: list[int], weight: int, left: int, factors: list[int], costs: list[int]) -> int:
        """Return the best part with room, else the emptiest; an empty part if it needs one of the last nodes."""
        load, size = self.load, self.size
        if left <= self.parts and left <= size.count(0):
            return size.index(0)
        best, best_score, room = -1, 0, self.capacity - weight
        for p in range(self.parts):
            if load[p] > room:
                continue
            score = counts[p] * factors[p] - costs[p]
            if best < 0 or score > best_score or (score == best_score and load[p] < load[best]):
                best, best_score = p, score
        return best if best >= 0 else load.index(min(load))

    def _neighbours(self, first: int, last: int) -> tuple[list[list[int]], dict[int, list[int]]]:
        """Return in-neighbours of a block's nodes by part, and node -> later nodes of the block that it points to."""
        ends = self.graph.indptr[first : last + 1]
        src = np.asarray(self.graph.indices[int(ends[0]) : int(ends[-1])])
        row = np.repeat(np.arange(last - first), np.diff(ends))
        part = self.part[src]
        known = (part >= 0) & (src != row + first)
        size = (last - first) * self.parts
        counts = np.bincount(row[known] * self.parts + part[known], minlength=size).reshape(-1, self.parts).tolist()
        successors: dict[int, list[int]] = {}
        inside = np.flatnonzero((src >= first) & (src < row + first))
        for s, r in zip((src[inside] - first).tolist(), row[inside].tolist(), strict=True):
            successors.setdefault(s, []).append(r)
        return counts, successors
