"""ClusterGCN: a batch is a union of clusters, with the edges between them: X[clusters] -> loss of their training nodes.

Source: Chiang, Liu, Si, Li, Bengio, Hsieh, Cluster-GCN: An Efficient Algorithm for Training Deep and Large Graph
Convolutional Networks, KDD 2019 (arXiv 1905.07953), section 3.2: clusters are parts of a graph partitioner, and a step
unites some of them, drawn anew in every epoch. Specification: docs/strategies/minibatch.md.
"""

from __future__ import annotations

import torch
from torch import Tensor

from gnnpar.parallel.sampling.batches import At, Induced, shuffled, without_rows
from gnnpar.parallel.sampling.replica import Replica
from gnnpar.parallel.sampling.view import Normalize, Subgraph, ranges, subgraph_of


class ClusterBatches:
    """Every cluster is in one step of an epoch. `per_step`: clusters of a step, dealt out over the ranks."""

    def __init__(
        self, graph: Replica, *, per_step: int, hops: int, normalize: Normalize, seed: int, rank: int, ranks: int
    ) -> None:
        assert graph.cluster_of is not None
        self._graph, self._induced = without_rows(graph), Induced(graph.edges, graph.train, hops)
        self._normalize: Normalize = normalize
        self._per_step, self._seed, self._rank, self._ranks = per_step, seed, rank, ranks
        self._nodes = torch.argsort(graph.cluster_of, stable=True)  # cluster by cluster
        sizes = torch.bincount(graph.cluster_of)
        self._first, self._sizes = sizes.cumsum(0) - sizes, sizes
        self._train = torch.bincount(graph.cluster_of[graph.train], minlength=len(sizes))

    @property
    def total(self) -> int:
        return len(self._graph.train)

    @property
    def nbytes(self) -> int:
        return self._nodes.nbytes + self._induced.nbytes

    def __len__(self) -> int:
        return -(-len(self._sizes) // self._per_step)

    def size(self, at: At) -> int:
        return int(self._train[self._clusters(at)].sum())

    def __getitem__(self, at: At) -> Subgraph:
        mine = self._clusters(at)[self._rank :: self._ranks]
        sizes = self._sizes[mine]
        nodes = self._nodes[ranges(self._first[mine], sizes, int(sizes.sum()))]
        return subgraph_of(self._induced.of(nodes), self._graph, self._normalize)

    def _clusters(self, at: At) -> Tensor:
        """Of all ranks."""
        epoch, step = at
        return shuffled(len(self._sizes), self._seed, epoch)[step * self._per_step : (step + 1) * self._per_step]
