"""Feature parallelism: Y[N_P, F] = home(A[N, N] . columns(X[N_P, F])), two all-to-alls an aggregation and direction.

Every rank holds the structure of the whole graph and folds all of it on 1/P of the columns, or of the heads, so work is
balanced and bytes do not depend on the cut. The aggregation of NeutronTP (Ai et al., VLDB 2024, arXiv 2412.20379), and
of the first layer of P3 (Gandhi, Iyer, OSDI 2021). What it sends and where it differs: docs/strategies/feature.md.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from gnnpar.codecs.adaptive.codec import Adaptive
from gnnpar.codecs.codec import CodecConfig, Exactness, Identity, check_epochs, is_constant
from gnnpar.codecs.delta import refuse_delta
from gnnpar.comm import CodedExchange, Communicator
from gnnpar.data.tasks import Task
from gnnpar.folds.edge_data import IN_BLOCKS
from gnnpar.models.gnn import GNN
from gnnpar.parallel.engine import Engine, FlatEngine, Stateful, Structure
from gnnpar.parallel.feature.slices import slices_of
from gnnpar.parallel.feature.view import FeatureGraph, row_lists, structure_of
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
class FeatureParallel:
    """`codec`: of rows by columns, of results on their way home, and of the gradients of both, in training."""

    codec: CodecConfig = Identity()

    @property
    def capabilities(self) -> Capabilities:
        return Capabilities(
            from_shards=True,
            edge_data=IN_BLOCKS,
            whole_neighborhoods=False,
            moments=True,
            pair_loss=True,
            captured=is_constant(self.codec),
            learned_features=True,
        )

    def __post_init__(self) -> None:
        refuse_delta(self.codec, "feature", "sends columns of all rows and would hold all of them a second time")
        if isinstance(self.codec, Adaptive):
            raise ValueError(
                "codec=adaptive weighs halo rows by the edges that read them, and strategy=feature sends no halo rows: "
                "use codec=uniform, random, bf16, drop or identity"
            )

    @property
    def exactness(self) -> frozenset[Exactness]:
        return self.codec.exactness

    def exact_limit(self) -> FeatureParallel:
        return replace(self, codec=Identity())

    def check(self, num_ranks: int, num_layers: int, epochs: int) -> None:
        check_epochs(self.codec, epochs)

    def cost(self, problem: Problem, machine: Machine) -> Price:
        from gnnpar.parallel.feature.cost import cost

        return cost(self, problem, machine)

    def candidates(self, scope: Scope, ranks: int) -> Iterable[Candidate]:
        from gnnpar.parallel.feature.cost import candidates

        return candidates(scope, ranks)

    def plan(self, workload: Workload, topology: Topology) -> Plan:
        return workload.flat_plan(topology)

    def describe(self, plan: Plan) -> Sequence[LayerFacts]:
        how = f"{name_of(self.codec)}, two all-to-alls"
        return (LayerFacts(mode="columns", how=how, settings={"codec": self.codec}),) * plan.num_layers

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
        if comm.size > 1:
            for use in sketch(model, replace(shard, x=shard.x.new_zeros(1, model.in_dim), learned=None)):
                slices_of(use.agg, use.src, 0, comm.size, use.layer)
        structure = structure_of(shard, comm, edge_ids=model.needs_edge_ids)
        lists = row_lists(structure, comm.rank)
        cache, exact_cache = FeatureCache.of(first_layer), FeatureCache.of(first_layer)
        codecs = [self.codec.build(each, comm, seed) for each in lists]
        views: list[FeatureGraph] = []
        for chosen, kept in ((codecs, cache), ([Identity().build(each, comm, seed) for each in lists], exact_cache)):
            columns, home = (CodedExchange(comm, codec) for codec in chosen)
            views.append(FeatureGraph(shard, Pass(seed), cache=kept, structure=structure, columns=columns, home=home))
        view, exact = views
        parts: dict[str, Stateful] = {} if cache is None else {"cache": cache}
        beside: list[Structure] = [structure] if comm.size > 1 else []
        return FlatEngine(
            view=view,
            exact=exact,
            shard=shard,
            model=model,
            task=task,
            comm=comm,
            seed=seed,
            codecs=codecs,
            structure=beside,
            parts=parts,
        )
