"""A batch is a union of clusters, with the edges between them: X[clusters] -> loss of their training nodes.

ClusterGCN: Chiang, Liu, Si, Li, Bengio, Hsieh, Cluster-GCN: An Efficient Algorithm for Training Deep and Large Graph
Convolutional Networks, KDD 2019 (arXiv 1905.07953), section 3.2: clusters are parts of a graph partitioner, and a step
unites some of them, drawn anew in every epoch. Random nodes: Wang, Vialle, Vaysse, Bonald, Implicit Regularization of
Mini-Batch Training in Graph Neural Networks, 2026 (arXiv 2605.22480): clusters are a random partition of the nodes,
drawn anew in every epoch, as PyG's RandomNodeLoader draws it. Specification: docs/strategies/minibatch.md.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from gnnpar.parallel.sampling.batches import DRAW, At, Induced, shuffled, without_rows
from gnnpar.parallel.sampling.replica import Replica
from gnnpar.parallel.sampling.view import Normalize, Subgraph, ranges, subgraph_of
from gnnpar_kernels import fold_key


class _Clusters(NamedTuple):
    """`drawn`: the epoch, 0 for clusters that stay. `nodes` [N]: cluster by cluster; of each cluster the place of its
    first node, and its numbers of nodes and of training nodes."""

    drawn: int
    nodes: Tensor
    first: Tensor
    sizes: Tensor
    train: Tensor


class ClusterBatches:
    """Every cluster is in one step of an epoch. `per_step`: clusters of a step, dealt out over the ranks. `drawn`: so
    many clusters of N / drawn nodes, drawn anew in every epoch; None: `cluster_of` of the graph."""

    def __init__(
        self,
        graph: Replica,
        *,
        drawn: int | None,
        per_step: int,
        hops: int,
        normalize: Normalize,
        seed: int,
        rank: int,
        ranks: int,
    ) -> None:
        self._graph, self._induced = without_rows(graph), Induced(graph.edges, graph.train, hops)
        self._normalize: Normalize = normalize
        self._per_step, self._seed, self._rank, self._ranks = per_step, seed, rank, ranks
        self._drawn = drawn
        self._held = self._cut(0)

    @property
    def total(self) -> int:
        return len(self._graph.train)

    @property
    def nbytes(self) -> int:
        return self._held.nodes.nbytes + self._induced.nbytes

    def __len__(self) -> int:
        return -(-len(self._held.sizes) // self._per_step)

    def size(self, at: At) -> int:
        return int(self._clusters(at[0]).train[self._of_step(at)].sum())

    def __getitem__(self, at: At) -> Subgraph:
        clusters, mine = self._clusters(at[0]), self._of_step(at)[self._rank :: self._ranks]
        sizes = clusters.sizes[mine]
        nodes = clusters.nodes[ranges(clusters.first[mine], sizes, int(sizes.sum()))]
        return subgraph_of(self._induced.of(nodes), self._graph, self._normalize)

    def _of_step(self, at: At) -> Tensor:
        """Clusters of all ranks."""
        epoch, step = at
        order = shuffled(len(self._held.sizes), self._seed, epoch)
        return order[step * self._per_step : (step + 1) * self._per_step]

    def _clusters(self, epoch: int) -> _Clusters:
        """Of an epoch. A local name, since a thread may draw while another asks for a size."""
        held = self._held
        if self._drawn and held.drawn != epoch:
            self._held = held = self._cut(epoch)
        return held

    def _cut(self, epoch: int) -> _Clusters:
        of_node = self._graph.cluster_of
        if self._drawn:
            rng = np.random.Generator(np.random.Philox(key=fold_key(self._seed, epoch, DRAW)))
            of_node = torch.as_tensor(rng.permutation(len(self._graph.loops))) % self._drawn
        assert of_node is not None
        sizes = torch.bincount(of_node)
        train = torch.bincount(of_node[self._graph.train], minlength=len(sizes))
        return _Clusters(epoch, torch.argsort(of_node, stable=True), sizes.cumsum(0) - sizes, sizes, train)
