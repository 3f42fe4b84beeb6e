"""CAGNET in one dimension: Y[N_P, F] = sum_q A[N_P, N_q] X[N_q, F], part q's rows broadcast in turn, exact.

Tripathy, Yelick, Buluc, Reducing Communication in Graph Neural Network Training, SC 2020 (arXiv 2005.03300). What it
computes, what it sends, and where it differs from the paper and from the public code: docs/strategies/cagnet.md.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated

from annotated_types import Ge

from gnnpar.codecs.adaptive.codec import Adaptive
from gnnpar.codecs.codec import CodecConfig, Exactness, Identity, check_epochs
from gnnpar.comm import CodedExchange, Communicator
from gnnpar.data.tasks import Task
from gnnpar.models.gnn import GNN
from gnnpar.parallel.broadcast import BroadcastGraph, row_lists, whole_parts
from gnnpar.parallel.engine import Engine, FlatEngine, Stateful
from gnnpar.parallel.halo_graph import EdgeOrder, HeldRows
from gnnpar.parallel.local import Pass
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
class Cagnet:
    """`prefetch`: parts whose rows are under way while one is folded. `codec`: of rows and their gradients.

    Evaluation is exact, and broadcasts too.
    """

    prefetch: Annotated[int, Ge(0)] = 1
    codec: CodecConfig = Identity()
    capabilities = Capabilities(from_shards=True, edge_weights=True, whole_neighborhoods=False)

    def __post_init__(self) -> None:
        if isinstance(self.codec, Adaptive):
            raise ValueError(
                "codec=adaptive weighs halo rows by the edges that read them, and strategy=cagnet sends all rows, read "
                "or not: use codec=uniform, random, bf16, drop or identity"
            )

    @property
    def exactness(self) -> frozenset[Exactness]:
        return self.codec.exactness

    def exact_limit(self) -> Cagnet:
        return replace(self, codec=Identity())

    def check(self, num_ranks: int, num_layers: int, epochs: int) -> None:
        check_epochs(self.codec, epochs)

    def cost(self, problem: Problem, machine: Machine) -> Price:
        from gnnpar.parallel.cagnet.cost import cost

        return cost(self, problem, machine)

    def candidates(self, scope: Scope, ranks: int) -> Iterable[Candidate]:
        from gnnpar.parallel.cagnet.cost import candidates

        return candidates(scope, ranks)

    def plan(self, workload: Workload, topology: Topology) -> Plan:
        return workload.flat_plan(topology)

    def describe(self, plan: Plan) -> Sequence[LayerFacts]:
        settings = {"codec": self.codec, "prefetch": self.prefetch}
        how = f"{name_of(self.codec)}, {self.prefetch} parts ahead"
        return (LayerFacts(mode="broadcast", how=how, settings=settings),) * plan.num_layers

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
        view = BroadcastGraph(
            shard,
            Pass(seed),
            exchange=CodedExchange(comm, codec),
            edges=EdgeOrder(shard, "edges"),
            prefetch=self.prefetch,
            once=None if "exact" in self.exactness else exact_exchange,
            cache=cache,
        )
        exact = replace(view, exchange=exact_exchange, cache=FeatureCache.of(first_layer), held=HeldRows())
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
            codecs=(codec,),
            parts=parts,
        )
