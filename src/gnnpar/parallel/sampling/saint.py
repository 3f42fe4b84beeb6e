"""GraphSAINT: random subgraphs, with sums and losses divided by the probabilities of edges and nodes.

Source: Zeng, Zhou, Srivastava, Kannan, Prasanna, GraphSAINT: Graph Sampling Based Inductive Learning Method, ICLR 2020
(arXiv 1907.04931). Let p_v and p_uv be the probabilities that a draw holds node v, and the edge u -> v. A sum over the
in-edges of v weights an edge by p_v / p_uv, and the loss of a training node v by 1 / p_v: both are unbiased (section
3.2). Probabilities are estimated by `draws` draws at the start: C_v of these hold v, and C_uv hold u -> v.
Specification: docs/strategies/minibatch.md.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor

from gnnpar.comm import Communicator
from gnnpar.parallel.sampling.batches import DRAW, ESTIMATE, At, Hops, Induced, InducedBatches, Shared
from gnnpar.parallel.sampling.neighbours import Replica
from gnnpar.parallel.sampling.view import Subgraph, subgraph_of
from gnnpar_kernels import fold_key

if TYPE_CHECKING:
    from gnnpar.parallel.sampling.strategy import Minibatch

Draw = Literal["node", "edge", "walk"]


class Counts(NamedTuple):
    """Number of `draws` draws that held a node [N], or both ends of an in-edge [E], int32."""

    nodes: Tensor
    edges: Tensor
    draws: int


class NodeSets:
    """Draws of about `budget` nodes; None: always all nodes."""

    def __init__(self, graph: Replica, draw: Draw, budget: int | None, walk_length: int) -> None:
        self._indptr, self._sources = graph.edges.indptr.numpy(), graph.edges.sources.numpy()
        self._num_nodes, self._draw, self._budget = len(self._indptr) - 1, draw, budget
        self._length = walk_length
        self._ends: np.ndarray = np.empty(0)
        if draw == "edge" and not len(self._sources):
            raise ValueError("strategy.saint=edge draws edges, and the graph has none: set strategy.saint=node")
        if draw != "walk" and budget is not None:
            self._ends = self._weights(graph).cumsum()

    def _weights(self, graph: Replica) -> np.ndarray:
        """Return the weights of draws: of nodes [N], or of edges [E]."""
        degrees: np.ndarray = np.maximum(np.diff(self._indptr), 1).astype(np.float64)
        targets = np.repeat(np.arange(self._num_nodes), np.diff(self._indptr))
        if self._draw == "edge":
            ends: np.ndarray = 1 / degrees[self._sources] + 1 / degrees[targets]
            return ends
        of_row = 1 / np.maximum(graph.in_degree.double().cpu().numpy(), 1) ** 2
        column = np.bincount(self._sources, weights=of_row[targets], minlength=self._num_nodes)
        weights: np.ndarray = column + graph.loops.numpy() * of_row  # squares of a column of D^-1 A, with entries 1 / d
        return weights

    @property
    def nbytes(self) -> int:
        return self._ends.nbytes

    def draw(self, key: int) -> Tensor:
        """Return distinct nodes, ascending."""
        if self._budget is None:
            return torch.arange(self._num_nodes)
        rng = np.random.Generator(np.random.Philox(key=key))
        if self._draw == "walk":
            nodes = self._walks(max(1, self._budget // (self._length + 1)), rng)
        elif self._draw == "node":
            nodes = self._chosen(self._budget, rng)
        else:
            edges = self._chosen(max(1, self._budget // 2), rng)
            nodes = np.concatenate([self._sources[edges], np.searchsorted(self._indptr, edges, side="right") - 1])
        return torch.as_tensor(np.unique(nodes))

    def _chosen(self, count: int, rng: np.random.Generator) -> np.ndarray:
        """Draw with replacement, in proportion to the weights."""
        return np.searchsorted(self._ends, rng.random(count) * float(self._ends[-1]), side="right")

    def _walks(self, roots: int, rng: np.random.Generator) -> np.ndarray:
        """Walk against the edges, to the rows that are read; a walk ends in a node without in-edges."""
        at = rng.integers(0, self._num_nodes, roots)
        seen = [at]
        for _ in range(self._length):
            degree = self._indptr[at + 1] - self._indptr[at]
            step = self._indptr[at] + (rng.random(roots) * degree).astype(np.int64)
            if degree.any():
                at = np.where(degree > 0, self._sources[np.minimum(step, len(self._sources) - 1)], at)
            seen.append(at)
        return np.concatenate(seen)


def estimated(graph: Replica, sets: NodeSets, draws: int, seed: int) -> Counts:
    """Return the counts of `draws` draws with separate keys."""
    induced = Induced(graph.edges, graph.train, hops=1)
    nodes, edges = (torch.zeros(len(each), dtype=torch.int32) for each in (graph.loops, graph.edges.sources))
    for i in range(draws):
        sample = induced.of(sets.draw(fold_key(seed, i, ESTIMATE)))
        nodes[sample.nodes] += 1
        edges[sample.edges] += 1
    return Counts(nodes, edges, draws)


@dataclass(eq=False)
class SaintBatches(InducedBatches):
    """Every rank draws its own subgraph in each step, of about `batch_size` nodes on all ranks together, all edges
    between them, or of all nodes on every rank. `steps`: of an epoch."""

    sets: NodeSets
    counts: Counts
    steps: int

    @staticmethod
    def of(config: Minibatch, graph: Replica, hops: Hops, shared: Shared, comm: Communicator | None) -> SaintBatches:
        num_nodes = len(graph.loops)
        size = min(config.batch_size or num_nodes, num_nodes)
        budget = None if config.batch_size is None else max(1, size // shared.ranks)
        sets, counts = NodeSets(graph, config.saint, budget, config.walk_length), None
        if comm is None or comm.rank == 0:
            draws = 1 if budget is None else -(-config.coverage * num_nodes // budget)
            counts = estimated(graph, sets, draws, shared.seed)
        counts = counts if comm is None else comm.broadcast(counts)
        assert counts is not None
        steps = -(-num_nodes // size)
        return SaintBatches(graph, shared, sum(hops), sets, counts, steps, drawn_by=f"saint, {config.saint}")

    @staticmethod
    def whole(config: Minibatch) -> bool:
        return config.batch_size is None

    @staticmethod
    def check(config: Minibatch, num_ranks: int, num_layers: int) -> None:
        if config.batch_size is not None and config.batch_size < num_ranks:
            raise ValueError(
                f"strategy.batch_size={config.batch_size} is less than a node for each of {num_ranks} ranks: set "
                f"strategy.batch_size={num_ranks} or more"
            )

    @property
    def nbytes(self) -> int:
        return self.sets.nbytes + super().nbytes + self.counts.nodes.nbytes + self.counts.edges.nbytes

    def __len__(self) -> int:
        return self.steps

    def size(self, at: At) -> int:
        return self.shared.ranks * len(self.graph.train)

    def __getitem__(self, at: At) -> Subgraph:
        sample = self._induced.of(self.sets.draw(fold_key(self.shared.seed, *at, self.shared.rank, DRAW)))
        if self.shared.normalize == "subgraph":
            return subgraph_of(sample, self.graph, "subgraph")
        readers = torch.arange(len(sample.counts)).repeat_interleave(sample.counts)
        dtype = self.graph.in_degree.dtype
        of_node = self.counts.nodes[sample.nodes].clamp_min(1).to(dtype)
        of_edge = self.counts.edges[sample.edges].clamp_min(1).to(dtype)
        sub = subgraph_of(sample, self.graph, "graph", weights=of_node[readers] / of_edge)
        return sub._replace(loss_weight=self.counts.draws / of_node[: sample.ends[0]])
