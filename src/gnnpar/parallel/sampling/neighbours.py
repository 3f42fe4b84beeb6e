"""Uniform neighbour sampling: of every node up to `fanout` of its in-edges, without replacement, hop after hop.

Source: Hamilton, Ying and Leskovec 2017 (arXiv 1706.02216), section 3.1, as in PyG's NeighborLoader: a node is expanded
once, at the hop at which it is first reached. NeighborLoader draws if pyg-lib is installed, else `Uniform`, in numpy.
NeighborLoader with torch-sparse draws only for sampler=pyg: up to 0.6.18 its draw without replacement is not uniform
(ADR 0029). Equal keys give equal samples of one implementation.

`Replica` is the whole graph on every rank, assembled from the ranks' shards, from which samples are drawn.
"""

# PyG has no stubs, and torch declares no types of its random state
# pyright: reportMissingTypeStubs=false, reportUnknownMemberType=false

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor

from gnnpar.comm import Communicator
from gnnpar.parallel.edges import in_edges
from gnnpar.partition.shard import Shard
from gnnpar.seeding import torch_seeded

Body = Literal["auto", "pyg", "own"]


class InEdges(NamedTuple):
    """In-edges, CSR by destination, on a CPU. Shapes: indptr [N + 1], sources [E], both int64."""

    indptr: Tensor
    sources: Tensor


class Sample(NamedTuple):
    """The nodes and edges drawn around some seeds.

    Shapes: nodes [n] global ids, the seeds first, then hop by hop; ends: numbers of nodes within 0, 1, ... hops; counts
    [m]: in-edges drawn of each node within all hops but the last; sources [e] positions in `nodes`, by destination;
    edges [e] their positions in InEdges.
    """

    nodes: Tensor
    ends: tuple[int, ...]
    counts: Tensor
    sources: Tensor
    edges: Tensor


def native() -> str | None:
    """Return the installed package that NeighborLoader draws with, without importing it, or None."""
    return next((name for name in ("pyg_lib", "torch_sparse") if find_spec(name) is not None), None)


class Uniform:
    """All sets of `fanout` in-edges of a node are equally likely. Picklable: worker processes draw too."""

    def __init__(self, graph: InEdges, fanout: Sequence[int]) -> None:
        self._indptr, self._sources = graph.indptr.numpy(), graph.sources.numpy()
        self._fanout = tuple(fanout)
        self._place = np.full(len(self._indptr) - 1, -1, np.int64)  # of a node in the current sample

    def draw(self, seeds: Tensor, key: int) -> Sample:
        """Draw around distinct `seeds` [s], a function of the key."""
        rng = np.random.Generator(np.random.Philox(key=key))
        hops: list[np.ndarray] = [seeds.numpy()]
        counts: list[np.ndarray] = [np.empty(0, np.int64)]
        edges: list[np.ndarray] = [np.empty(0, np.int64)]
        reached: list[np.ndarray] = [np.empty(0, np.int64)]  # sources of the edges
        ends = [len(seeds)]
        self._place[hops[0]] = np.arange(ends[0])
        for fanout in self._fanout:
            of_node, places = self._expand(hops[-1], fanout, rng)
            counts.append(of_node)
            edges.append(places)
            reached.append(self._sources[places])
            hops.append(self._fresh(reached[-1]))
            self._place[hops[-1]] = np.arange(ends[-1], ends[-1] + len(hops[-1]))
            ends.append(ends[-1] + len(hops[-1]))
        nodes = np.concatenate(hops)
        sources = self._place[np.concatenate(reached)]
        self._place[nodes] = -1
        arrays = (torch.as_tensor(each) for each in (nodes, np.concatenate(counts), sources, np.concatenate(edges)))
        return Sample(next(arrays), tuple(ends), *arrays)

    def _expand(self, nodes: np.ndarray, fanout: int, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
        """Return the number of in-edges drawn of each node, and their places."""
        first = self._indptr[nodes]
        degree = self._indptr[nodes + 1] - first
        counts = degree if fanout < 0 else np.minimum(degree, fanout)
        within = np.arange(int(counts.sum())) - np.repeat(np.cumsum(counts) - counts, counts)
        more = degree > counts
        if fanout > 0 and more.any():
            within[np.repeat(more, counts)] = distinct(degree[more], fanout, rng).ravel()
        return counts, np.repeat(first, counts) + within

    def _fresh(self, ids: np.ndarray) -> np.ndarray:
        """Return the distinct ids that are not in the sample yet."""
        new = ids[self._place[ids] < 0]
        order = np.arange(len(new))
        self._place[new] = order  # of equal ids the last one stays
        return new[self._place[new] == order]


def distinct(below: np.ndarray, count: int, rng: np.random.Generator) -> np.ndarray:
    """Return `count` distinct numbers below each of `below` [n] > count, ascending; all sets are equally likely (Floyd
    1987).

    Shapes: -> [n, count]. Takes n count^2 comparisons: for small counts.
    """
    chosen = np.empty((count, len(below)), np.int64)  # one row per draw: comparing whole rows is twice as fast
    for i in range(count):
        last = below - count + i
        drawn = rng.integers(0, last + 1)
        chosen[i] = np.where((chosen[:i] == drawn).any(0), last, drawn)
    return np.sort(chosen.T, axis=1)


class Loader:
    """PyG's NeighborLoader, called once per step with gnnpar's batches and keys."""

    def __init__(self, graph: InEdges, fanout: Sequence[int]) -> None:
        from torch_geometric.data import Data
        from torch_geometric.loader import NeighborLoader

        num_nodes = len(graph.indptr) - 1
        targets = torch.arange(num_nodes).repeat_interleave(graph.indptr.diff())
        data = Data(edge_index=torch.stack([graph.sources, targets]), num_nodes=num_nodes)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the hint that pyg-lib is faster than torch-sparse
            loader: Any = NeighborLoader(data, num_neighbors=list(fanout), batch_size=1, is_sorted=True)
        self._loader = loader  # Any: PyG's loaders are not typed
        self._hops = len(fanout)

    def draw(self, seeds: Tensor, key: int) -> Sample:
        with torch_seeded(key >> 1):
            out = self._loader(seeds)
        sources, targets = out.edge_index
        order = torch.argsort(targets, stable=True)
        sources, targets, edges = sources[order], targets[order], out.e_id[order]
        ends = [len(seeds)]
        for _ in range(self._hops):  # nodes come in the order in which they were reached
            reached = sources[: int(torch.searchsorted(targets, ends[-1]))]
            ends.append(max(ends[-1], int(reached.max()) + 1 if len(reached) else 0))
        counts = torch.bincount(targets, minlength=ends[-2])
        return Sample(out.n_id, tuple(ends), counts, sources, edges)


Sampler = Uniform | Loader


def sampler_of(graph: InEdges, fanout: Sequence[int], body: Body) -> tuple[Sampler, str]:
    """Return a sampler, and the package that it draws with. `fanout`: in-edges of a node, by hop from the seeds; -1:
    all."""
    library = native()
    if body == "own" or (body == "auto" and library != "pyg_lib"):
        return Uniform(graph, fanout), "own"
    if library is None:
        raise ValueError(
            "strategy.sampler=pyg needs pyg-lib or torch-sparse, and neither is installed: "
            'run pip install "gnnpar[sparse]" (or make sparse), or set strategy.sampler=own.'
        )
    return Loader(graph, fanout), library


@dataclass(frozen=True, eq=False)
class Replica:
    """N nodes. Features and labels are on the device, all else on the CPU, where neighbours are drawn.

    Shapes: x [N, F]; y [N] or [N, C]; in_degree [N], in the dtype of x; train [T] training nodes, ascending; edges
    between different nodes; loops [N]: number of self loops of each node, first_loop [N]: of all nodes before it;
    edge_ids, loop_ids: the global ids of both, in their order (None: they are not read); cluster_of [N]: the cluster of
    each node (None: there are none).
    """

    x: Tensor
    y: Tensor
    in_degree: Tensor
    train: Tensor
    edges: InEdges
    loops: Tensor
    first_loop: Tensor
    edge_ids: Tensor | None
    loop_ids: Tensor | None
    cluster_of: Tensor | None
    shared: bool  # x and y are the shard's, which is the whole graph

    @staticmethod
    def of(
        x: Tensor,
        y: Tensor,
        edges: Tensor,
        in_degree: Tensor,
        train_mask: Tensor,
        cluster_of: Tensor | None = None,
        *,
        edge_ids: bool,
        shared: bool,
    ) -> Replica:
        """Return the replica of a graph. Shapes: edges [2, E] (source, destination), in any order. An edge's id is its
        place in the order of (destination, source)."""
        num_nodes = len(in_degree)
        key = (edges[1] * num_nodes + edges[0]).sort().values
        src, dst = key % num_nodes, key // num_nodes
        is_loop = src == dst
        counts, loops = (torch.bincount(dst[each], minlength=num_nodes) for each in (~is_loop, is_loop))
        in_edges = InEdges(torch.cat([counts.new_zeros(1), counts.cumsum(0)]), src[~is_loop])
        ids, loop_ids = (mask.nonzero().flatten() if edge_ids else None for mask in (~is_loop, is_loop))
        train, first_loop = train_mask.nonzero().flatten(), loops.cumsum(0) - loops
        return Replica(x, y, in_degree, train, in_edges, loops, first_loop, ids, loop_ids, cluster_of, shared)

    @property
    def features_nbytes(self) -> int:
        """Return the bytes held in addition to the shard's."""
        rows = () if self.shared else (self.x, self.y)
        return _nbytes(*rows, self.in_degree, self.train)

    @property
    def structure_nbytes(self) -> int:
        return _nbytes(*self.edges, self.loops, self.first_loop, self.edge_ids, self.loop_ids, self.cluster_of)


def _nbytes(*tensors: Tensor | None) -> int:
    return sum(t.nbytes for t in tensors if t is not None)


def replica_of(shard: Shard, comm: Communicator, *, edge_ids: bool) -> Replica:
    """Return the replica. Collective. Not counted, as part of the set-up."""
    alone = comm.size == 1
    clusters = shard.node_ids if shard.chunk_of is None else shard.chunk_of
    rows = (shard.node_ids, shard.in_degree, shard.train_mask, clusters, *(() if alone else (shard.x, shard.y)))
    mine = (*(t.cpu() for t in rows), torch.stack(in_edges(shard)[:2]))
    ids, in_degree, train, of_cluster, *x_and_y, edges = zip(*comm.all_gather(mine), strict=True)
    order = torch.cat(ids).argsort()
    x, y = (torch.cat(parts)[order].to(comm.device) for parts in x_and_y) if x_and_y else (shard.x, shard.y)
    in_degree, train, of_cluster = (torch.cat(parts)[order] for parts in (in_degree, train, of_cluster))
    cluster_of = None if shard.chunk_of is None else of_cluster
    return Replica.of(x, y, torch.cat(edges, 1), in_degree, train, cluster_of, edge_ids=edge_ids, shared=alone)
