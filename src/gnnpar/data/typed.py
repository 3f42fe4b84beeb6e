"""sbm_typed: a small block model with types of edges. Labels depend on the types and on the edges that a cut removes.

Nodes live in communities, half of them on each side. Most pairs are inside a community (`inside_share`), the others
join the sides. A class is a pair (group, signature). A node's features show its group, weakly its signature, and a
topic: a random signature. An edge j -> i that joins the sides has the type (topic of j - signature of i) modulo
`signatures`, so that a topic received over type t is the own signature + t. Edges of a community have random types.
Without the types, the topics of neighbours are uniform noise. several: share of edges with a second edge of another
type.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, ClassVar, Literal

import numpy as np
import torch
from annotated_types import Ge, Gt, Le

from gnnpar.data.dataset import Dataset
from gnnpar.data.preprocess import Preprocess, prepare
from gnnpar.data.raw import RawGraph
from gnnpar.files import require_memory
from gnnpar.folds.edge_data import EdgeData, SelfLoops

Fraction = Annotated[float, Ge(0), Le(1)]


@dataclass(frozen=True, kw_only=True)
class TypedSBM(Preprocess):
    """The block model with types; every field is a key of `dataset=sbm_typed`."""

    name: str = "sbm_typed"
    num_nodes: Annotated[int, Ge(16)] = 1000
    avg_degree: Annotated[float, Gt(0)] = 20.0  # directed entries per node, second types not counted
    num_features: Annotated[int, Ge(1)] = 32
    groups: Annotated[int, Ge(1)] = 2
    signatures: Annotated[int, Ge(2)] = 4  # groups * signatures classes, signatures types
    num_communities: Annotated[int, Ge(2)] = 2
    inside_share: Fraction = 0.75
    several: Fraction = 0.1
    group_signal: Annotated[float, Ge(0)] = 0.7
    leak_signal: Annotated[float, Ge(0)] = 0.1
    topic_signal: Annotated[float, Ge(0)] = 2.0
    feature_noise: Annotated[float, Ge(0)] = 0.25
    graph_seed: Annotated[int, Ge(0)] | None = 0  # null: the run's seed
    usual_loops: ClassVar[SelfLoops] = False  # an added loop has no type
    split: Literal["public", "per_class", "random"] = "random"

    def load(self, data_dir: Path | None, seed: int) -> Dataset:
        del data_dir  # nothing is read
        return prepare(generate(self, seed=seed if self.graph_seed is None else self.graph_seed), self, seed=seed)


def generate(config: TypedSBM, *, seed: int) -> RawGraph:
    """Generate the graph of a configuration, equal for equal seeds. Both directions of a pair are edges."""
    rng, nodes, kinds = np.random.default_rng(seed), config.num_nodes, config.signatures
    nbytes = nodes * (8 * config.num_features + 16 * config.avg_degree) + 8 * config.num_features * kinds
    require_memory(nbytes, f"dataset {config.name} with {nodes:,} nodes", "lower dataset.num_nodes or num_features")
    community = rng.permutation(nodes) % config.num_communities
    label = rng.permutation(nodes) % (config.groups * kinds)
    topic, signature = rng.integers(kinds, size=nodes), label % kinds
    src, dst = _pairs(config, community, rng)
    across = (community[src] - community[dst]) % 2 == 1
    kind = np.where(across, (topic[src] - signature[dst]) % kinds, rng.integers(kinds, size=len(src)))
    again = rng.random(len(src)) < config.several
    second = (kind[again] + rng.integers(1, kinds, size=int(again.sum()))) % kinds
    edges = np.stack([np.concatenate([src, src[again]]), np.concatenate([dst, dst[again]])])
    return RawGraph(
        name=config.name,
        x=torch.from_numpy(_features(config, label // kinds, signature, topic, rng)),
        y=torch.from_numpy(label),
        edge_index=torch.from_numpy(edges),
        edges=EdgeData(type=torch.from_numpy(np.concatenate([kind, second]))),
        task="single_label",
        num_classes=config.groups * kinds,
        num_edge_types=kinds,
    )


def _pairs(config: TypedSBM, community: np.ndarray, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """Draw both directions of distinct pairs, inside a community or between communities of different sides."""
    nodes = config.num_nodes
    wanted = round(nodes * config.avg_degree / 2)
    inside = round(wanted * config.inside_share)
    found = np.empty(0, dtype=np.int64)
    for count, want_inside in ((inside, True), (wanted - inside, False)):
        kept = np.empty(0, dtype=np.int64)
        for _ in range(60):
            if len(kept) >= count:
                break
            low, high = np.sort(rng.integers(nodes, size=(2, 8 * count + 64)), axis=0)
            apart = (community[low] - community[high]) % 2 == 1
            fits = (low < high) & ((community[low] == community[high]) if want_inside else apart)
            kept = np.unique(np.concatenate([kept, (low * nodes + high)[fits]]))
        if len(kept) < count:
            raise ValueError(
                f"dataset {config.name}: only {len(kept)} of {count} distinct edges fit among {nodes} nodes; lower "
                f"dataset.avg_degree={config.avg_degree:g} or raise dataset.num_nodes={nodes}."
            )
        found = np.concatenate([found, rng.permutation(kept)[:count]])
    low, high = np.divmod(found, nodes)
    return np.concatenate([low, high]), np.concatenate([high, low])


def _features(
    config: TypedSBM, group: np.ndarray, signature: np.ndarray, topic: np.ndarray, rng: np.random.Generator
) -> np.ndarray:
    """Return x = group + leaked signature + topic + noise, along random directions of unit length. Shape [N, F]."""
    kinds = config.signatures
    codes = rng.standard_normal((config.groups + 2 * kinds, config.num_features))
    if len(codes) <= config.num_features:
        codes = np.linalg.qr(codes.T)[0].T
    codes /= np.linalg.norm(codes, axis=1, keepdims=True)
    of_group, of_signature, of_topic = np.split(codes, [config.groups, config.groups + kinds])
    x = config.feature_noise * rng.standard_normal((len(group), config.num_features))
    x += config.group_signal * of_group[group] + config.leak_signal * of_signature[signature]
    return (x + config.topic_signal * of_topic[topic]).astype(np.float32)
