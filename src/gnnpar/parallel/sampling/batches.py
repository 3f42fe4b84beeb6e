"""Which nodes a rank trains on in each step of an epoch, whoever draws them; and the batches of neighbour sampling.

A rank's batch is a function of (seed, epoch, step, rank) alone: worker processes draw ahead, and draw the same.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from gnnpar.parallel.sampling.neighbours import InEdges, Sample, Sampler
from gnnpar.parallel.sampling.replica import Replica
from gnnpar.parallel.sampling.view import Normalize, Subgraph, ranges, subgraph_of
from gnnpar_kernels import fold_key

At = tuple[int, int]  # epoch, step
ORDER, DRAW, ESTIMATE = 1, 2, 4  # what a key is for; 3 is the engine's masks


class Batches(Protocol):
    """This rank's subgraph of every step. Picklable."""

    @property
    def total(self) -> int:
        """Sizes of all steps of an epoch together."""
        ...

    @property
    def nbytes(self) -> int:
        """Of tables that lie beside the graph."""
        ...

    def __len__(self) -> int:
        """Return the number of steps of an epoch."""
        ...

    def size(self, at: At) -> int:
        """Return the divisor of a step's loss, which is summed over its training nodes of all ranks."""
        ...

    def __getitem__(self, at: At) -> Subgraph: ...


class SeedBatches:
    """Neighbour sampling: every training node is a seed once an epoch. `batch_size`: seeds of a step, all ranks."""

    def __init__(
        self,
        graph: Replica,
        sampler: Sampler,
        *,
        batch_size: int | None,
        normalize: Normalize,
        seed: int,
        rank: int,
        ranks: int,
    ) -> None:
        self._graph = without_rows(graph)
        self._sampler = sampler
        self._normalize: Normalize = normalize
        self._seed, self._rank, self._ranks = seed, rank, ranks
        self._size = batch_size or len(graph.train)
        self._shuffled: tuple[int, Tensor] | None = None

    @property
    def total(self) -> int:
        return len(self._graph.train)

    @property
    def nbytes(self) -> int:
        return 0

    def __len__(self) -> int:
        return -(-len(self._graph.train) // self._size)

    def size(self, at: At) -> int:
        return min(self._size, len(self._graph.train) - at[1] * self._size)

    def seeds(self, at: At) -> Tensor:
        """Return this rank's seeds, [s]."""
        epoch, step = at
        if self._shuffled is None or self._shuffled[0] != epoch:
            order = shuffled(len(self._graph.train), self._seed, epoch)
            self._shuffled = epoch, self._graph.train[order]
        first = step * self._size
        return self._shuffled[1][first : first + self.size(at)][self._rank :: self._ranks]

    def __getitem__(self, at: At) -> Subgraph:
        epoch, step = at
        key = fold_key(self._seed, epoch, step, self._rank, DRAW)
        return subgraph_of(self._sampler.draw(self.seeds(at), key), self._graph, self._normalize)


def without_rows(graph: Replica) -> Replica:
    """Rows stay with the engine: a worker that is started afresh would get a copy of them."""
    return replace(graph, x=graph.x[:0].cpu(), y=graph.y[:0].cpu())


def shuffled(count: int, seed: int, epoch: int) -> Tensor:
    """Return the order of an epoch. Shapes: -> [count]."""
    rng = np.random.Generator(np.random.Philox(key=fold_key(seed, epoch, ORDER)))
    return torch.as_tensor(rng.permutation(count))


class Induced:
    """Subgraphs of some nodes and all edges between them, as a Sample in which every layer reads all of its nodes.

    Training nodes come first, and are the seeds: the last layer computes no others. One more hop than layers aggregate,
    so that edges of all nodes are there to be counted.
    """

    def __init__(self, edges: InEdges, train: Tensor, hops: int) -> None:
        num_nodes = len(edges.indptr) - 1
        self._edges, self._hops = edges, hops
        self._trains = torch.zeros(num_nodes, dtype=torch.bool).index_fill_(0, train, True)
        self._place = torch.full((num_nodes,), -1, dtype=torch.int64)  # of a node in the subgraph at hand

    @property
    def nbytes(self) -> int:
        return self._trains.nbytes + self._place.nbytes

    def of(self, nodes: Tensor) -> Sample:
        """Shapes: nodes [n], each once, in any order."""
        nodes = nodes.sort().values
        trains = self._trains[nodes]
        nodes = torch.cat([nodes[trains], nodes[~trains]])
        seeds, all_nodes = int(trains.sum()), len(nodes)
        ends = (seeds, *[all_nodes] * (self._hops + 1))
        first = self._edges.indptr[nodes]
        counts = self._edges.indptr[nodes + 1] - first
        edges = ranges(first, counts, int(counts.sum()))
        self._place[nodes] = torch.arange(all_nodes)
        sources = self._place[self._edges.sources[edges]]
        self._place[nodes] = -1
        inside = sources >= 0
        reader = torch.arange(all_nodes).repeat_interleave(counts)[inside]
        return Sample(nodes, ends, torch.bincount(reader, minlength=all_nodes), sources[inside], edges[inside])
