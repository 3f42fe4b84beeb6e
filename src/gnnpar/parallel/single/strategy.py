"""One device, the whole graph: Y[N, F] = A[N, N] X[N, F]. The oracle of every exact strategy."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from gnnpar.codecs.codec import Exactness
from gnnpar.comm import Communicator
from gnnpar.data.tasks import Task
from gnnpar.folds.edge_data import ALL_KINDS
from gnnpar.models.gnn import GNN
from gnnpar.parallel.engine import Engine, FlatEngine
from gnnpar.parallel.local import Pass
from gnnpar.parallel.normalised import normalised_for
from gnnpar.parallel.strategy import Capabilities, FirstLayer, LayerFacts, Workload
from gnnpar.parallel.view import FeatureCache
from gnnpar.parallel.whole import WholeGraph
from gnnpar.partition.shard import Shard
from gnnpar.placement import Plan, Topology

if TYPE_CHECKING:
    from collections.abc import Iterable

    from gnnpar.parallel.priced import Problem
    from gnnpar.pricing.candidate import Candidate, Scope
    from gnnpar.pricing.machine import Machine
    from gnnpar.pricing.price import Price


@dataclass(frozen=True, kw_only=True)
class Single:
    """No fields: there is nothing to choose."""

    exactness = frozenset[Exactness]({"exact"})
    capabilities = Capabilities(
        max_ranks=1,
        from_shards=True,
        edge_data=ALL_KINDS,
        moments=True,
        pair_loss=True,
        row_order=True,
        captured=True,
        learned_features=True,
    )

    def exact_limit(self) -> Single:
        return self

    def check(self, num_ranks: int, num_layers: int, epochs: int) -> None:
        _check_ranks(num_ranks)

    def cost(self, problem: Problem, machine: Machine) -> Price:
        from gnnpar.parallel.single.cost import cost

        return cost(problem, machine)

    def candidates(self, scope: Scope, ranks: int) -> Iterable[Candidate]:
        from gnnpar.parallel.single.cost import candidates

        return candidates(scope, ranks)

    def plan(self, workload: Workload, topology: Topology) -> Plan:
        _check_ranks(topology.num_ranks)
        return workload.flat_plan(topology)

    def describe(self, plan: Plan) -> Sequence[LayerFacts]:
        return (LayerFacts(mode="whole"),) * plan.num_layers

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
        cache = FeatureCache.of(first_layer)
        shard = normalised_for(model, shard, self.exactness, first_layer)
        view = WholeGraph(shard, Pass(seed), cache=cache)
        return FlatEngine(
            view=view,
            exact=view,
            shard=shard,
            model=model,
            task=task,
            comm=comm,
            seed=seed,
            parts={} if cache is None else {"cache": cache},
        )


def _check_ranks(num_ranks: int) -> None:
    if num_ranks != 1:
        raise ValueError(
            f"strategy=single runs on 1 rank, got {num_ranks}: set world_size=1 or strategy=graph_parallel."
        )
