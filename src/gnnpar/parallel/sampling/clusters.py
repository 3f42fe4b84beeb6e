"""A batch is a union of clusters, with the edges between them: X[clusters] -> loss of their training nodes.

ClusterGCN: Chiang, Liu, Si, Li, Bengio, Hsieh, Cluster-GCN: An Efficient Algorithm for Training Deep and Large Graph
Convolutional Networks, KDD 2019 (arXiv 1905.07953), section 3.2: clusters are parts of a graph partitioner, and a step
unites some of them, drawn anew in every epoch. Random nodes: Wang, Vialle, Vaysse, Bonald, Implicit Regularization of
Mini-Batch Training in Graph Neural Networks, 2026 (arXiv 2605.22480): clusters are a random partition of the nodes,
drawn anew in every epoch, as PyG's RandomNodeLoader draws it. Specification: docs/strategies/minibatch.md.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from gnnpar.comm import Communicator
from gnnpar.parallel.sampling.batches import DRAW, At, Batches, Hops, Induced, Shared, shuffled
from gnnpar.parallel.sampling.replica import Replica
from gnnpar.parallel.sampling.view import Normalize, Subgraph, ranges, subgraph_of
from gnnpar_kernels import fold_key


@dataclass(eq=False)
class ClusterBatches(Batches):
    """Every cluster is in one step of an epoch; the clusters of a step are dealt out over the ranks. `hops`: of the
    model. Clusters are those of `graph.cluster_of`, or random ones of about equal size."""

    clusters: Clusters
    hops: int

    def __post_init__(self) -> None:
        super().__post_init__()
        self._induced = Induced(self.graph.edges, self.graph.train, self.hops)
        self._held = self._cut(0)

    @property
    def nbytes(self) -> int:
        return self._held[1].nbytes + self._induced.nbytes

    def __len__(self) -> int:
        return -(-len(self._held[2]) // self.clusters.per_step)

    def size(self, at: At) -> int:
        *_, train = self._clusters(at[0])
        return int(train[self._of_step(at)].sum())

    def __getitem__(self, at: At) -> Subgraph:
        _, nodes, sizes, _ = self._clusters(at[0])
        mine, first = self._of_step(at)[self.shared.rank :: self.shared.ranks], sizes.cumsum(0) - sizes
        nodes = nodes[ranges(first[mine], sizes[mine], int(sizes[mine].sum()))]
        return subgraph_of(self._induced.of(nodes), self.graph, self.shared.normalize)

    def _of_step(self, at: At) -> Tensor:
        """Return the clusters of a step, of all ranks."""
        epoch, step = at
        order, count = shuffled(len(self._held[2]), self.shared.seed, epoch), self.clusters.per_step
        return order[step * count : (step + 1) * count]

    def _clusters(self, epoch: int) -> tuple[int, Tensor, Tensor, Tensor]:
        """Return `_cut` of the epoch. `held` is local, since a thread may draw while another asks for a size."""
        held = self._held
        if self.clusters.anew and held[0] != epoch:
            self._held = held = self._cut(epoch)
        return held

    def _cut(self, epoch: int) -> tuple[int, Tensor, Tensor, Tensor]:
        """Return (epoch, nodes [N] sorted by cluster, nodes and training nodes per cluster [C])."""
        of_node = self.graph.cluster_of
        if self.clusters.anew:
            rng = np.random.Generator(np.random.Philox(key=fold_key(self.shared.seed, epoch, DRAW)))
            of_node = torch.as_tensor(rng.permutation(len(self.graph.loops))) % self.clusters.number
        assert of_node is not None
        sizes, nodes = torch.bincount(of_node), torch.argsort(of_node, stable=True)
        return epoch, nodes, sizes, torch.bincount(of_node[self.graph.train], minlength=len(sizes))


@dataclass(frozen=True)
class Clusters:
    """Unite `per_step` of `number` clusters. `anew`: clusters are random nodes, drawn in every epoch."""

    number: int
    per_step: int
    anew: bool

    def __post_init__(self) -> None:
        if self.per_step > self.number:
            raise ValueError(
                f"strategy.clusters_per_batch={self.per_step} of strategy.clusters={self.number}: a batch "
                "cannot unite more clusters than there are; lower it, or raise strategy.clusters"
            )

    def whole(self, normalize: Normalize) -> bool:
        return self.number == 1

    def check(self, num_ranks: int, num_layers: int) -> None:
        if self.per_step < num_ranks and self.number > 1:
            raise ValueError(
                f"strategy.clusters_per_batch={self.per_step} leaves {num_ranks - self.per_step} of {num_ranks} ranks "
                f"without a cluster: set strategy.clusters_per_batch={num_ranks} or more"
            )

    def batches(self, graph: Replica, hops: Hops, shared: Shared, comm: Communicator | None) -> tuple[Batches, str]:
        return ClusterBatches(graph, shared, self, sum(hops)), "uniform" if self.anew else "cluster"
