"""Vertex cuts: assign edges to parts. A node has a copy in every part that holds one of its edges.

Random; DBH: Xie, Yan, Li, Zhang, Distributed Power-law Graph Computing: Theoretical and Empirical Analysis, NIPS 2014:
hash the end of an edge with fewer neighbours. HDRF: Petroni, Querzoni, Daudjee, Kamali, Iacoboni, HDRF: Stream-Based
Partitioning for Power-Law Graphs, CIKM 2015: edge after edge, the part with the largest g(u, p) + g(v, p)
+ balance (largest - |p|) / (1 + largest - smallest), where g(v, p) = 2 - d_v / (d_u + d_v) if v has a copy in p, else
0. NE: Zhang, Wei, Liu, Tang, Li, Graph Edge Partitioning via Neighborhood Heuristic, KDD 2017: grow a part from a node
until it is full, by the neighbours of the node inside with the fewest edges to the outside.

A pair of neighbours is placed as a unit: all edges between two nodes, in both directions, lie in one part. Self loops
are in every part with a copy of their node. Deviations: HDRF uses final degrees (the paper counts while streaming) and
a random order of edges; ties go to the part with fewer edges, then to the lower number.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from heapq import heappop, heappush
from typing import Annotated, NamedTuple

import numpy as np
import torch
from annotated_types import Ge
from torch import Tensor

from gnnpar.data.dataset import Dataset
from gnnpar.data.stored import Stored
from gnnpar.files import JsonDict


class Pairs(NamedTuple):
    """Distinct pairs of different nodes that are neighbours. Shapes: low, high [M], low < high; degree [N]: number of
    pairs of a node; of_edge [E]: the pair of an edge, -1 for a self loop."""

    low: Tensor
    high: Tensor
    degree: Tensor
    of_edge: Tensor


def pairs_of(edge_index: Tensor, num_nodes: int) -> Pairs:
    """Return the pairs of a graph with possibly directed or repeated edges."""
    src, dst = edge_index
    apart = src != dst
    keys = torch.minimum(src, dst) * num_nodes + torch.maximum(src, dst)
    pairs, place = torch.unique(keys[apart], return_inverse=True)
    low, high = pairs // max(1, num_nodes), pairs % max(1, num_nodes)
    degree = torch.bincount(low, minlength=num_nodes) + torch.bincount(high, minlength=num_nodes)
    of_edge = torch.full_like(src, -1)
    of_edge[apart] = place
    return Pairs(low, high, degree, of_edge)


def following(part_of: Tensor, edge_index: Tensor) -> Tensor:
    """Return a vertex cut from a partition of nodes: an edge goes to the part of its end with fewer neighbours, [E]."""
    src, dst = edge_index
    return part_of[torch.where(_yields(pairs_of(edge_index, len(part_of)).degree, src, dst), src, dst)]


def _yields(degree: Tensor, first: Tensor, second: Tensor) -> Tensor:
    """Return True where an edge goes with its first end. Both directions agree. Shapes: [n], [n] -> [n] bool."""
    fewer, equal = degree[first] < degree[second], degree[first] == degree[second]
    return fewer | (equal & (first < second))


@dataclass(frozen=True, kw_only=True)
class _VertexCut:
    """Base of vertex cuts. A node is owned and evaluated by the part with most of its edges."""

    seed: Annotated[int, Ge(0)] = 0

    def part_of(self, dataset: Dataset | Stored, parts: int) -> Tensor:
        pairs = pairs_of(dataset.edge_index, dataset.num_nodes)
        return self._owners(pairs, self._placed(pairs, parts), parts)

    def edge_part_of(self, dataset: Dataset | Stored, parts: int) -> Tensor:
        """Return the part of every edge, int64 [E]; a self loop is in the part that owns its node."""
        pairs = pairs_of(dataset.edge_index, dataset.num_nodes)
        placed = self._placed(pairs, parts)
        own = self._owners(pairs, placed, parts)[dataset.edge_index[1]]
        loops = pairs.of_edge < 0
        return torch.where(loops, own, torch.cat([placed, placed.new_zeros(1)])[pairs.of_edge])

    def _owners(self, pairs: Pairs, placed: Tensor, parts: int) -> Tensor:
        ends = torch.cat([pairs.low, pairs.high]) * parts + torch.cat([placed, placed])
        owner = torch.bincount(ends, minlength=len(pairs.degree) * parts).view(-1, parts).argmax(1)
        alone = (pairs.degree == 0).nonzero().flatten()
        owner[alone] = torch.arange(len(alone)) % parts
        return owner

    def _placed(self, pairs: Pairs, parts: int) -> Tensor:
        """Return the part of every pair, int64 [M]."""
        raise NotImplementedError


@dataclass(frozen=True, kw_only=True)
class RandomEdges(_VertexCut):
    """Random pairs in equal parts, with the most copies."""

    def _placed(self, pairs: Pairs, parts: int) -> Tensor:
        num = len(pairs.low)
        return torch.randperm(num, generator=torch.Generator().manual_seed(self.seed)) * parts // max(1, num)


@dataclass(frozen=True, kw_only=True)
class DBH(_VertexCut):
    """Degree-based hashing."""

    def _placed(self, pairs: Pairs, parts: int) -> Tensor:
        generator = torch.Generator().manual_seed(self.seed)
        hashed = torch.randint(0, parts, (len(pairs.degree),), generator=generator)
        return hashed[torch.where(_yields(pairs.degree, pairs.low, pairs.high), pairs.low, pairs.high)]


@dataclass(frozen=True, kw_only=True)
class HDRF(_VertexCut):
    """High degree replicated first. balance: the paper's lambda; above 1, parts have nearly equal numbers of edges."""

    balance: Annotated[float, Ge(0)] = 1.1

    def _placed(self, pairs: Pairs, parts: int) -> Tensor:
        order = np.random.Generator(np.random.Philox(key=self.seed)).permutation(len(pairs.low))
        low, high, degree = (np.asarray(each) for each in (pairs.low, pairs.high, pairs.degree))
        us, vs = low[order], high[order]
        theta = degree[us] / np.maximum(degree[us] + degree[vs], 1)
        load, copies = [0] * parts, [0] * len(degree)  # copies: bits of the parts
        placed = np.empty(len(order), dtype=np.int64)
        for i, u, v, share in zip(order.tolist(), us.tolist(), vs.tolist(), theta.tolist(), strict=True):
            least, most = min(load), max(load)
            scale, of_u, of_v = self.balance / (1 + most - least), copies[u], copies[v]
            best, best_score = 0, -1.0
            for p in range(parts):
                score = (most - load[p]) * scale
                if of_u >> p & 1:
                    score += 2 - share
                if of_v >> p & 1:
                    score += 1 + share
                if score > best_score or (score == best_score and load[p] < load[best]):
                    best, best_score = p, score
            placed[i] = best
            load[best] += 1
            copies[u] |= 1 << best
            copies[v] |= 1 << best
        return torch.from_numpy(placed)


@dataclass(frozen=True, kw_only=True)
class NE(_VertexCut):
    """Neighbourhood expansion: grow equal parts one after the other."""

    def _placed(self, pairs: Pairs, parts: int) -> Tensor:
        num = len(pairs.low)
        order = np.random.Generator(np.random.Philox(key=self.seed)).permutation(len(pairs.degree)).tolist()
        growth = _Growth(pairs, order)
        for part in range(parts - 1):
            growth.fill(part, -(-num // parts))
        placed = np.array(growth.placed, dtype=np.int64)
        placed[placed < 0] = parts - 1
        return torch.from_numpy(placed)


class _Growth:
    """Pairs placed so far. left: pairs of a node not yet placed. order: of start nodes."""

    def __init__(self, pairs: Pairs, order: list[int]) -> None:
        ends = torch.cat([pairs.low, pairs.high])
        by_node = torch.argsort(ends, stable=True)
        num = len(pairs.low)
        self._first = [0, *pairs.degree.cumsum(0).tolist()]
        self._other = torch.cat([pairs.high, pairs.low])[by_node].tolist()
        self._pair = (by_node % max(1, num)).tolist()
        self.left: list[int] = pairs.degree.tolist()
        self.placed = [-1] * num
        self._order, self._started = order, 0

    def fill(self, part: int, size: int) -> None:
        """Place `size` pairs, or all remaining ones. Expand nodes with the fewest pairs left to the outside first."""
        inside: set[int] = set()  # nodes of the part
        queue: list[tuple[int, int]] = []
        while size:
            node = self._next(queue)
            if node is None:
                node = self._start()
                if node is None:
                    return
                inside.add(node)
            for other, pair in self._incident_edges(node):
                if self.placed[pair] >= 0 or other in inside:
                    continue
                inside.add(other)
                for third, between in self._incident_edges(other):
                    if size and self.placed[between] < 0 and third in inside:
                        self.placed[between] = part
                        size -= 1
                        for end in (other, third):
                            self.left[end] -= 1
                            heappush(queue, (self.left[end], end))

    def _start(self) -> int | None:
        """Return the first node in the order with pairs left."""
        while self._started < len(self._order) and not self.left[self._order[self._started]]:
            self._started += 1
        return self._order[self._started] if self._started < len(self._order) else None

    def _next(self, queue: list[tuple[int, int]]) -> int | None:
        """Return the node of the part with the fewest pairs left, if any; skip outdated queue entries."""
        while queue:
            left, node = heappop(queue)
            if left and left == self.left[node]:
                return node
        return None

    def _incident_edges(self, node: int) -> Iterator[tuple[int, int]]:
        span = slice(self._first[node], self._first[node + 1])
        return zip(self._other[span], self._pair[span], strict=True)


def copies_of(edge_index: Tensor, part_of: Tensor, edge_part_of: Tensor, parts: int) -> list[Tensor]:
    """Return the nodes of every part, ascending: the ends of its edges, and its own nodes without neighbours."""
    src, dst = edge_index
    apart = src != dst
    alone = torch.ones_like(part_of, dtype=torch.bool)
    alone[src[apart]], alone[dst[apart]] = False, False
    found: list[Tensor] = []
    for p in range(parts):
        held = alone & (part_of == p)
        mine = apart & (edge_part_of == p)
        held[src[mine]], held[dst[mine]] = True, True
        found.append(held.nonzero().flatten())
    return found


def vertex_cut_statistics(edge_index: Tensor, part_of: Tensor, edge_part_of: Tensor, parts: int) -> JsonDict:
    """Return the costs of a vertex cut: nodes and edges by part, and the replication factor, all copies / N."""
    src, dst = edge_index
    apart = src != dst
    loops = torch.bincount(dst[~apart], minlength=len(part_of))
    held = copies_of(edge_index, part_of, edge_part_of, parts)
    edges = torch.bincount(edge_part_of[apart], minlength=parts).tolist()
    return {
        "copies": [len(ids) for ids in held],
        "copied_edges": [count + int(loops[ids].sum()) for count, ids in zip(edges, held, strict=True)],
        "replication_factor": sum(map(len, held)) / max(1, len(part_of)),
    }
