"""Edges of the block model of synthetic.py: draw node pairs of each kind.

Every kind draws the first end by weight among its nodes, the second by weight from a cell of allowed nodes. A cell is a
contiguous range of the nodes sorted by a key, so a batch of n draws costs O(n log N).
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

Ends = tuple[np.ndarray, np.ndarray]  # -1 in j for an empty cell
Draw = Callable[[int, np.random.Generator], Ends]

_ATTEMPTS = 60


@dataclass(frozen=True, eq=False, kw_only=True)
class Nodes:
    """Latent variables of the nodes, [N] each."""

    side: np.ndarray
    community: np.ndarray
    label: np.ndarray
    signature: np.ndarray
    topic: np.ndarray
    weight: np.ndarray  # expected degree, relative
    bridge: np.ndarray  # bool: has edges to the other side
    lateral: np.ndarray  # bool: has edges to other communities of its side
    reach: np.ndarray  # first of the communities on the other side that it has edges to
    num_communities: int
    num_classes: int
    num_signatures: int
    bridge_reach: float


class _Cells:
    """Nodes sorted by an integer key, to draw from a given cell by weight."""

    def __init__(self, key: np.ndarray, weight: np.ndarray, *, num_cells: int):
        self.order = np.argsort(key, kind="stable")
        self.total = np.concatenate([[0.0], np.cumsum(weight[self.order])])
        self.bound = np.searchsorted(key[self.order], np.arange(num_cells + 1))
        self.mass = self.total[self.bound[1:]] - self.total[self.bound[:-1]]

    def draw(self, cell: np.ndarray, rng: np.random.Generator) -> np.ndarray:
        """Draw a node of each given cell; -1 for an empty cell. Shapes: cell [n] -> [n]."""
        first, last = self.bound[cell], self.bound[cell + 1] - 1
        point = self.total[first] + rng.random(len(cell)) * self.mass[cell]
        slot = np.clip(np.searchsorted(self.total, point, side="right") - 1, first, np.maximum(first, last))
        return np.where(self.mass[cell] > 0, self.order[np.minimum(slot, len(self.order) - 1)], -1)


def bridge_edges(nodes: Nodes) -> Draw:
    """Draw edges between the sides: the topic of each end is the signature of the other."""
    base = nodes.num_signatures
    weight = nodes.weight * nodes.bridge
    everyone = _draw_of_all(weight)
    cells = _Cells((nodes.side * base + nodes.signature) * base + nodes.topic, weight, num_cells=2 * base**2)

    def draw(count: int, rng: np.random.Generator) -> Ends:
        i = everyone(count, rng)
        j = cells.draw(((1 - nodes.side[i]) * base + nodes.topic[i]) * base + nodes.signature[i], rng)
        return i, np.where(_reaches(nodes, i, j) & _reaches(nodes, j, i), j, -1)

    return draw


def _reaches(nodes: Nodes, i: np.ndarray, j: np.ndarray) -> np.ndarray:
    """Return whether i has bridges to the community of j: consecutive communities, from a random first one."""
    size = _communities_of_side(nodes)[nodes.side[j]]
    return (nodes.community[j] // 2 - nodes.reach[i]) % size < np.maximum(1, np.rint(nodes.bridge_reach * size))


def _communities_of_side(nodes: Nodes) -> np.ndarray:
    return np.array([len(range(side, nodes.num_communities, 2)) for side in (0, 1)])


def lateral_edges(nodes: Nodes, *, equal: bool = False) -> Draw:
    """Draw edges between two communities of a side; `equal`: within a class."""
    weight = nodes.weight * nodes.lateral
    everyone = _draw_of_all(weight)
    classes = nodes.num_classes if equal else 1
    label = nodes.label if equal else np.zeros_like(nodes.label)
    cells = _Cells(nodes.community * classes + label, weight, num_cells=nodes.num_communities * classes)
    of_side = _communities_of_side(nodes)

    def draw(count: int, rng: np.random.Generator) -> Ends:
        i = everyone(count, rng)
        size = of_side[nodes.side[i]]
        step = 1 + (rng.random(count) * (size - 1)).astype(np.int64)  # 1 .. size - 1: never the own community
        community = (nodes.community[i] // 2 + step) % size * 2 + nodes.side[i]
        return i, np.where(size > 1, cells.draw(community * classes + label[i], rng), -1)

    return draw


def inner_edges(nodes: Nodes, *, equal: bool) -> Draw:
    """Draw edges within a community, between equal classes or between different ones."""
    everyone = _draw_of_all(nodes.weight)
    key = nodes.community * nodes.num_classes + nodes.label if equal else nodes.community
    cells = _Cells(key, nodes.weight, num_cells=nodes.num_communities * (nodes.num_classes if equal else 1))

    def draw(count: int, rng: np.random.Generator) -> Ends:
        i = everyone(count, rng)
        j = cells.draw(key[i], rng)
        return i, np.where((nodes.label[i] == nodes.label[j]) == equal, j, -1)

    return draw


def _draw_of_all(weight: np.ndarray) -> Callable[[int, np.random.Generator], np.ndarray]:
    one = _Cells(np.zeros(len(weight), dtype=np.int64), weight, num_cells=1)
    return lambda count, rng: one.draw(np.zeros(count, dtype=np.int64), rng)


def distinct(draw: Draw, count: int, *, num_nodes: int, rng: np.random.Generator, taken: np.ndarray) -> np.ndarray:
    """Draw `count` distinct undirected pairs that are not in `taken`, as sorted keys low * N + high. Return fewer if
    a dense block has no more pairs."""
    taken = np.sort(taken)
    found, yielded = np.empty(0, dtype=np.int64), 0.8  # new pairs per draw, of the last batch
    for _ in range(_ATTEMPTS):
        missing = count - len(found)
        if missing <= 0:
            break
        batch = 16 + int(min(1.1 * missing / yielded, 4 * count))
        i, j = draw(batch, rng)
        valid = (i >= 0) & (j >= 0) & (i != j)
        i, j = i[valid], j[valid]
        before = len(found)
        found = _sorted_set(np.concatenate([found, np.minimum(i, j) * num_nodes + np.maximum(i, j)]))
        found = found[~_contains(taken, found)]
        yielded = max((len(found) - before) / batch, 1e-3)
    return np.sort(rng.permutation(found)[:count])


def _sorted_set(values: np.ndarray) -> np.ndarray:
    """Return sorted distinct values. numpy.unique hashes since 2.3, ten times slower on millions of keys."""
    ordered = np.sort(values)
    return ordered[np.concatenate([[True], ordered[1:] != ordered[:-1]])] if len(ordered) else ordered


def _contains(ordered: np.ndarray, values: np.ndarray) -> np.ndarray:
    if not len(ordered):
        return np.zeros(len(values), dtype=bool)
    return ordered[np.minimum(np.searchsorted(ordered, values), len(ordered) - 1)] == values
