"""Recompute instead of communicate, decided exactly by a minimum cut. Source: TAG (arXiv 2302.06126), lossless gradient
aggregation.

Some operations may be duplicated: every replica runs them in full, which costs computing and saves the sum of what they
make. A tensor that feeds a duplicated operation from one that is not must be broadcast, once however many read it:

    min  sum_i w_i x_i  +  sum_t beta_t max over readers j of t of (x_j - x_producer)+

w_i = extra seconds of computing - seconds of communication saved, of either sign. It is a project selection: w > 0 is
an edge from i to the sink, w < 0 one from the source; a tensor has a node a_t with infinite edges from its readers, and
an edge of beta_t to its producer. The source's side of a minimum cut is duplicated.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Tensor:
    """What one operation makes for others. `producer` None: every replica has it anyway. `seconds`: to broadcast it."""

    producer: int | None
    readers: tuple[int, ...]
    seconds: float


@dataclass(frozen=True)
class Choice:
    """Operations to duplicate, and what that changes in seconds (<= 0)."""

    duplicated: frozenset[int]
    seconds: float


def duplicate(weights: Sequence[float], tensors: Sequence[Tensor], *, fixed: frozenset[int] = frozenset()) -> Choice:
    """The best set of operations. weights[i] as above; those in `fixed` cannot be duplicated."""
    _check(weights, tensors)
    source, sink = len(weights), len(weights) + 1
    network = _Network(len(weights) + 2 + len(tensors))
    for i, weight in enumerate(weights):
        if i in fixed:
            network.join(i, sink, float("inf"))
        elif weight > 0:
            network.join(i, sink, weight)
        elif weight < 0:
            network.join(source, i, -weight)
    for number, tensor in enumerate(tensors):
        if tensor.producer is None or tensor.seconds == 0:
            continue
        node = len(weights) + 2 + number
        for reader in tensor.readers:
            network.join(reader, node, float("inf"))
        network.join(node, tensor.producer, tensor.seconds)
    chosen = frozenset(i for i in network.source_side(source, sink) if i < len(weights))
    return Choice(chosen, cost(chosen, weights, tensors))


def cost(chosen: frozenset[int], weights: Sequence[float], tensors: Sequence[Tensor]) -> float:
    """The objective of a set."""
    total = sum(weights[i] for i in chosen)
    for t in tensors:
        if t.producer is not None and t.producer not in chosen and any(j in chosen for j in t.readers):
            total += t.seconds
    return total


def _check(weights: Sequence[float], tensors: Sequence[Tensor]) -> None:
    for t in tensors:
        if t.seconds < 0:
            raise ValueError(f"broadcasting the tensor of operation {t.producer} takes {t.seconds} s; it must be >= 0")
        for i in (*t.readers, *(() if t.producer is None else (t.producer,))):
            if not 0 <= i < len(weights):
                raise ValueError(f"a tensor names operation {i}, but there are {len(weights)}")


class _Network:
    """Dinic's maximum flow."""

    def __init__(self, nodes: int) -> None:
        self.edges: list[list[int]] = [[] for _ in range(nodes)]
        self.ends: list[int] = []
        self.left: list[float] = []

    def join(self, a: int, b: int, capacity: float) -> None:
        for source, target, room in ((a, b, capacity), (b, a, 0.0)):
            self.edges[source].append(len(self.ends))
            self.ends.append(target)
            self.left.append(room)

    def source_side(self, source: int, sink: int) -> set[int]:
        """Nodes still reachable from the source when no flow can be added: the smallest minimum cut."""
        scale = max([room for room in self.left if room < float("inf")], default=0.0)
        self.least = 1e-12 * scale  # what rounding may leave of a full edge
        while (level := self._levels(source)).get(sink) is not None:
            at = [0] * len(self.edges)
            while self._push(source, sink, level, at) > 0:
                pass
        return set(level)

    def _levels(self, source: int) -> dict[int, int]:
        level, queue = {source: 0}, deque([source])
        while queue:
            node = queue.popleft()
            for edge in self.edges[node]:
                if self.left[edge] > self.least and self.ends[edge] not in level:
                    level[self.ends[edge]] = level[node] + 1
                    queue.append(self.ends[edge])
        return level

    def _push(self, source: int, sink: int, level: Mapping[int, int], at: list[int]) -> float:
        """One augmenting path along the levels, without recursion."""
        path: list[int] = []
        node = source
        while node != sink:
            while at[node] < len(self.edges[node]):
                edge = self.edges[node][at[node]]
                target = self.ends[edge]
                if self.left[edge] > self.least and level.get(target, -1) == level[node] + 1:
                    path.append(edge)
                    node = target
                    break
                at[node] += 1
            else:
                if not path:
                    return 0.0
                node = self.ends[path.pop() ^ 1]
                at[node] += 1
        amount = min(self.left[edge] for edge in path)
        for edge in path:
            self.left[edge] -= amount
            self.left[edge ^ 1] += amount
        return amount


def sufficient_factors(
    rows: float, width_in: int, width_out: int, *, replicas: int, rate: float, seconds_per_flop: float
) -> tuple[float, float]:
    """(seconds of sending the factors and multiplying them everywhere, seconds of the sum it replaces).

    rows: of each replica. All-gather of X and dZ, then (P - 1) rows more of dW = X^T dZ; against a ring sum of dW.
    """
    others = replicas - 1
    gathered = others * rows * (width_in + width_out) * 4 / rate
    computed = others * 2 * rows * width_in * width_out * seconds_per_flop
    reduced = 2 * others / replicas * width_in * width_out * 4 / rate
    return gathered + computed, reduced


def break_even_rows(width_in: int, width_out: int, *, replicas: int, rate: float, seconds_per_flop: float) -> float:
    """Rows of a replica below which sending factors wins: K* = (2 m n / P) / (m + n + 2 m n B / (4 F))."""
    m, n = width_in, width_out
    return (2 * m * n / replicas) / (m + n + 2 * m * n * rate * seconds_per_flop / 4)
