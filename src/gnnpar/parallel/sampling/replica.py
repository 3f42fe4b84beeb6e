"""The whole graph on every rank, assembled from the ranks' shards, for sampled training."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from gnnpar.comm import Communicator
from gnnpar.data.dataset import Dataset
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
    clusters = shard.node_ids[:0] if shard.chunk_of is None else shard.chunk_of
    rows = (shard.node_ids, shard.train_mask, shard.in_degree, clusters, *(() if alone else (shard.x, shard.y)))
    mine = (*(t.cpu() for t in rows), torch.stack(in_edges(shard)[:2]))
    ids, train, in_degree, of_cluster, *x_and_y, edges = zip(*comm.all_gather(mine), strict=True)
    order = torch.cat(ids).argsort()
    x, y = (torch.cat(parts)[order].to(comm.device) for parts in x_and_y) if x_and_y else (shard.x, shard.y)
    structure = _structure(torch.cat(edges, dim=1), len(order), edge_ids=edge_ids)
    return Replica(
        x,
        y,
        torch.cat(in_degree)[order],
        torch.cat(train)[order].nonzero().flatten(),
        *structure,
        cluster_of=None if shard.chunk_of is None else torch.cat(of_cluster)[order],
        shared=alone,
    )


def replica_of_dataset(dataset: Dataset, *, edge_ids: bool, cluster_of: Tensor | None = None) -> Replica:
    """Return the replica that every rank of a run would have."""
    structure = _structure(dataset.edge_index, dataset.num_nodes, edge_ids=edge_ids)
    train = dataset.train_mask.nonzero().flatten()
    in_degree = dataset.in_degree.to(dataset.x.dtype)
    return Replica(dataset.x, dataset.y, in_degree, train, *structure, cluster_of=cluster_of, shared=True)


def _structure(
    edges: Tensor, num_nodes: int, *, edge_ids: bool
) -> tuple[InEdges, Tensor, Tensor, Tensor | None, Tensor | None]:
    """Return `edges`, `loops`, `first_loop`, `edge_ids` and `loop_ids` of a Replica. An edge's id is its place in the
    order of (destination, source)."""
    key = (edges[1] * num_nodes + edges[0]).sort().values
    src, dst = key % num_nodes, key // num_nodes
    is_loop = src == dst
    counts = torch.bincount(dst[~is_loop], minlength=num_nodes)
    indptr = torch.cat([counts.new_zeros(1), counts.cumsum(0)])
    loops = torch.bincount(dst[is_loop], minlength=num_nodes)
    ids = [mask.nonzero().flatten() if edge_ids else None for mask in (~is_loop, is_loop)]
    return InEdges(indptr, src[~is_loop]), loops, loops.cumsum(0) - loops, ids[0], ids[1]
