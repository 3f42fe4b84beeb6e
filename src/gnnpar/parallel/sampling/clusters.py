"""A batch is a union of clusters, with the edges between them: X[clusters] -> loss of their training nodes.

ClusterGCN: Chiang, Liu, Si, Li, Bengio, Hsieh, Cluster-GCN: An Efficient Algorithm for Training Deep and Large Graph
Convolutional Networks, KDD 2019 (arXiv 1905.07953), section 3.2: clusters are parts of a graph partitioner, and a step
unites some of them, drawn anew in every epoch. Random nodes: Wang, Vialle, Vaysse, Bonald, Implicit Regularization of
Mini-Batch Training in Graph Neural Networks, 2026 (arXiv 2605.22480): clusters are a random partition of the nodes,
drawn anew in every epoch, as PyG's RandomNodeLoader draws it. Specification: docs/strategies/minibatch.md.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from gnnpar.comm import Communicator
from gnnpar.parallel.sampling.batches import DRAW, At, Hops, InducedBatches, Shared, shuffled
from gnnpar.parallel.sampling.replica import Replica
from gnnpar.parallel.sampling.view import Subgraph, ranges, subgraph_of
from gnnpar_kernels import fold_key

if TYPE_CHECKING:
    from gnnpar.parallel.sampling.strategy import Minibatch


@dataclass(eq=False)
class ClusterBatches(InducedBatches):
    """Every cluster is in one step of an epoch; the clusters of a step are dealt out over the ranks.

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
