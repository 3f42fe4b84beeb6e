"""BNS-GCN: Y[N_P, F] = A[N_P, N_P] X[N_P, F] + A[N_P, S] X[S, F] / rate, S a sample of the halo drawn every epoch.

Wan, Li, Li, Kim, Lin, BNS-GCN: Efficient Full-Graph Training of Graph Convolutional Networks with Partition-Parallelism
and Random Boundary Node Sampling, MLSys 2022 (arXiv 2203.10983). What it computes, what it sends, and where it differs
from the paper and from the public code: docs/strategies/bns.md.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated

from annotated_types import Ge, Le

from gnnpar.codecs.adaptive.codec import Adaptive, with_edge_weights
from gnnpar.codecs.codec import Codec, CodecConfig, Exactness, Identity, check_epochs
from gnnpar.codecs.delta import refuse_delta
from gnnpar.comm import CodedExchange, Communicator, RowLists
from gnnpar.data.tasks import Task
from gnnpar.folds.edge_data import ALL_KINDS
from gnnpar.models.gnn import GNN
from gnnpar.parallel.bns.oracle import SampledWhole
from gnnpar.parallel.bns.view import SampledHalo
from gnnpar.parallel.engine import Engine, FlatEngine, PassGraph, Stateful, Structure
from gnnpar.parallel.halo_graph import EdgeOrder, HaloGraph, Overlap
from gnnpar.parallel.local import Pass
from gnnpar.parallel.strategy import Capabilities, FirstLayer, LayerFacts, Workload, name_of
from gnnpar.parallel.view import FeatureCache
from gnnpar.partition.shard import Shard
from gnnpar.placement import Plan, Topology

if TYPE_CHECKING:
    from gnnpar.parallel.priced import Problem
    from gnnpar.pricing.machine import Machine
    from gnnpar.pricing.price import Price


@dataclass(frozen=True, kw_only=True)
class BoundarySampling:
    """`rate`: probability that a boundary row travels in an epoch; 1: graph parallelism, 0: nothing is sent.

    `codec`: of the rows that travel and of their gradients. Evaluation reads all rows, exactly.
    """

    rate: Annotated[float, Ge(0), Le(1)] = 0.1
    codec: CodecConfig = Identity()
    overlap: Overlap = "edges"
    capabilities = Capabilities(from_shards=True, edge_data=ALL_KINDS, moments=True, pair_loss=True, row_order=True)

    def __post_init__(self) -> None:
        if not 0 <= self.rate <= 1:
            raise ValueError(f"strategy.rate={self.rate} is no probability: give a number from 0 to 1 (the paper: 0.1)")
        if self.rate > 0 and 1 - self.rate == 1:
            raise ValueError(f"strategy.rate={self.rate} is too small to draw by: give 0, which sends nothing, or more")
        if self.rate < 1:
            refuse_delta(self.codec, "bns", "draws other rows in every epoch")
        if self.rate < 1 and isinstance(self.codec, Adaptive):
            raise ValueError(
                "codec=adaptive chooses bits of rows by what they sent before, but strategy=bns draws other rows every "
                "epoch: use codec=uniform, random, bf16, drop or identity, or strategy.rate=1"
            )

    @property
    def exactness(self) -> frozenset[Exactness]:
        if self.rate == 1:
            return self.codec.exactness
        return (self.codec.exactness - {"exact"}) | frozenset[Exactness]({"sampled"})

    def exact_limit(self) -> BoundarySampling:
        return replace(self, rate=1.0, codec=Identity())

    def check(self, num_ranks: int, num_layers: int, epochs: int) -> None:
        check_epochs(self.codec, epochs)

    def cost(self, problem: Problem, machine: Machine) -> Price:
        from gnnpar.parallel.bns.cost import cost

        return cost(self, problem, machine)

    def oracle(self, plan: Plan, whole: Shard, *, seed: int) -> PassGraph | None:
        if not isinstance(self.codec, Identity):
            return None
        return SampledWhole(whole, Pass(seed), part_of=plan.part_of, rate=self.rate)

    def plan(self, workload: Workload, topology: Topology) -> Plan:
        return workload.flat_plan(topology)

    def describe(self, plan: Plan) -> Sequence[LayerFacts]:
        how = f"{self.rate:g} of the boundary rows, {name_of(self.codec)}, overlap {self.overlap}"
        settings = {"rate": self.rate, "codec": self.codec, "overlap": self.overlap}
        return (LayerFacts(mode="sampled halo", how=how, settings=settings),) * plan.num_layers

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
        config = with_edge_weights(self.codec, model)

        def codec_of(lists: RowLists) -> Codec:
            return config.build(lists, comm, seed)

        codec, exact_codec = codec_of(shard.row_lists), Identity().build(shard.row_lists, comm, seed)
        exchange, exact_exchange = CodedExchange(comm, codec), CodedExchange(comm, exact_codec)
        edges = EdgeOrder(shard, self.overlap)
        cache = FeatureCache.of(first_layer)
        full = HaloGraph(shard, Pass(seed), exchange=exact_exchange, edges=edges, cache=cache)
        exact = full if cache is None else replace(full, cache=FeatureCache.of(first_layer))
        structure: list[Structure] = []
        if self.rate == 1:
            once = exact_exchange if "quantized" in self.exactness else None
            view = HaloGraph(shard, Pass(seed), exchange=exchange, edges=edges, cache=cache, once=once)
        else:
            view = SampledHalo(
                shard,
                Pass(seed),
                exchange=exchange,
                edges=edges,
                cache=cache,
                rate=self.rate,
                codec_of=codec_of,
                full=full,
            )
            structure.append(view.drawn)
        parts: dict[str, Stateful] = {"held": view.held}
        if cache is not None:
            parts["cache"] = cache
        return FlatEngine(
            view=view,
            exact=exact,
            shard=shard,
            model=model,
            task=task,
            comm=comm,
            seed=seed,
            codecs=(codec,) if self.rate == 1 else (),  # a codec of one sample is gone with it
            structure=structure,
            parts=parts,
        )
