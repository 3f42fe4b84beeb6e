"""sbm: a degree-corrected stochastic block model whose labels need the edges that a partitioner cuts.

A plain homophilous block model is deaf to communication: with every cut edge silenced in training it loses a few tenths of a
point (protocol, rule 17). Here a part of the class travels only over edges between communities:

- Nodes live in communities, communities in two *sides*. Most edges stay inside a community, some join communities of the
  same side (`lateral_share`), some join the sides (`bridge_share`), only among the `bridge_nodes`. Few enough edges join the
  sides that a 2-way minimum cut runs between them, and any finer partition cuts them too.
- A class is a pair (group, signature): class = group * signatures + signature. A node's own features show its group
  (`group_signal`), weakly its signature (`leak_signal`), and a *topic*, a random signature (`topic_signal`).
- A bridge joins nodes whose topic is the other's signature. So the topics heard from the far side spell a node's own
  signature, while the topics heard inside a community are uniform noise. Same-class neighbours inside the community
  (`homophily`) carry what a bridge node learns to the nodes without a bridge.

Without the bridges a model can learn the groups but hardly the signatures; an MLP sees only the node itself.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import numpy as np
import torch
from annotated_types import Ge, Gt, Le

from gnnpar.data.dataset import Dataset
from gnnpar.data.preprocess import Preprocess, prepare
from gnnpar.data.raw import RawGraph

Fraction = Annotated[float, Ge(0), Le(1)]


@dataclass(frozen=True, kw_only=True)
class SBM(Preprocess):
    """The block model; every field a key of `dataset=sbm`."""

    name: str = "sbm"
    num_nodes: Annotated[int, Ge(16)] = 3000
    avg_degree: Annotated[float, Gt(0)] = 16.0  # directed entries per node, self loops not counted
    num_features: Annotated[int, Ge(1)] = 64
    num_classes: Annotated[int, Ge(2)] = 8
    scale: Annotated[float, Gt(0)] = 1.0  # num_nodes * scale nodes are generated, at the same average degree
    homophily: Fraction = 0.6  # share of edges that join equal classes, self loops not counted
    degree_exponent: Annotated[float, Gt(2)] = 3.0  # power law of the expected degrees, p(d) ~ d^-exponent
    num_communities: Annotated[int, Ge(2)] = 8  # half of them on each side
    bridge_share: Fraction = 0.15  # share of edges that join the sides
    lateral_share: Fraction = 0.2  # share of edges that join communities of a side
    bridge_nodes: Annotated[float, Gt(0), Le(1)] = 1.0  # share of nodes with bridges
    lateral_nodes: Annotated[float, Gt(0), Le(1)] = 1.0  # share of nodes with lateral edges
    signatures: Annotated[int, Ge(2)] = 4  # classes of a group; must divide num_classes or be cut off by it
    group_signal: Annotated[float, Ge(0)] = 1.0
    leak_signal: Annotated[float, Ge(0)] = 0.5
    topic_signal: Annotated[float, Ge(0)] = 2.0
    feature_noise: Annotated[float, Ge(0)] = 1.0
    graph_seed: Annotated[int, Ge(0)] | None = 0  # null: the run's seed
    split: str = "random"  # type: ignore[assignment]

    def load(self, data_dir: Path | None, seed: int) -> Dataset:
        del data_dir  # nothing is read
        raw = generate(self, seed=seed if self.graph_seed is None else self.graph_seed)
        return prepare(raw, self, seed=seed)


@dataclass(frozen=True, eq=False)
class _Nodes:
    """Latent variables of the nodes, [N] each."""

    side: np.ndarray
    community: np.ndarray
    label: np.ndarray
    signature: np.ndarray
    topic: np.ndarray
    weight: np.ndarray  # expected degree, relative
    bridge: np.ndarray  # bool
    lateral: np.ndarray  # bool


class _Cells:
    """Nodes grouped by an integer key, to draw one by weight from a given group.

    A draw is one search in the running sum of weights of all nodes sorted by group, so a batch costs O(n log N).
    """

    def __init__(self, key: np.ndarray, weight: np.ndarray, *, num_cells: int):
        self.order = np.argsort(key, kind="stable")
        self.total = np.concatenate([[0.0], np.cumsum(weight[self.order])])
        self.bound = np.searchsorted(key[self.order], np.arange(num_cells + 1))
        self.mass = self.total[self.bound[1:]] - self.total[self.bound[:-1]]

    def draw(self, cell: np.ndarray, rng: np.random.Generator) -> np.ndarray:
        """A node of each given cell, or -1 where the cell has no mass."""
        point = self.total[self.bound[cell]] + rng.random(len(cell)) * self.mass[cell]
        slot = np.searchsorted(self.total, point, side="right") - 1
        slot = np.clip(slot, self.bound[cell], np.maximum(self.bound[cell + 1] - 1, self.bound[cell]))
        return np.where(self.mass[cell] > 0, self.order[np.minimum(slot, len(self.order) - 1)], -1)


def generate(config: SBM, *, seed: int) -> RawGraph:
    """The graph of a configuration; the same seed gives the same graph."""
    rng = np.random.default_rng(seed)
    num_nodes = max(16, round(config.num_nodes * config.scale))
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


def _draw_nodes(config: SBM, num_nodes: int, rng: np.random.Generator) -> _Nodes:
    # Balanced assignments in random order: every community, and every class of it, has its share of nodes.
    community = rng.permutation(num_nodes) % config.num_communities
    label = _balanced(community, config.num_classes, rng)
    signature = label % config.signatures
    topic = _balanced(community * config.num_classes + label, min(config.signatures, config.num_classes), rng)
    weight = (1.0 - rng.random(num_nodes)) ** (-1.0 / (config.degree_exponent - 1.0))
    weight = np.minimum(
        weight, np.sqrt(num_nodes) * 2
    )  # a hub cannot have more neighbours than its community has nodes
    return _Nodes(
        side=community % 2,
        community=community,
        label=label,
        signature=signature,
        topic=topic,
        weight=weight,
        bridge=rng.random(num_nodes) < config.bridge_nodes,
        lateral=rng.random(num_nodes) < config.lateral_nodes,
    )


def _balanced(group: np.ndarray, count: int, rng: np.random.Generator) -> np.ndarray:
    """Values 0..count-1, equally often within each group up to one, at random otherwise. Shapes: group [N] -> [N]."""
    order = np.lexsort((rng.random(len(group)), group))
    value = np.empty(len(group), dtype=np.int64)
    value[order] = (np.arange(len(group)) + rng.integers(count)) % count
    return value


def _draw_pairs(config: SBM, nodes: _Nodes, rng: np.random.Generator) -> np.ndarray:
    """Distinct undirected pairs, [2, N * avg_degree / 2], by kind: inside, lateral, bridge."""
    num_nodes = len(nodes.label)
    wanted = round(num_nodes * config.avg_degree / 2)
    shares = {"bridge": config.bridge_share, "lateral": config.lateral_share}
    counts = {kind: round(wanted * share) for kind, share in shares.items()}
    counts["inside"] = wanted - sum(counts.values())
    # Bridges join equal classes by chance only; the other edges make up for it.
    rest = max(1.0 - config.bridge_share, 1e-9)
    same = (config.homophily - config.bridge_share / config.num_classes) / rest
    if counts["inside"] < 0 or not 0 <= same <= 1:
        low, high = config.bridge_share / config.num_classes, config.bridge_share / config.num_classes + rest
        raise ValueError(
            f"dataset.homophily={config.homophily:g} is out of reach: with dataset.bridge_share={config.bridge_share:g} and "
            f"lateral_share={config.lateral_share:g} (together at most 1) it lies in {low:.3f}..{high:.3f}; change one of them."
        )
    draws = {
        "inside": _Inside(config, nodes, same),
        "lateral": _Lateral(config, nodes, same),
        "bridge": _Bridge(config, nodes),
    }
    keys = [_distinct(draws[kind], counts[kind], num_nodes, config, rng) for kind in ("inside", "lateral", "bridge")]
    return np.stack(np.divmod(np.concatenate(keys), num_nodes))


def _distinct(draw, count: int, num_nodes: int, config: SBM, rng: np.random.Generator) -> np.ndarray:
    """`count` distinct pairs as keys low * N + high; what is drawn twice is drawn again."""
    found = np.empty(0, dtype=np.int64)
    for _ in range(60):
        missing = count - len(found)
        if missing <= 0:
            return np.sort(rng.permutation(found)[:count])
        i, j = draw(int(missing * 1.2) + 16, rng)
        valid = (j >= 0) & (i != j)
        i, j = i[valid], j[valid]
        found = np.unique(np.concatenate([found, np.minimum(i, j) * num_nodes + np.maximum(i, j)]))
    raise ValueError(
        f"dataset {config.name}: only {len(found)} of {count} distinct edges of one kind fit among {num_nodes} nodes; lower "
        f"dataset.avg_degree={config.avg_degree:g}, dataset.homophily or dataset.num_communities, or raise dataset.num_nodes."
    )


class _Inside:
    """Edges of a community: with probability `same` to the own class, else to another one."""

    def __init__(self, config: SBM, nodes: _Nodes, same: float):
        self.nodes, self.same, self.classes = nodes, same, config.num_classes
        self.any = _Cells(np.zeros_like(nodes.label), nodes.weight, num_cells=1)
        self.cells = _Cells(
            nodes.community * config.num_classes + nodes.label,
            nodes.weight,
            num_cells=config.num_communities * config.num_classes,
        )

    def __call__(self, count: int, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
        i = self.any.draw(np.zeros(count, dtype=np.int64), rng)
        label = _partner_class(self.nodes.label[i], self.same, self.classes, rng)
        return i, self.cells.draw(self.nodes.community[i] * self.classes + label, rng)


class _Lateral:
    """Edges between communities of a side, among the lateral nodes, with the homophily of the inside."""

    def __init__(self, config: SBM, nodes: _Nodes, same: float):
        self.nodes, self.same, self.classes = nodes, same, config.num_classes
        self.of_side = np.array([len(range(side, config.num_communities, 2)) for side in (0, 1)])
        weight = nodes.weight * nodes.lateral
        self.any = _Cells(np.zeros_like(nodes.label), weight, num_cells=1)
        self.cells = _Cells(
            nodes.community * config.num_classes + nodes.label,
            weight,
            num_cells=config.num_communities * config.num_classes,
        )

    def __call__(self, count: int, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
        i = self.any.draw(np.zeros(count, dtype=np.int64), rng)
        size = self.of_side[self.nodes.side[i]]
        step = 1 + (rng.random(count) * (size - 1)).astype(np.int64)  # 1 .. size - 1, to another community of the side
        place = (self.nodes.community[i] // 2 + step) % size
        label = _partner_class(self.nodes.label[i], self.same, self.classes, rng)
        j = self.cells.draw((place * 2 + self.nodes.side[i]) * self.classes + label, rng)
        return i, np.where(size > 1, j, -1)


class _Bridge:
    """Edges between the sides, among the bridge nodes: each end's topic is the other's signature."""

    def __init__(self, config: SBM, nodes: _Nodes):
        self.nodes, self.base = nodes, config.signatures
        weight = nodes.weight * nodes.bridge
        self.any = _Cells(np.zeros_like(nodes.label), weight, num_cells=1)
        key = (nodes.side * self.base + nodes.signature) * self.base + nodes.topic
        self.cells = _Cells(key, weight, num_cells=2 * self.base**2)

    def __call__(self, count: int, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
        i = self.any.draw(np.zeros(count, dtype=np.int64), rng)
        side, signature, topic = self.nodes.side[i], self.nodes.signature[i], self.nodes.topic[i]
        return i, self.cells.draw(((1 - side) * self.base + topic) * self.base + signature, rng)


def _partner_class(label: np.ndarray, same: float, num_classes: int, rng: np.random.Generator) -> np.ndarray:
    other = (label + rng.integers(1, num_classes, len(label))) % num_classes
    return np.where(rng.random(len(label)) < same, label, other)


def _draw_features(config: SBM, nodes: _Nodes, rng: np.random.Generator) -> np.ndarray:
    """x = group + leaked signature + topic + noise, each along random directions of unit length. Shape [N, F]."""
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
