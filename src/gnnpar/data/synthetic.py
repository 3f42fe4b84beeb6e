"""sbm: a degree-corrected stochastic block model with labels that depend on the edges that a partitioner cuts.

A plain homophilous block model hardly needs communication: without the cut edges training loses a few tenths of a point
(protocol, rule 17). Here a part of the class is passed only over edges between communities:

- Nodes live in communities, communities on two *sides*. Most edges stay inside a community, some join communities of a
  side (`lateral_share`), some join the sides (`bridge_share`, among the `bridge_nodes`): few enough that a 2-way
  minimum cut runs between the sides. A finer partition cuts them too.
- A class is a pair (group, signature): class = group * signatures + signature. A node's own features show its group
  (`group_signal`), weakly its signature (`leak_signal`), and a *topic*, a random signature (`topic_signal`).
- A bridge joins two nodes if the topic of each is the signature of the other. So the topics of neighbours on the other
  side show a node's own signature, and the topics of neighbours in its community are uniform noise. Neighbours of equal
  class inside the community (`homophily`) carry the signature to nodes without a bridge.

Without bridges a model learns the groups, and the signatures only from the leak and from neighbours that it recognises
by their noise, so keep `feature_noise` low.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import numpy as np
import torch
from annotated_types import Ge, Gt, Le

from gnnpar.data.dataset import Dataset
from gnnpar.data.preprocess import Preprocess, prepare
from gnnpar.data.raw import RawGraph
from gnnpar.files import require_memory

_LOG = logging.getLogger(__name__)
_ATTEMPTS = 60

_Ends = tuple[np.ndarray, np.ndarray]  # -1 in the second for an empty cell
_Draw = Callable[[int, np.random.Generator], _Ends]
Fraction = Annotated[float, Ge(0), Le(1)]


@dataclass(frozen=True, kw_only=True)
class SBM(Preprocess):
    """The block model; every field is a key of `dataset=sbm`."""

    name: str = "sbm"
    num_nodes: Annotated[int, Ge(16)] = 3000
    avg_degree: Annotated[float, Gt(0)] = 16.0  # directed entries per node, self loops not counted
    num_features: Annotated[int, Ge(1)] = 64
    num_classes: Annotated[int, Ge(2)] = 8
    scale: Annotated[float, Gt(0)] = 1.0  # num_nodes * scale nodes are generated, at the same average degree
    homophily: Fraction = 0.6  # share of edges that join equal classes, self loops not counted
    degree_exponent: Annotated[float, Gt(2)] = 3.0  # power law of the expected degrees, p(d) ~ d^-exponent
    num_communities: Annotated[int, Ge(2)] = 4  # half of them on each side
    bridge_share: Fraction = 0.15  # share of edges that join the sides
    lateral_share: Fraction = 0.15  # share of edges that join communities of a side
    bridge_nodes: Annotated[float, Gt(0), Le(1)] = 1.0  # share of nodes with bridges
    bridge_reach: Annotated[float, Gt(0), Le(1)] = 1.0  # share of the other side's communities with bridges of a node
    lateral_nodes: Annotated[float, Gt(0), Le(1)] = 1.0  # share of nodes with lateral edges
    locality: Fraction = 0.0  # share of nodes with a class of a group assigned to their community
    signatures: Annotated[int, Ge(2)] = 4  # classes of a group; the last group may have fewer
    group_signal: Annotated[float, Ge(0)] = 0.7  # length of the feature vector of the group
    leak_signal: Annotated[float, Ge(0)] = 0.1  # length of the feature vector of the signature
    topic_signal: Annotated[float, Ge(0)] = 2.0  # length of the feature vector of the topic
    feature_noise: Annotated[float, Ge(0)] = 0.25  # deviation of the noise of every entry
    graph_seed: Annotated[int, Ge(0)] | None = 0  # null: the run's seed
    split: Literal["public", "per_class", "random"] = "random"

    @property
    def generated_nodes(self) -> int:
        return max(16, round(self.num_nodes * self.scale))

    def load(self, data_dir: Path | None, seed: int) -> Dataset:
        del data_dir  # nothing is read
        raw = generate(self, seed=seed if self.graph_seed is None else self.graph_seed)
        return prepare(raw, self, seed=seed)


def generate(config: SBM, *, seed: int) -> RawGraph:
    """Generate the graph of a configuration; the same seed gives the same graph. Raises ValueError."""
    rng = np.random.default_rng(seed)
    num_nodes = config.generated_nodes
    for key in ("num_classes", "num_communities", "signatures", "avg_degree"):
        if (value := vars(config)[key]) > num_nodes:
            raise ValueError(f"dataset.{key}={value} is more than the {num_nodes} nodes: lower it")
    tables = 16 * (config.signatures**2 + config.num_communities * config.num_classes)
    nbytes = num_nodes * (8 * config.num_features + 16 * config.avg_degree) + tables
    require_memory(nbytes, f"dataset {config.name} with {num_nodes:,} nodes", "lower dataset.num_nodes or num_features")
    nodes = _draw_nodes(config, num_nodes, rng)
    pairs = _draw_pairs(config, nodes, rng)
    x = _draw_features(config, nodes, rng)
    return RawGraph(
        name=config.name,
        x=torch.from_numpy(x),
        y=torch.from_numpy(nodes.label),
        edge_index=torch.from_numpy(pairs),
        task="single_label",
        pairs=True,
        num_classes=config.num_classes,
    )


@dataclass(frozen=True, eq=False, kw_only=True)
class _Nodes:
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


def _draw_nodes(config: SBM, num_nodes: int, rng: np.random.Generator) -> _Nodes:
    # every community, class and topic has its share of nodes, in random order
    community = rng.permutation(num_nodes) % config.num_communities
    label = _draw_labels(config, community, rng)
    weight = (1.0 - rng.random(num_nodes)) ** (-1.0 / (config.degree_exponent - 1.0))
    # a hub has at most half of its community as neighbours; beyond it most draws would repeat an edge
    inside = config.avg_degree * (1.0 - config.bridge_share - config.lateral_share)
    most = max(1.5, 0.5 * num_nodes / config.num_communities / max(inside, 1.0))
    return _Nodes(
        side=community % 2,
        community=community,
        label=label,
        signature=label % config.signatures,
        topic=_balanced(community * config.num_classes + label, config.signatures, rng),
        weight=np.minimum(weight, most * weight.mean()),
        bridge=rng.random(num_nodes) < config.bridge_nodes,
        lateral=rng.random(num_nodes) < config.lateral_nodes,
        reach=rng.integers(config.num_communities, size=num_nodes),
    )


def _draw_labels(config: SBM, community: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Draw a class; with probability `locality`, of a group assigned to the community. Shapes: [N] -> [N]."""
    label = _balanced(community, config.num_classes, rng)
    at_home = rng.random(len(label)) < config.locality
    groups = -(-config.num_classes // config.signatures)
    for place in range(config.num_communities):
        home = [group for group in range(groups) if group % config.num_communities == place] or [place % groups]
        classes = np.flatnonzero(np.isin(np.arange(config.num_classes) // config.signatures, home))
        members = np.flatnonzero(at_home & (community == place))
        label[members] = rng.permutation(classes[np.arange(len(members)) % len(classes)])
    return label


def _balanced(group: np.ndarray, count: int, rng: np.random.Generator) -> np.ndarray:
    """Draw values 0..count-1, equally often within each group up to one. Shapes: group [N] -> [N]."""
    order = np.lexsort((rng.random(len(group)), group))
    value = np.empty(len(group), dtype=np.int64)
    value[order] = (np.arange(len(group)) + rng.integers(count)) % count
    return value


def _draw_pairs(config: SBM, nodes: _Nodes, rng: np.random.Generator) -> np.ndarray:
    """Draw distinct undirected pairs, [2, N * avg_degree / 2]. Pairs of equal classes by chance count as homophily. If
    a kind of edge runs out of free pairs, in a small or dense graph, the next kind draws the rest."""
    num_nodes = len(nodes.label)
    wanted = round(num_nodes * config.avg_degree / 2)
    keys = np.empty(0, dtype=np.int64)

    def add(draw: _Draw, count: int) -> None:
        nonlocal keys
        keys = np.concatenate([keys, _distinct(draw, count, num_nodes=num_nodes, rng=rng, taken=keys)])

    def equal_so_far() -> int:
        low, high = np.divmod(keys, num_nodes)
        return int((nodes.label[low] == nodes.label[high]).sum())

    outside = round(wanted * config.bridge_share), round(wanted * config.lateral_share)
    wanted_equal = round(wanted * config.homophily)
    add(_bridge_edges(config, nodes), outside[0])
    # lateral edges ignore classes, unless the edges inside communities are too few for the homophily
    helping = min(max(wanted_equal - equal_so_far() - (wanted - sum(outside)), 0), outside[1])
    add(_lateral_edges(config, nodes, equal=True), helping)
    add(_lateral_edges(config, nodes), sum(outside) - len(keys))
    equal = wanted_equal - equal_so_far()
    if sum(outside) > wanted or not 0 <= equal <= wanted - len(keys):
        raise ValueError(
            f"dataset.homophily={config.homophily:g} is out of reach: dataset.bridge_share={config.bridge_share:g} and "
            f"dataset.lateral_share={config.lateral_share:g} leave {wanted - sum(outside)} of {wanted} edges inside "
            f"communities, and {equal_so_far()} of the others join equal classes; change one of the three."
        )
    add(_inner_edges(config, nodes, equal=True), equal)
    add(_lateral_edges(config, nodes, equal=True), wanted_equal - equal_so_far())
    add(_inner_edges(config, nodes, equal=False), wanted - len(keys))
    if len(keys) < wanted:
        raise ValueError(
            f"dataset {config.name}: only {len(keys)} of {wanted} distinct edges fit among {num_nodes} nodes; lower "
            f"dataset.avg_degree={config.avg_degree:g} or raise dataset.num_nodes={config.num_nodes}."
        )
    if abs(equal_so_far() - config.homophily * wanted) > 0.01 * wanted:
        _LOG.warning(
            "dataset %s: homophily is %.3f, not %g: %d nodes at degree %g have too few pairs of a class",
            *(config.name, equal_so_far() / wanted, config.homophily, num_nodes, config.avg_degree),
        )
    return np.stack(np.divmod(keys, num_nodes))


def _draw_features(config: SBM, nodes: _Nodes, rng: np.random.Generator) -> np.ndarray:
    """Return x = group + leaked signature + topic + noise, along random directions of unit length. Shape [N, F]."""
    groups = -(-config.num_classes // config.signatures)
    codes = rng.standard_normal((groups + 2 * config.signatures, config.num_features)).astype(np.float32)
    if len(codes) <= config.num_features:
        codes = np.linalg.qr(codes.T.astype(np.float64))[0].T.astype(np.float32)
    codes /= np.linalg.norm(codes, axis=1, keepdims=True)
    group, leak, topic = np.split(codes, [groups, groups + config.signatures])
    x = rng.standard_normal((len(nodes.label), config.num_features), dtype=np.float32) * np.float32(
        config.feature_noise
    )
    x += np.float32(config.group_signal) * group[nodes.label // config.signatures]
    x += np.float32(config.leak_signal) * leak[nodes.signature]
    x += np.float32(config.topic_signal) * topic[nodes.topic]
    return x


class _Cells:
    """Nodes sorted by an integer key, to draw from a given cell, a range of them, by weight: n draws in O(n log N).

    Every kind of edge draws its first end among all of its nodes, its second end from a cell of allowed nodes.
    """

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


def _bridge_edges(config: SBM, nodes: _Nodes) -> _Draw:
    """Draw edges between the sides: the topic of each end is the signature of the other."""
    base = config.signatures
    weight = nodes.weight * nodes.bridge
    everyone = _draw_of_all(weight)
    cells = _Cells((nodes.side * base + nodes.signature) * base + nodes.topic, weight, num_cells=2 * base**2)

    def draw(count: int, rng: np.random.Generator) -> _Ends:
        i = everyone(count, rng)
        j = cells.draw(((1 - nodes.side[i]) * base + nodes.topic[i]) * base + nodes.signature[i], rng)
        return i, np.where(_reaches(config, nodes, i, j) & _reaches(config, nodes, j, i), j, -1)

    return draw


def _reaches(config: SBM, nodes: _Nodes, i: np.ndarray, j: np.ndarray) -> np.ndarray:
    """Return whether i has bridges to the community of j: consecutive communities, from a random first one."""
    size = _communities_of_side(config)[nodes.side[j]]
    return (nodes.community[j] // 2 - nodes.reach[i]) % size < np.maximum(1, np.rint(config.bridge_reach * size))


def _communities_of_side(config: SBM) -> np.ndarray:
    return np.array([len(range(side, config.num_communities, 2)) for side in (0, 1)])


def _lateral_edges(config: SBM, nodes: _Nodes, *, equal: bool = False) -> _Draw:
    """Draw edges between two communities of a side; `equal`: within a class."""
    weight = nodes.weight * nodes.lateral
    everyone = _draw_of_all(weight)
    classes = config.num_classes if equal else 1
    label = nodes.label if equal else np.zeros_like(nodes.label)
    cells = _Cells(nodes.community * classes + label, weight, num_cells=config.num_communities * classes)
    of_side = _communities_of_side(config)

    def draw(count: int, rng: np.random.Generator) -> _Ends:
        i = everyone(count, rng)
        size = of_side[nodes.side[i]]
        step = 1 + (rng.random(count) * (size - 1)).astype(np.int64)  # 1 .. size - 1: never the own community
        community = (nodes.community[i] // 2 + step) % size * 2 + nodes.side[i]
        return i, np.where(size > 1, cells.draw(community * classes + label[i], rng), -1)

    return draw


def _inner_edges(config: SBM, nodes: _Nodes, *, equal: bool) -> _Draw:
    """Draw edges within a community, between equal classes or between different ones."""
    everyone = _draw_of_all(nodes.weight)
    key = nodes.community * config.num_classes + nodes.label if equal else nodes.community
    cells = _Cells(key, nodes.weight, num_cells=config.num_communities * (config.num_classes if equal else 1))

    def draw(count: int, rng: np.random.Generator) -> _Ends:
        i = everyone(count, rng)
        j = cells.draw(key[i], rng)
        return i, np.where((nodes.label[i] == nodes.label[j]) == equal, j, -1)

    return draw


def _draw_of_all(weight: np.ndarray) -> Callable[[int, np.random.Generator], np.ndarray]:
    one = _Cells(np.zeros(len(weight), dtype=np.int64), weight, num_cells=1)
    return lambda count, rng: one.draw(np.zeros(count, dtype=np.int64), rng)


def _distinct(draw: _Draw, count: int, *, num_nodes: int, rng: np.random.Generator, taken: np.ndarray) -> np.ndarray:
    """Draw `count` distinct undirected pairs that are not in `taken`, as sorted keys low * N + high. Return fewer if
    a dense block has no more pairs."""
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
        found = found[~np.isin(found, taken, assume_unique=True)]
        yielded = max((len(found) - before) / batch, 1e-3)
    return np.sort(rng.permutation(found)[:count])


def _sorted_set(values: np.ndarray) -> np.ndarray:
    """Return sorted distinct values. numpy.unique hashes since 2.3, ten times slower on millions of keys."""
    ordered = np.sort(values)
    return ordered[np.concatenate([[True], ordered[1:] != ordered[:-1]])] if len(ordered) else ordered
