"""The base class of the batches of every sampler, and the batches of neighbour sampling and of clusters.

A rank's batch depends only on (seed, epoch, step, rank), so worker processes that draw ahead draw the same.

ClusterGCN: Chiang, Liu, Si, Li, Bengio, Hsieh, Cluster-GCN: An Efficient Algorithm for Training Deep and Large Graph
Convolutional Networks, KDD 2019 (arXiv 1905.07953), section 3.2: clusters are parts of a graph partitioner, and a step
unites some of them, drawn anew in every epoch. Random nodes: Wang, Vialle, Vaysse, Bonald, Implicit Regularization of
Mini-Batch Training in Graph Neural Networks, 2026 (arXiv 2605.22480): clusters are a random partition of the nodes,
drawn anew in every epoch, as PyG's RandomNodeLoader draws it. Specification: docs/strategies/minibatch.md.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from torch import Tensor

from gnnpar.comm import Communicator
from gnnpar.parallel.sampling.neighbours import InEdges, Replica, Sample, Sampler, sampler_of
from gnnpar.parallel.sampling.view import Normalize, Subgraph, ranges, subgraph_of
from gnnpar_kernels import fold_key

if TYPE_CHECKING:
    from gnnpar.parallel.sampling.strategy import Minibatch

At = tuple[int, int]  # epoch, step
Hops = Sequence[int]  # number of aggregations of each layer
ORDER, DRAW, ESTIMATE = 1, 2, 4  # the use of a key; 3 is the engine's masks


class Shared(NamedTuple):
    """Settings of all batches; every step is dealt out over `ranks`."""

    normalize: Normalize
    seed: int
    rank: int
    ranks: int


@dataclass(eq=False)
class Batches(ABC):
    """This rank's subgraph of every step. Picklable. Subclasses are the samplers of `Minibatch`. `drawn_by`: the
    package that draws."""

    graph: Replica
    shared: Shared
    drawn_by: str = field(default="", kw_only=True)

    def __post_init__(self) -> None:
        # rows stay with the engine: a spawned worker would get a copy of them
        self.graph = replace(self.graph, x=self.graph.x[:0].cpu(), y=self.graph.y[:0].cpu())

    @staticmethod
    @abstractmethod
    def of(config: Minibatch, graph: Replica, hops: Hops, shared: Shared, comm: Communicator | None) -> Batches:
        """Return a rank's batches. `comm`: its rank 0 estimates probabilities for all ranks; None: this rank does."""

    @staticmethod
    @abstractmethod
    def whole(config: Minibatch) -> bool:
        """Return True if a step trains on the full graph."""

    @staticmethod
    @abstractmethod
    def check(config: Minibatch, num_ranks: int, num_layers: int) -> None:
        """Raise ValueError if a step is too small for the ranks, or the model has too few layers."""

    @property
    def nbytes(self) -> int:
        """Return the bytes of tables held in addition to the graph."""
        return 0

    @abstractmethod
    def __len__(self) -> int:
        """Return the number of steps of an epoch."""

    @abstractmethod
    def size(self, at: At) -> int:
        """Return the divisor of a step's loss, which is summed over its training nodes of all ranks."""

    @abstractmethod
    def __getitem__(self, at: At) -> Subgraph: ...


@dataclass(eq=False)
class SeedBatches(Batches):
    """Neighbour sampling: every training node is a seed once per epoch. `batch_size`: seeds of a step, all ranks; None:
    all."""

    sampler: Sampler
    batch_size: int | None
    _shuffled: tuple[int, Tensor] | None = field(default=None, init=False)

    @staticmethod
    def of(config: Minibatch, graph: Replica, hops: Hops, shared: Shared, comm: Communicator | None) -> SeedBatches:
        assert config.sampler in ("auto", "pyg", "own")
        outwards = [layer for layer, count in enumerate(reversed(hops)) for _ in range(count)]
        by_hop = [config.fanout[min(layer, len(config.fanout) - 1)] for layer in outwards]
        sampler, drawn_by = sampler_of(graph.edges, by_hop, config.sampler)
        return SeedBatches(graph, shared, sampler, config.batch_size, drawn_by=drawn_by)

    @staticmethod
    def whole(config: Minibatch) -> bool:
        return config.batch_size is None and set(config.fanout) == {-1} and config.normalize == "graph"

    @staticmethod
    def check(config: Minibatch, num_ranks: int, num_layers: int) -> None:
        if len(config.fanout) > num_layers:
            raise ValueError(
                f"strategy.fanout={list(config.fanout)} has {len(config.fanout)} numbers, but the model {num_layers} "
                f"layers: give {num_layers} or fewer, the first for the neighbours of training nodes."
            )

    @property
    def _size(self) -> int:
        return self.batch_size or len(self.graph.train)

    def __len__(self) -> int:
        return -(-len(self.graph.train) // self._size)

    def size(self, at: At) -> int:
        return min(self._size, len(self.graph.train) - at[1] * self._size)

    def seeds(self, at: At) -> Tensor:
        """Return this rank's seeds, [s]."""
        epoch, step = at
        if self._shuffled is None or self._shuffled[0] != epoch:
            self._shuffled = epoch, self.graph.train[shuffled(len(self.graph.train), self.shared.seed, epoch)]
        first = step * self._size
        return self._shuffled[1][first : first + self.size(at)][self.shared.rank :: self.shared.ranks]

    def __getitem__(self, at: At) -> Subgraph:
        shared = self.shared
        key = fold_key(shared.seed, *at, shared.rank, DRAW)
        return subgraph_of(self.sampler.draw(self.seeds(at), key), self.graph, shared.normalize)


def shuffled(count: int, seed: int, epoch: int) -> Tensor:
    """Return the order of an epoch. Shapes: -> [count]."""
    rng = np.random.Generator(np.random.Philox(key=fold_key(seed, epoch, ORDER)))
    return torch.as_tensor(rng.permutation(count))


class Induced:
    """Subgraphs of some nodes and all edges between them, as a Sample in which every layer reads all of its nodes.

    Training nodes come first, and are the seeds: the last layer computes no others. One more hop than the model
    aggregates, so that the in-edges of all nodes are counted.
    """

    def __init__(self, edges: InEdges, train: Tensor, hops: int) -> None:
        num_nodes = len(edges.indptr) - 1
        self._edges, self._hops = edges, hops
        self._trains = torch.zeros(num_nodes, dtype=torch.bool).index_fill_(0, train, True)
        self._place = torch.full((num_nodes,), -1, dtype=torch.int64)  # of a node in the current subgraph

    @property
    def nbytes(self) -> int:
        return self._trains.nbytes + self._place.nbytes

    def of(self, nodes: Tensor) -> Sample:
        """Return the subgraph of distinct `nodes` [n], in any order."""
        nodes = nodes.sort().values
        trains = self._trains[nodes]
        nodes = torch.cat([nodes[trains], nodes[~trains]])
        seeds, all_nodes = int(trains.sum()), len(nodes)
        ends = (seeds, *[all_nodes] * (self._hops + 1))
        first = self._edges.indptr[nodes]
        counts = self._edges.indptr[nodes + 1] - first
        edges = ranges(first, counts)
        self._place[nodes] = torch.arange(all_nodes)
        sources = self._place[self._edges.sources[edges]]
        self._place[nodes] = -1
        inside = sources >= 0
        reader = torch.arange(all_nodes).repeat_interleave(counts)[inside]
        return Sample(nodes, ends, torch.bincount(reader, minlength=all_nodes), sources[inside], edges[inside])


@dataclass(eq=False)
class InducedBatches(Batches):
    """Batches of all edges between some nodes. `hops`: aggregations of the model."""

    hops: int

    def __post_init__(self) -> None:
        super().__post_init__()
        self._induced = Induced(self.graph.edges, self.graph.train, self.hops)

    @property
    def nbytes(self) -> int:
        return self._induced.nbytes


@dataclass(eq=False)
class ClusterBatches(InducedBatches):
    """A batch is a union of clusters, with the edges between them: X[clusters] -> loss of their training nodes. Every
    cluster is in one step of an epoch; the clusters of a step are dealt out over the ranks.

    `per_step` of `number` clusters are united, all ranks together. `anew`: clusters are random nodes, about equally
    many, drawn in every epoch; else those of `graph.cluster_of`.
    """

    number: int
    per_step: int
    anew: bool

    def __post_init__(self) -> None:
        super().__post_init__()
        self._held = self._cut(0)

    @staticmethod
    def of(config: Minibatch, graph: Replica, hops: Hops, shared: Shared, comm: Communicator | None) -> ClusterBatches:
        number, per_step, anew = config.clusters, config.clusters_per_batch, config.sampler == "uniform"
        return ClusterBatches(graph, shared, sum(hops), number, per_step, anew, drawn_by=config.sampler)

    @staticmethod
    def whole(config: Minibatch) -> bool:
        return config.clusters == 1

    @staticmethod
    def check(config: Minibatch, num_ranks: int, num_layers: int) -> None:
        if (per_step := config.clusters_per_batch) < num_ranks and config.clusters > 1:
            raise ValueError(
                f"strategy.clusters_per_batch={per_step} leaves {num_ranks - per_step} of {num_ranks} ranks "
                f"without a cluster: set strategy.clusters_per_batch={num_ranks} or more"
            )

    @property
    def nbytes(self) -> int:
        return self._held[1].nbytes + super().nbytes

    def __len__(self) -> int:
        return -(-len(self._held[2]) // self.per_step)

    def size(self, at: At) -> int:
        *_, train = self._clusters(at[0])
        return int(train[self._of_step(at)].sum())

    def __getitem__(self, at: At) -> Subgraph:
        _, nodes, sizes, _ = self._clusters(at[0])
        mine, first = self._of_step(at)[self.shared.rank :: self.shared.ranks], sizes.cumsum(0) - sizes
        nodes = nodes[ranges(first[mine], sizes[mine])]
        return subgraph_of(self._induced.of(nodes), self.graph, self.shared.normalize)

    def _of_step(self, at: At) -> Tensor:
        """Return the clusters of a step, of all ranks."""
        epoch, step = at
        order = shuffled(len(self._held[2]), self.shared.seed, epoch)
        return order[step * self.per_step : (step + 1) * self.per_step]

    def _clusters(self, epoch: int) -> tuple[int, Tensor, Tensor, Tensor]:
        """Return `_cut` of the epoch. `held` is local, since a thread may draw while another asks for a size."""
        held = self._held
        if self.anew and held[0] != epoch:
            self._held = held = self._cut(epoch)
        return held

    def _cut(self, epoch: int) -> tuple[int, Tensor, Tensor, Tensor]:
        """Return (epoch, nodes [N] sorted by cluster, nodes and training nodes per cluster [C])."""
        of_node = self.graph.cluster_of
        if self.anew:
            rng = np.random.Generator(np.random.Philox(key=fold_key(self.shared.seed, epoch, DRAW)))
            of_node = torch.as_tensor(rng.permutation(len(self.graph.loops))) % self.number
        assert of_node is not None
        sizes, nodes = torch.bincount(of_node), torch.argsort(of_node, stable=True)
        return epoch, nodes, sizes, torch.bincount(of_node[self.graph.train], minlength=len(sizes))
