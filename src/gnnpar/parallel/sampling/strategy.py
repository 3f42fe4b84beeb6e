"""Neighbour sampling, data parallel: Y[i] = loops + d_i / k_i . (k_i of i's d_i in-edges), batch after batch of nodes.

The baseline that is no full-graph method: a step takes `batch_size` training nodes and up to `fanout` in-neighbours
of every node, hop by hop. Source: Hamilton, Ying, Leskovec, Inductive Representation Learning on Large Graphs, NeurIPS
2017 (arXiv 1706.02216), as PyG's NeighborLoader does it. Every rank holds the whole graph, so no feature is ever sent:
bytes are those of gradients, one sum a step. Evaluation is full-graph and exact, as that of graph parallelism.

Deviations: self loops are kept, not sampled, as PyG's layers add them afterwards. normalize=graph is ours: degrees of
the whole graph and sums scaled by d/k, unbiased in every layer and exact where all in-edges are taken. PyG's layers
take the sample's degrees (normalize=subgraph), which is another network at the rim even then. Maxima and attention
read no degrees. `batch_size` counts the seeds of all ranks: more ranks are the same optimisation.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated

from annotated_types import Ge, Le

from gnnpar.codecs.codec import Exactness, Identity
from gnnpar.comm import CodedExchange, Communicator
from gnnpar.data.tasks import Task
from gnnpar.models.gnn import GNN
from gnnpar.parallel.engine import Engine
from gnnpar.parallel.halo_graph import EdgeOrder, HaloGraph
from gnnpar.parallel.local import Pass
from gnnpar.parallel.sampling.engine import Batches, MinibatchEngine
from gnnpar.parallel.sampling.neighbours import Body, sampler_of
from gnnpar.parallel.sampling.replica import Replica, replica_of
from gnnpar.parallel.sampling.view import Normalize
from gnnpar.parallel.sketch import sketch
from gnnpar.parallel.strategy import Capabilities, FirstLayer, LayerFacts, Workload, check_first_layer
from gnnpar.parallel.whole import WholeGraph
from gnnpar.partition.shard import Shard
from gnnpar.placement import Plan, Topology

if TYPE_CHECKING:
    from gnnpar.parallel.priced import Problem
    from gnnpar.pricing.machine import Machine
    from gnnpar.pricing.price import Price


@dataclass(frozen=True, kw_only=True)
class Minibatch:
    """`fanout`: in-neighbours of a node, a number a layer, the seeds' (of the last layer) first; the last number counts
    for further layers, -1 is all. A layer that aggregates twice takes its number twice; encoder and decoder have none.

    `batch_size`: seeds of a step, all ranks together; None: all training nodes. `num_workers`: processes of each rank
    that draw ahead, 0: none; the same bits with any. `sampler`: pyg (NeighborLoader), own, or auto: pyg where pyg-lib
    is installed.
    """

    fanout: tuple[Annotated[int, Ge(-1)], ...] = (15, 10)
    batch_size: Annotated[int, Ge(1)] | None = 512
    num_workers: Annotated[int, Ge(0), Le(1024)] = 0
    normalize: Normalize = "graph"
    sampler: Body = "auto"
    capabilities = Capabilities(
        cached_first_layer=False,
        by_layers=True,
        less_memory=lambda _: (
            "lower strategy.batch_size or strategy.fanout; a rank also holds the whole graph, strategy=sar a part"
        ),
    )

    def __post_init__(self) -> None:
        if not self.fanout or 0 in self.fanout:
            raise ValueError(f"fanout={list(self.fanout)} must be numbers of neighbours, one a layer, or -1 for all")

    @property
    def exactness(self) -> frozenset[Exactness]:
        whole = self.batch_size is None and set(self.fanout) == {-1} and self.normalize == "graph"
        return frozenset[Exactness]({"exact" if whole else "sampled"})

    def exact_limit(self) -> Minibatch:
        return replace(self, fanout=(-1,), batch_size=None, normalize="graph")

    def check(self, num_ranks: int, num_layers: int, epochs: int) -> None:
        self._check_fanout(num_layers)

    def _check_fanout(self, num_layers: int) -> None:
        """Refuse more numbers than the model has layers."""
        if len(self.fanout) > num_layers:
            raise ValueError(
                f"strategy.fanout={list(self.fanout)} has {len(self.fanout)} numbers, but the model {num_layers} "
                f"layers: give {num_layers} or fewer, the first for the neighbours of training nodes."
            )

    def cost(self, problem: Problem, machine: Machine) -> Price:
        from gnnpar.parallel.sampling.cost import cost

        return cost(self, problem, machine)

    def plan(self, workload: Workload, topology: Topology) -> Plan:
        """Parts are those of the evaluation; training knows none."""
        self._check_fanout(workload.num_layers)
        return workload.flat_plan(topology)

    def describe(self, plan: Plan) -> Sequence[LayerFacts]:
        return (LayerFacts(mode="sample"),) * plan.num_layers

    def build(
        self,
        plan: Plan,
        shard: Shard,
        model: GNN,
        task: Task,
        comm: Communicator,
        *,
        seed: int,
        first_layer: FirstLayer = "live",
    ) -> Engine:
        check_first_layer(self, first_layer)
        if self.num_workers and comm.transport == "threads":
            raise ValueError(
                f"strategy.num_workers={self.num_workers} starts processes, which ranks that are threads cannot: "
                "set comm=gloo, or strategy.num_workers=0."
            )
        hops = self._hops(model, shard)
        graph = replica_of(shard, comm, edge_ids=model.needs_edge_ids)
        batches, drawn_by = self.batches(graph, hops, seed=seed, rank=comm.rank, ranks=comm.size)
        exact = WholeGraph(shard, Pass(seed))
        if comm.size > 1:
            exchange = CodedExchange(comm, Identity().build(shard.row_lists, comm, seed))
            exact = HaloGraph(shard, Pass(seed), exchange=exchange, edges=EdgeOrder(shard, "edges"))
        return MinibatchEngine(
            graph=graph,
            batches=batches,
            hops=hops,
            drawn_by=drawn_by,
            num_workers=self.num_workers,
            exact=exact,
            shard=shard,
            model=model,
            task=task,
            comm=comm,
            seed=seed,
        )

    def batches(self, graph: Replica, hops: Sequence[int], *, seed: int, rank: int, ranks: int) -> tuple[Batches, str]:
        """A rank's, and what draws them. `hops`: of each layer."""
        sampler, drawn_by = sampler_of(graph.edges, self.by_hop(hops), self.sampler)
        return Batches(
            graph, sampler, batch_size=self.batch_size, normalize=self.normalize, seed=seed, rank=rank, ranks=ranks
        ), drawn_by

    def by_hop(self, hops: Sequence[int]) -> list[int]:
        """`fanout` of every hop from the seeds outwards. `hops`: of each layer."""
        outwards = [layer for layer, count in enumerate(reversed(hops)) for _ in range(count)]
        return [self.fanout[min(layer, len(self.fanout) - 1)] for layer in outwards]

    @staticmethod
    def _hops(model: GNN, shard: Shard) -> list[int]:
        """Of each layer, which may aggregate more than once."""
        uses = sketch(model, replace(shard, x=shard.x.new_zeros(1, model.in_dim)))
        for use in uses:
            if not hasattr(use.agg, "summed"):  # a fold of the user's own enters here
                raise ValueError(
                    f"the fold {type(use.agg).__name__} of layer {use.layer} does not say whether it is a sum over "
                    "in-edges, which samples have to know: give it summed = True or False (ops/aggregator.py)."
                )
        counts = Counter(use.layer for use in uses)
        return [counts[i] for i in range(model.num_layers)]
