"""Mini-batches, data parallel: Y[i] = loops + d_i / k_i . (k_i of i's d_i in-edges), on a subgraph per rank and step.

The baseline without full-graph training. Neighbour sampling: a step takes `batch_size` training nodes and up to
`fanout` in-neighbours of every node, hop by hop (Hamilton, Ying, Leskovec, Inductive Representation Learning on Large
Graphs, NeurIPS 2017, arXiv 1706.02216), as PyG's NeighborLoader does. sampler=cluster: a step takes a union of clusters
and the edges between them (ClusterGCN, KDD 2019, arXiv 1905.07953), sampler=uniform of random parts of the nodes (arXiv
2605.22480). sampler=saint: nodes drawn at random and the edges between them, sums and losses divided by probabilities
(GraphSAINT, ICLR 2020, arXiv 1907.04931). Every rank holds the whole graph, so no feature is sent, only one sum of
gradients per step. Evaluation is full-graph and exact, as in graph parallelism. Specification:
docs/strategies/minibatch.md.

Deviations: self loops are kept, not sampled, as PyG's layers add them afterwards. normalize=graph is ours: degrees of
the whole graph and sums scaled by d/k, unbiased in every layer and exact if all in-edges are taken. PyG's layers take
the sample's degrees (normalize=subgraph), which even then computes another function at the outermost nodes. Maxima and
attention read no degrees. `batch_size` counts the seeds of all ranks: more ranks are the same optimisation.
"""

from __future__ import annotations

import os
import tempfile
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Literal

from annotated_types import Ge, Le
from torch import Tensor

from gnnpar.codecs.codec import Exactness
from gnnpar.comm import Communicator
from gnnpar.models.gnn import GNN
from gnnpar.parallel.context import BuildContext
from gnnpar.parallel.declared import Problem
from gnnpar.parallel.engine import Engine
from gnnpar.parallel.needs import check_first_layer, refuse_empty_clusters
from gnnpar.parallel.sampling.batches import Batches, ClusterBatches, Hops, SeedBatches, Shared
from gnnpar.parallel.sampling.cost import price_of
from gnnpar.parallel.sampling.engine import MinibatchEngine
from gnnpar.parallel.sampling.neighbours import Body, Replica, replica_of
from gnnpar.parallel.sampling.saint import Draw, SaintBatches
from gnnpar.parallel.sampling.view import Normalize
from gnnpar.parallel.shape_trace import shape_trace
from gnnpar.parallel.strategy import Capabilities, LayerFacts, Workload
from gnnpar.partition.shard import Shard
from gnnpar.placement import Plan, Topology
from gnnpar.pricing.machine import Machine
from gnnpar.pricing.price import Price

_NEIGHBOURS = (SeedBatches, "1706.02216", "batch_size or strategy.fanout")
_SAMPLERS: dict[str, tuple[type[Batches], str, str]] = {
    "cluster": (ClusterBatches, "1905.07953", "clusters_per_batch"),
    "uniform": (ClusterBatches, "2605.22480", "clusters_per_batch"),
    "saint": (SaintBatches, "1907.04931", "batch_size"),
}
"""Sampler -> its batches, its paper, the settings that need less memory if lower; others draw neighbours."""

_LONGEST_TMPDIR = 75
"""Bytes: Python adds 32 to the names of sockets, which have at most 107."""


@dataclass(frozen=True, kw_only=True)
class Minibatch:
    """`fanout`: in-neighbours of a node, a number per layer, the seeds' (last) layer first; the last number applies to
    further layers, -1 is all. A layer that aggregates twice uses its number twice; encoder and decoder have none.

    `batch_size`: seeds of a step, all ranks together; None: all training nodes. `num_workers`: processes of each rank
    that draw ahead, 0: none; results do not depend on it. `sampler`: of neighbours pyg (NeighborLoader), own, or auto
    (pyg if pyg-lib is installed); or cluster, uniform, saint.

    sampler=cluster: the graph is cut into `clusters` by `partition`, a step takes `clusters_per_batch` of them, all
    ranks together; 1 cluster is the whole graph. sampler=uniform: the same with `clusters` random parts of the nodes,
    drawn anew in every epoch; with clusters_per_batch=1 and normalize=subgraph PyG's RandomNodeLoader. sampler=saint: a
    step draws about `batch_size` nodes, all ranks together (None: all nodes on every rank), by `saint`, walks of
    `walk_length` edges; probabilities are estimated from draws that together hold `coverage` times the nodes of the
    graph.
    """

    fanout: tuple[Annotated[int, Ge(-1)], ...] = (15, 10)
    batch_size: Annotated[int, Ge(1)] | None = 512
    num_workers: Annotated[int, Ge(0), Le(1024)] = 0
    normalize: Normalize = "graph"
    sampler: Body | Literal["cluster", "uniform", "saint"] = "auto"
    clusters: Annotated[int, Ge(1)] = 64
    clusters_per_batch: Annotated[int, Ge(1)] = 8
    saint: Draw = "walk"
    walk_length: Annotated[int, Ge(1), Le(1_000)] = 2
    coverage: Annotated[int, Ge(1), Le(10_000)] = 20

    def __post_init__(self) -> None:
        if not self.fanout or 0 in self.fanout:
            raise ValueError(f"fanout={list(self.fanout)} must be numbers of neighbours, one a layer, or -1 for all")
        if self._in_clusters and self.clusters_per_batch > self.clusters:
            raise ValueError(
                f"strategy.clusters_per_batch={self.clusters_per_batch} of strategy.clusters={self.clusters}: a batch "
                "cannot unite more clusters than there are; lower it, or raise strategy.clusters"
            )

    @property
    def _sampling(self) -> type[Batches]:
        return _SAMPLERS.get(self.sampler, _NEIGHBOURS)[0]

    @property
    def _in_clusters(self) -> bool:
        return self._sampling is ClusterBatches

    @property
    def papers(self) -> tuple[str, ...]:
        return (_SAMPLERS.get(self.sampler, _NEIGHBOURS)[1],)

    @property
    def capabilities(self) -> Capabilities:
        *_, size = _SAMPLERS.get(self.sampler, _NEIGHBOURS)
        return Capabilities(
            chunks=self.sampler == "cluster",
            cached_first_layer=False,
            by_layers=True,
            clusters=self.clusters if self._in_clusters else 1,
            less_memory=lambda _: f"lower strategy.{size}; a rank also holds the whole graph, strategy=sar a part",
        )

    @property
    def exactness(self) -> frozenset[Exactness]:
        return frozenset[Exactness]({"exact" if self._sampling.whole(self) else "sampled"})

    def exact_limit(self) -> Minibatch:
        return replace(self, fanout=(-1,), batch_size=None, normalize="graph", clusters=1, clusters_per_batch=1)

    def check(self, num_ranks: int, num_layers: int, epochs: int) -> None:
        self._sampling.check(self, num_ranks, num_layers)

    def plan(self, workload: Workload, topology: Topology) -> Plan:
        """Return the parts for evaluation; training uses only clusters, as chunks, or nothing."""
        self._sampling.check(self, topology.num_ranks, workload.num_layers)
        plan = workload.flat_plan(topology)
        return replace(plan, placement=replace(plan.placement, chunk_of=self.cluster_of(workload)))

    def cluster_of(self, workload: Workload) -> Tensor | None:
        """Return the cluster of each node, [N]; None: no clusters, or new ones in each epoch."""
        refuse_empty_clusters(self, workload.dataset.num_nodes)
        return workload.part_of(self.clusters) if self.sampler == "cluster" else None

    def describe(self, plan: Plan) -> Sequence[LayerFacts]:
        return (LayerFacts(mode="sample"),) * plan.num_layers

    def cost(self, problem: Problem, machine: Machine) -> Price:
        return price_of(self, problem, machine)

    def build(self, context: BuildContext) -> Engine:
        check_first_layer(self, context.first_layer)
        comm = context.comm
        if self.num_workers and len(os.fsencode(tempfile.gettempdir())) > _LONGEST_TMPDIR:
            raise ValueError(
                f"strategy.num_workers={self.num_workers}: the name of {tempfile.gettempdir()}, in which its processes "
                f"have sockets, is longer than {_LONGEST_TMPDIR} bytes: set TMPDIR to a shorter one, or "
                "strategy.num_workers=0."
            )
        if self.num_workers and comm.transport == "threads":
            raise ValueError(
                f"strategy.num_workers={self.num_workers} starts processes, which ranks that are threads cannot: "
                "set comm=gloo, or strategy.num_workers=0."
            )
        hops = _hops(context.model, context.shard)
        graph = replica_of(context.shard, comm, edge_ids=context.model.needs_edge_ids)
        batches = self.batches(graph, hops, seed=context.seed, rank=comm.rank, ranks=comm.size, comm=comm)
        return MinibatchEngine(context, graph=graph, batches=batches, hops=hops, num_workers=self.num_workers)

    def batches(
        self, graph: Replica, hops: Hops, *, seed: int, rank: int, ranks: int, comm: Communicator | None = None
    ) -> Batches:
        """Return a rank's batches, as `Batches.of`."""
        return self._sampling.of(self, graph, hops, Shared(self.normalize, seed, rank, ranks), comm)


def _hops(model: GNN, shard: Shard) -> list[int]:
    """Return the number of aggregations of each layer."""
    uses = shape_trace(model, replace(shard, x=shard.x.new_zeros(1, model.in_dim)))
    for use in uses:
        if not hasattr(use.agg, "summed"):  # a user's fold enters here
            raise ValueError(
                f"the fold {type(use.agg).__name__} of layer {use.layer} does not say whether it is a sum over "
                "in-edges, which samples have to know: give it summed = True or False (folds/aggregator.py)."
            )
    counts = Counter(use.layer for use in uses)
    return [counts[i] for i in range(model.num_layers)]
