"""rmat: graphs of 2^scale nodes with power-law degrees, for studies of size: Graph500's Kronecker generator.

D. Chakrabarti, Y. Zhan, C. Faloutsos, "R-MAT: A recursive model for graph mining", SDM 2004; parameters and edge factor
of Graph500 (specification 3.0): (A, B, C, D) = (0.57, 0.19, 0.19, 0.05), 16 pairs per node, ids scrambled.

Pair k descends `scale` levels of the adjacency matrix, into one of four quadrants at each, by 32 bits hashed from
(graph seed, k, level). Pairs are independent of each other, of chunks and of threads, so `gnnpar train` and `gnnpar
partition` make the same graph, the latter in O(nodes) of memory. Repeated pairs and loops are dropped, reverses added.
Many nodes have no edge.

Deviation: ids are scrambled by a keyed bijection instead of a random permutation, which would have to be stored.
Labels are hashed from the ids, independently of neighbours: use it for time, memory and bytes, not for accuracy.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import numpy as np
import torch
from annotated_types import Ge, Gt, Le
from torch import Tensor

from gnnpar.data.dataset import Dataset
from gnnpar.data.preprocess import Preprocess, prepare
from gnnpar.data.raw import RawGraph
from gnnpar.data.stored import EdgeChunk, OnProgress, PreparedRows, Stored, no_progress, streamed
from gnnpar.files import require_memory
from gnnpar_kernels.hashing import entry_hash, fold_key, key_words

CHUNK_PAIRS = 1 << 17  # in a pass over all pairs: 32 bits per pair and level, as int64
NODE_BYTES = 48  # per node in a pass over edges: label, masks, counts, row pointers
Share = Annotated[float, Gt(0), Le(1)]


@dataclass(frozen=True, kw_only=True)
class RMAT(Preprocess):
    """The generator; every field is a key of `dataset=rmat`. Quadrant (1, 1) has the share 1 - a - b - c."""

    name: str = "rmat"
    scale: Annotated[int, Ge(4), Le(30)] = 14  # 2^scale nodes
    edge_factor: Annotated[int, Ge(1), Le(1024)] = 16  # pairs drawn per node, each in both directions
    a: Share = 0.57  # share of quadrant (0, 0)
    b: Share = 0.19  # share of quadrant (0, 1)
    c: Share = 0.19  # share of quadrant (1, 0)
    num_features: Annotated[int, Ge(1)] = 64
    num_classes: Annotated[int, Ge(2)] = 8
    feature_noise: Annotated[float, Ge(0)] = 1.0  # deviation of an entry; the class code has deviation 1
    graph_seed: Annotated[int, Ge(0)] | None = 0  # null: the run's seed
    split: Literal["public", "per_class", "random"] = "random"

    @property
    def generated_nodes(self) -> int:
        return 1 << self.scale

    @property
    def num_pairs(self) -> int:
        return self.edge_factor << self.scale

    @property
    def class_bytes(self) -> int:
        """Bytes of the codes of all classes while they are drawn."""
        return 16 * self.num_classes * self.num_features

    def load(self, data_dir: Path | None, seed: int) -> Dataset:
        del data_dir  # nothing is read
        graph = _Graph.of(self, seed)
        nbytes = 4 * self.generated_nodes * self.num_features + 32 * self.num_pairs + self.class_bytes
        change = "lower dataset.scale, or cut it with gnnpar partition, which makes it in chunks"
        require_memory(nbytes, f"dataset {self.name} of 2^{self.scale} nodes", change)
        chunks = [np.stack([src, dst]) for src, dst, _ in graph.pairs()]
        pairs = torch.from_numpy(np.concatenate(chunks, axis=1))
        return prepare(graph.raw(graph.features(slice(None)), pairs), self, seed=seed)

    def stored(self, data_dir: Path | None, seed: int, scratch: Path, on_progress: OnProgress = no_progress) -> Stored:
        """Return the graph with its edges in canonical order in `scratch`."""
        del data_dir
        graph = _Graph.of(self, seed)
        nodes, title = self.generated_nodes, f"dataset {self.name} of 2^{self.scale} nodes"
        require_memory(NODE_BYTES * nodes + self.class_bytes, f"{title}, even in chunks,", "lower dataset.scale")
        return streamed(
            PreparedRows(self, self.name, (nodes, self.num_features), graph.features),
            lambda: graph.raw(torch.zeros(nodes, 1), torch.zeros(2, 0, dtype=torch.int64)),
            graph.pairs,
            scratch,
            seed=seed,
            num_edges=self.num_pairs,
            pairs=True,
            title=title,
            remedy="name another place by out=, or lower dataset.scale",
            on_progress=on_progress,
        )


@dataclass(frozen=True, eq=False)
class _Graph:
    """A configuration with its seed: pairs, labels and features of any range of ids."""

    config: RMAT
    seed: int

    @staticmethod
    def of(config: RMAT, seed: int) -> "_Graph":
        if config.a + config.b + config.c >= 1:
            raise ValueError(
                f"dataset.a + dataset.b + dataset.c = {config.a + config.b + config.c:g} leave nothing for the fourth "
                "quadrant: they must stay below 1"
            )
        return _Graph(config, seed if config.graph_seed is None else config.graph_seed)

    def pairs(self, limit: int = CHUNK_PAIRS) -> Iterator[EdgeChunk]:
        """Yield all pairs in order, `limit` at a time, as scrambled int64 ids."""
        for first in range(0, self.config.num_pairs, limit):
            src, dst = self.unscrambled(first, min(first + limit, self.config.num_pairs))
            yield self.scrambled(src).numpy(), self.scrambled(dst).numpy(), {}

    def unscrambled(self, first: int, last: int) -> tuple[Tensor, Tensor]:
        """Return rows and columns of pairs first..last - 1, int64 [n]; hubs have few bits set."""
        scale, config = self.config.scale, self.config
        drawn = entry_hash(torch.arange(first, last), scale, key=fold_key(self.seed, 0))
        west, north, rest = (round(x * 2**32) for x in (config.a, config.a + config.b, config.a + config.b + config.c))
        low = drawn >= north  # rows of the lower half
        east = torch.where(low, drawn >= rest, drawn >= west)
        place = 1 << torch.arange(scale - 1, -1, -1)
        return (low * place).sum(1), (east * place).sum(1)

    def scrambled(self, ids: Tensor) -> Tensor:
        """Map 0..2^scale - 1 bijectively: products with odd numbers modulo 2^scale, and shifts. Shapes: [n] -> [n]."""
        scale = self.config.scale
        most, half = (1 << scale) - 1, scale // 2
        for turn in range(2):
            k0, k1, _ = key_words(fold_key(self.seed, 1, turn))
            ids = (ids * (k0 | 1) + k1) & most
            ids = ids ^ (ids >> half)
        return ids

    def labels(self, ids: Tensor) -> Tensor:
        """Return the labels of nodes. Shapes: [n] -> [n] int64."""
        return entry_hash(ids, 1, key=fold_key(self.seed, 2))[:, 0] % self.config.num_classes

    def features(self, rows: slice) -> Tensor:
        """Return features: a code of the class, of -1 and 1, plus uniform noise. Shapes: [n, F] float32."""
        config = self.config
        ids = torch.arange(*rows.indices(config.generated_nodes))
        code = entry_hash(torch.arange(config.num_classes), config.num_features, key=fold_key(self.seed, 3)) & 1
        noise = entry_hash(ids, config.num_features, key=fold_key(self.seed, 4))
        uniform = (noise.to(torch.float32) / 2**31 - 1) * (3**0.5 * config.feature_noise)
        return (2 * code - 1)[self.labels(ids)].to(torch.float32) + uniform

    def raw(self, x: Tensor, pairs: Tensor) -> RawGraph:
        return RawGraph(
            name=self.config.name,
            x=x,
            y=self.labels(torch.arange(self.config.generated_nodes)),
            edge_index=pairs,
            task="single_label",
            pairs=True,
            num_classes=self.config.num_classes,
        )
