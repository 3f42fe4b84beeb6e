"""SANCUS: Y[N_P, F] = sum_q A[N_P, N_q] X'[N_q, F], X'[N_q] the rows of part q's last broadcast.

Peng, Chen, Shao, Shen, Chen, Cao, SANCUS: Staleness-Aware Communication-Avoiding Full-Graph Decentralized Training in
Large-Scale Graph Neural Networks, PVLDB 15(9), 2022 (doi:10.14778/3538598.3538614). What it computes, what it sends,
and where it differs from the paper and from the public code: docs/strategies/sancus.md.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated

from annotated_types import Ge

from gnnpar.codecs.adaptive.codec import Adaptive
from gnnpar.codecs.codec import CodecConfig, Exactness, Identity, check_epochs
from gnnpar.codecs.delta import refuse_delta
from gnnpar.comm import CodedExchange, Communicator
from gnnpar.data.tasks import Task
from gnnpar.folds.edge_data import ALL_KINDS
from gnnpar.models.gnn import GNN
from gnnpar.parallel.broadcast import row_lists, whole_parts
from gnnpar.parallel.engine import Engine, FlatEngine, PassGraph, Stateful
from gnnpar.parallel.halo_graph import EdgeOrder, HeldRows
from gnnpar.parallel.local import Pass
from gnnpar.parallel.sancus.copies import Copies, Rule
from gnnpar.parallel.sancus.oracle import SkippingWhole
from gnnpar.parallel.sancus.view import SkippingGraph
from gnnpar.parallel.strategy import Capabilities, FirstLayer, LayerFacts, Workload, name_of
from gnnpar.parallel.view import FeatureCache
from gnnpar.partition.shard import Shard
from gnnpar.placement import Plan, Topology

if TYPE_CHECKING:
    from collections.abc import Iterable

    from gnnpar.parallel.priced import Problem
    from gnnpar.pricing.candidate import Candidate, Scope
    from gnnpar.pricing.machine import Machine
    from gnnpar.pricing.price import Price


@dataclass(frozen=True, kw_only=True)
class Sancus:
    """`period`: epochs after which a part broadcasts in any case; `bound`: relative change of its rows above which it
    does, null: none is measured. `period=1`: all broadcast in every epoch, CAGNET.

    `prefetch`, `codec`: as for CAGNET. Gradients are sent in every epoch. Evaluation is exact.
    """

    period: Annotated[int, Ge(1)] | None = 2
    bound: Annotated[float, Ge(0)] | None = None
    prefetch: Annotated[int, Ge(0)] = 1
    codec: CodecConfig = Identity()

    def __post_init__(self) -> None:
        if self.period is None and self.bound is None:
            raise ValueError(
                "strategy.period=null strategy.bound=null would read the rows of the initial weights to the end: set "
                "strategy.period (epochs), strategy.bound (relative change), or both"
            )
        refuse_delta(self.codec, "sancus", "sends whole parts, and not in every epoch")
        if isinstance(self.codec, Adaptive):
            raise ValueError(
                "codec=adaptive weighs halo rows by the edges that read them, and strategy=sancus sends all rows, read "
                "or not: use codec=uniform, random, bf16, drop or identity"
            )

    @property
    def capabilities(self) -> Capabilities:
        return Capabilities(
            from_shards=True,
            edge_data=ALL_KINDS,
            whole_neighborhoods=False,
            moments=True,
            pair_loss=True,
            crosses_epochs=self.period != 1,
        )

    @property
    def exactness(self) -> frozenset[Exactness]:
        if self.period == 1:
            return self.codec.exactness
        return (self.codec.exactness - {"exact"}) | frozenset[Exactness]({"stale"})

    def exact_limit(self) -> Sancus:
        return replace(self, period=1, bound=None, codec=Identity())

    def check(self, num_ranks: int, num_layers: int, epochs: int) -> None:
        check_epochs(self.codec, epochs)
        if self.bound is None and self.period is not None and self.period > epochs:
            raise ValueError(
                f"strategy.period={self.period} in a run of {epochs} epochs: copies would be those of the initial "
                f"weights to its end; set it to {epochs} or less, set strategy.bound, or raise epochs"
            )

    def cost(self, problem: Problem, machine: Machine) -> Price:
        from gnnpar.parallel.sancus.cost import cost

        return cost(self, problem, machine)

    def candidates(self, scope: Scope, ranks: int) -> Iterable[Candidate]:
        from gnnpar.parallel.sancus.cost import candidates

        return candidates(scope, ranks)

    def oracle(self, plan: Plan, whole: Shard, *, seed: int) -> PassGraph | None:
        if not isinstance(self.codec, Identity):
            return None
        return SkippingWhole(whole, Pass(seed), part_of=plan.part_of, rule=Rule(self.period, self.bound))

    def plan(self, workload: Workload, topology: Topology) -> Plan:
        return workload.flat_plan(topology)

    def describe(self, plan: Plan) -> Sequence[LayerFacts]:
        when = [] if self.period is None else [f"every {self.period} epochs"]
        when += [] if self.bound is None else [f"changes above {self.bound:g}"]
        how = f"{name_of(self.codec)}, {' and '.join(when)}"
        return (LayerFacts(mode="broadcast copies", how=how, settings=dict(vars(self))),) * plan.num_layers

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
        shard = whole_parts(shard, comm)
        codec, exact_codec = (c.build(row_lists(shard), comm, seed) for c in (self.codec, Identity()))
        cache, exact_exchange = FeatureCache.of(first_layer), CodedExchange(comm, exact_codec)
        copies = None if self.period == 1 else Copies(comm, Rule(self.period, self.bound))
        view = SkippingGraph(
            shard,
            Pass(seed),
            exchange=CodedExchange(comm, codec),
            edges=EdgeOrder(shard, "edges"),
            prefetch=self.prefetch,
            once=None if "exact" in self.exactness else exact_exchange,
            cache=cache,
            copies=copies,
        )
        exact = replace(view, exchange=exact_exchange, cache=FeatureCache.of(first_layer), held=HeldRows(), copies=None)
        parts: dict[str, Stateful] = {"held": view.held}
        if copies is not None:
            parts["copies"] = copies
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
            codecs=(codec,),
            parts=parts,
        )
