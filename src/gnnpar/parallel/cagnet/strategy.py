"""CAGNET in 1 and 1.5 dimensions: Y[N_P, F] = sum_q A[N_P, N_q] X[N_q, F], part q's rows broadcast in turn, exact.

Tripathy, Yelick, Buluc, Reducing Communication in Graph Neural Network Training, SC 2020 (arXiv 2005.03300). What it
computes, what it sends, and where it differs from the paper and from the public code: docs/strategies/cagnet.md.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated

from annotated_types import Ge

from gnnpar.codecs.adaptive.codec import Adaptive
from gnnpar.codecs.codec import CodecConfig, Exactness, Identity, check_epochs, is_constant
from gnnpar.codecs.delta import refuse_delta
from gnnpar.comm import CodedExchange, Communicator
from gnnpar.data.tasks import Task
from gnnpar.folds.edge_data import ALL_KINDS, IN_BLOCKS
from gnnpar.models.gnn import GNN
from gnnpar.parallel.broadcast import BroadcastGraph, row_lists, whole_parts
from gnnpar.parallel.cagnet.grid import pieces_of, without_edges
from gnnpar.parallel.cagnet.replicated import ReplicatedGraph, refuse_fold
from gnnpar.parallel.engine import Engine, FlatEngine, Stateful
from gnnpar.parallel.halo_graph import EdgeOrder, HeldRows
from gnnpar.parallel.local import Pass
from gnnpar.parallel.normalised import normalised_for
from gnnpar.parallel.sketch import sketch
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

    `replication`: c of 1.5 dimensions, whose square divides the number of ranks: groups of c ranks share the in-edges
    of their rows, and add up partial sums. Evaluation is exact, and broadcasts too.
    """

    replication: Annotated[int, Ge(1)] = 1
    prefetch: Annotated[int, Ge(0)] = 1
    codec: CodecConfig = Identity()

    @property
    def capabilities(self) -> Capabilities:
        """Groups that share in-edges hold no rows of theirs."""
        edge_data = ALL_KINDS if self.replication == 1 else IN_BLOCKS
        return Capabilities(
            from_shards=True,
            edge_data=edge_data,
            whole_neighborhoods=False,
            moments=True,
            pair_loss=True,
            captured=is_constant(self.codec),
        )

    def __post_init__(self) -> None:
        refuse_delta(self.codec, "cagnet", "sends whole parts, and every rank would hold all rows of the graph")
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
        self.check_ranks(num_ranks)

    def check_ranks(self, num_ranks: int) -> None:
        if num_ranks % (square := self.replication**2):
            raise ValueError(
                f"strategy.replication={self.replication} on {num_ranks} ranks: its square, {square}, does not divide "
                f"{num_ranks}; set strategy.replication=1, or another number of ranks"
            )

    def cost(self, problem: Problem, machine: Machine) -> Price:
        from gnnpar.parallel.cagnet.cost import cost

        return cost(self, problem, machine)

    def candidates(self, scope: Scope, ranks: int) -> Iterable[Candidate]:
        from gnnpar.parallel.cagnet.cost import candidates

        return candidates(scope, ranks)

    def plan(self, workload: Workload, topology: Topology) -> Plan:
        return workload.flat_plan(topology)

    def describe(self, plan: Plan) -> Sequence[LayerFacts]:
        settings = {"codec": self.codec, "prefetch": self.prefetch, "replication": self.replication}
        how = f"{name_of(self.codec)}, {self.prefetch} parts ahead"
        how += f", in-edges of {self.replication} parts shared" if self.replication > 1 else ""
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
        shard = normalised_for(model, shard, self.exactness, first_layer)
        if self.replication > 1:
            return self._replicated(shard, model, task, comm, seed=seed, first_layer=first_layer)
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

    def _replicated(
        self, shard: Shard, model: GNN, task: Task, comm: Communicator, *, seed: int, first_layer: FirstLayer
    ) -> FlatEngine:
        for use in sketch(model, replace(shard, x=shard.x.new_zeros(1, model.in_dim))):
            refuse_fold(type(use.agg).__name__, use.layer, self.replication, linear=use.agg.linear)
        pieces = pieces_of(shard, comm, self.replication)
        alone = without_edges(shard)
        cache, lists = FeatureCache.of(first_layer), pieces.row_lists()
        codecs = [self.codec.build(each, comm, seed) for each in lists]
        rows, home = (CodedExchange(comm, codec) for codec in codecs)
        exactly = tuple(CodedExchange(comm, Identity().build(each, comm, seed)) for each in lists)
        once = None if "exact" in self.exactness else (exactly[0], exactly[1])
        view = ReplicatedGraph(
            alone, Pass(seed), cache=cache, pieces=pieces, rows=rows, home=home, prefetch=self.prefetch, once=once
        )
        exact = replace(view, rows=exactly[0], home=exactly[1], cache=FeatureCache.of(first_layer))
        return FlatEngine(
            view=view,
            exact=exact,
            shard=alone,
            model=model,
            task=task,
            comm=comm,
            seed=seed,
            codecs=codecs,
            structure=[pieces],
            parts={} if cache is None else {"cache": cache},
        )
