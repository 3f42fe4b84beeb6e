"""Graph parallelism: Y[N_P, F] = A[N_P, N] . halo(X[N_P, F]), one halo exchange per aggregation and direction.

The papers' vanilla is overlap=none; overlap=edges also hides the wire behind every inner edge. With codec=drop it is
the negative control: nothing is communicated in training.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from gnnpar.codecs.codec import CodecConfig, Exactness, Identity, check_epochs, is_constant
from gnnpar.comm import Communicator
from gnnpar.data.tasks import Task
from gnnpar.folds.edge_data import ALL_KINDS
from gnnpar.models.gnn import GNN
from gnnpar.parallel.cover.weights import Halo, refuse_nothing
from gnnpar.parallel.engine import Engine
from gnnpar.parallel.halo_engine import halo_engine
from gnnpar.parallel.halo_graph import Overlap
from gnnpar.parallel.strategy import Capabilities, FirstLayer, LayerFacts, Workload, name_of
from gnnpar.partition.shard import Shard
from gnnpar.placement import Plan, Topology

if TYPE_CHECKING:
    from collections.abc import Iterable

    from gnnpar.parallel.priced import Problem
    from gnnpar.pricing.candidate import Candidate, Scope
    from gnnpar.pricing.machine import Machine
    from gnnpar.pricing.price import Price


@dataclass(frozen=True, kw_only=True)
class GraphParallel:
    """`codec`: what halo rows and their gradients look like on the wire, in training; evaluation is always exact.

    `halo`: what travels of a cut edge (`gnnpar.parallel.cover`).
    """

    codec: CodecConfig = Identity()
    overlap: Overlap = "edges"
    halo: Halo = "rows"

    def __post_init__(self) -> None:
        refuse_nothing(self.codec, self.halo)

    @property
    def capabilities(self) -> Capabilities:
        return Capabilities(
            from_shards=True,
            edge_data=ALL_KINDS,
            moments=True,
            pair_loss=True,
            row_order=True,
            captured=is_constant(self.codec),
            learned_features=True,
        )

    @property
    def exactness(self) -> frozenset[Exactness]:
        return self.codec.exactness

    def exact_limit(self) -> GraphParallel:
        return replace(self, codec=Identity())

    def check(self, num_ranks: int, num_layers: int, epochs: int) -> None:
        check_epochs(self.codec, epochs)

    def cost(self, problem: Problem, machine: Machine) -> Price:
        from gnnpar.parallel.halo.cost import cost

        return cost(self, problem, machine)

    def candidates(self, scope: Scope, ranks: int) -> Iterable[Candidate]:
        from gnnpar.parallel.halo.cost import plain_candidates

        return plain_candidates(scope, ranks)

    def plan(self, workload: Workload, topology: Topology) -> Plan:
        return workload.flat_plan(topology)

    def describe(self, plan: Plan) -> Sequence[LayerFacts]:
        how = f"{name_of(self.codec)}, overlap {self.overlap}"
        how += "" if self.halo == "rows" else f", halo {self.halo}"
        settings = {"codec": self.codec, "overlap": self.overlap, "halo": self.halo}
        return (LayerFacts(mode="halo", how=how, settings=settings),) * plan.num_layers

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
        return halo_engine(
            shard,
            model,
            task,
            comm,
            seed=seed,
            first_layer=first_layer,
            overlap=self.overlap,
            codec=self.codec,
            exactness=self.exactness,
            halo=self.halo,
            features_exact="quantized" in self.exactness,
        )
