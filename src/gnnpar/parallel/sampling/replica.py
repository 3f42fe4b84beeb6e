"""The whole graph on every rank, assembled from the ranks' shards, for sampled training."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from gnnpar.comm import Communicator
from gnnpar.parallel.edges import in_edges
from gnnpar.parallel.sampling.neighbours import InEdges
from gnnpar.partition.shard import Shard


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
