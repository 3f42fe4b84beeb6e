"""GraphSAINT: subgraphs drawn at random, whose sums and losses are divided by how probable their edges and nodes are.

Source: Zeng, Zhou, Srivastava, Kannan, Prasanna, GraphSAINT: Graph Sampling Based Inductive Learning Method, ICLR 2020
(arXiv 1907.04931). With p_v and p_uv the probabilities that a draw holds node v, and the edge u -> v, a sum over the
in-edges of v counts an edge p_v / p_uv times, and the loss of a training node v 1 / p_v times: both are then right on
average (section 3.2). Probabilities are estimated: C_v, C_uv of `draws` draws beforehand hold v, u -> v.
Specification: docs/strategies/minibatch.md.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor

from gnnpar.parallel.sampling.batches import DRAW, ESTIMATE, At, Induced, without_rows
from gnnpar.parallel.sampling.replica import Replica
from gnnpar.parallel.sampling.view import Normalize, Subgraph, subgraph_of
from gnnpar_kernels import fold_key

Draw = Literal["node", "edge", "walk"]


class Counts(NamedTuple):
    """How many of `draws` draws held a node [N], and an in-edge [E] with both its ends, int32."""

    nodes: Tensor
    edges: Tensor
    draws: int


class NodeSets:
    """Draws of about `budget` nodes. None: all nodes, always."""

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
        weights: np.ndarray = column + graph.loops.numpy() * of_row  # squares of a column of D^-1 A, of entries 1 / d
        return weights

    @property
    def nbytes(self) -> int:
        return self._ends.nbytes

    def draw(self, key: int) -> Tensor:
        """Nodes, each once."""
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
        """With replacement, in proportion to the weights."""
        return np.searchsorted(self._ends, rng.random(count) * float(self._ends[-1]), side="right")

    def _walks(self, roots: int, rng: np.random.Generator) -> np.ndarray:
        """Against the edges, as rows travel from there; a walk ends in a node without in-edges."""
        at = rng.integers(0, self._num_nodes, roots)
        seen = [at]
        for _ in range(self._length):
            degree = self._indptr[at + 1] - self._indptr[at]
            step = self._indptr[at] + (rng.random(roots) * degree).astype(np.int64)
            at = (
                np.where(degree > 0, self._sources[np.minimum(step, len(self._sources) - 1)], at)
                if degree.any()
                else at
            )
            seen.append(at)
        return np.concatenate(seen)


def estimated(graph: Replica, sets: NodeSets, draws: int, seed: int) -> Counts:
    """From `draws` draws of their own."""
    induced = Induced(graph.edges, graph.train, hops=1)
    nodes, edges = (torch.zeros(len(each), dtype=torch.int32) for each in (graph.loops, graph.edges.sources))
    for i in range(draws):
        sample = induced.of(sets.draw(fold_key(seed, i, ESTIMATE)))
        nodes[sample.nodes] += 1
        edges[sample.edges] += 1
    return Counts(nodes, edges, draws)


class SaintBatches:
    """Every rank draws a subgraph of its own in each step. `budget`: nodes of a draw; `steps`: of an epoch."""

    def __init__(
        self,
        graph: Replica,
        sets: NodeSets,
        counts: Counts,
        *,
        steps: int,
        hops: int,
        normalize: Normalize,
        seed: int,
        rank: int,
        ranks: int,
    ) -> None:
        self._graph, self._induced = without_rows(graph), Induced(graph.edges, graph.train, hops)
        self._sets, self._counts = sets, counts
        self._normalize: Normalize = normalize
        self._steps, self._seed, self._rank, self._ranks = steps, seed, rank, ranks

    @property
    def total(self) -> int:
        return self._steps * self._ranks * len(self._graph.train)

    @property
    def nbytes(self) -> int:
        counts = self._counts.nodes.nbytes + self._counts.edges.nbytes
        return self._sets.nbytes + self._induced.nbytes + counts

    def __len__(self) -> int:
        return self._steps

    def size(self, at: At) -> int:
        return self._ranks * len(self._graph.train)

    def __getitem__(self, at: At) -> Subgraph:
        epoch, step = at
        sample = self._induced.of(self._sets.draw(fold_key(self._seed, epoch, step, self._rank, DRAW)))
        if self._normalize == "subgraph":
            return subgraph_of(sample, self._graph, "subgraph")
        readers = torch.arange(len(sample.counts)).repeat_interleave(sample.counts)
        dtype = self._graph.in_degree.dtype
        of_node = self._counts.nodes[sample.nodes].clamp_min(1).to(dtype)
        of_edge = self._counts.edges[sample.edges].clamp_min(1).to(dtype)
        sub = subgraph_of(sample, self._graph, "graph", weights=of_node[readers] / of_edge)
        return sub._replace(loss_weight=self._counts.draws / of_node[: sample.ends[0]])
