"""PipeGCN: Y_t[N_P, F] = A[N_P, N_P] X_t[N_P, F] + A[N_P, halo] X_{t-k}[halo, F], k epochs late in both directions.

Wan, Li, Wolfe, Kyrillidis, Kim, Lin, PipeGCN: Efficient Full-Graph Training of Graph Convolutional Networks with
Pipelined Feature Communication, ICLR 2022 (arXiv 2203.10428). What it computes, what it sends, and where it differs
from the paper and from the public code: docs/strategies/pipegcn.md.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated

from annotated_types import Ge, Lt

from gnnpar.codecs.codec import CodecConfig, Exactness, Identity, check_epochs
from gnnpar.codecs.delta import refuse_delta
from gnnpar.comm import CodedExchange, Communicator
from gnnpar.comm.communicator import Phase
from gnnpar.comm.rows import Wire
from gnnpar.data.tasks import Task
from gnnpar.folds.edge_data import ALL_KINDS
from gnnpar.models.gnn import GNN
from gnnpar.parallel.cover.weights import Halo, refuse_nothing
from gnnpar.parallel.engine import Engine, PassGraph
from gnnpar.parallel.halo_engine import MakeExchange, halo_engine
from gnnpar.parallel.halo_graph import Overlap
from gnnpar.parallel.local import Pass
from gnnpar.parallel.pipegcn.late import LateExchange
from gnnpar.parallel.pipegcn.oracle import Earlier, StaleWhole
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
class PipeGCN:
    """`staleness`: age in epochs of halo rows and of the gradients of boundary rows; 0: graph parallelism.

    `smooth_features`, `smooth_gradients`: running means of them with `decay` take their place. `codec`: of both on the
    wire. `halo`: what travels of a cut edge, for linear folds (`gnnpar.parallel.cover`). Evaluation reads rows of its
    own weights, exactly.
    """

    staleness: Annotated[int, Ge(0)] = 1
    smooth_features: bool = False
    smooth_gradients: bool = False
    decay: Annotated[float, Ge(0), Lt(1)] = 0.95
    codec: CodecConfig = Identity()
    overlap: Overlap = "edges"
    halo: Halo = "rows"

    def __post_init__(self) -> None:
        refuse_nothing(self.codec, self.halo)
        if self.staleness:
            refuse_delta(self.codec, "pipegcn", "reads messages after the next epoch has begun")
        if self.staleness == 0 and (self.smooth_features or self.smooth_gradients):
            name = "smooth_features" if self.smooth_features else "smooth_gradients"
            raise ValueError(
                f"strategy.{name}=true smooths rows of earlier epochs, but strategy.staleness=0 reads none: set "
                f"strategy.staleness=1, or strategy.{name}=false"
            )

    @property
    def capabilities(self) -> Capabilities:
        return Capabilities(
            from_shards=True,
            edge_data=ALL_KINDS,
            moments=True,
            pair_loss=True,
            row_order=True,
            learned_features=True,
            crosses_epochs=self.staleness > 0,
        )

    @property
    def exactness(self) -> frozenset[Exactness]:
        if self.staleness == 0:
            return self.codec.exactness
        return (self.codec.exactness - {"exact"}) | frozenset[Exactness]({"stale"})

    def exact_limit(self) -> PipeGCN:
        return replace(self, staleness=0, smooth_features=False, smooth_gradients=False, codec=Identity())

    def check(self, num_ranks: int, num_layers: int, epochs: int) -> None:
        check_epochs(self.codec, epochs)
        if self.staleness >= epochs:
            raise ValueError(
                f"strategy.staleness={self.staleness} in a run of {epochs} epochs: no rank would ever read a row of "
                f"another one; set it below {epochs}, or raise epochs"
            )

    def cost(self, problem: Problem, machine: Machine) -> Price:
        from gnnpar.parallel.pipegcn.cost import cost

        return cost(self, problem, machine)

    def candidates(self, scope: Scope, ranks: int) -> Iterable[Candidate]:
        from gnnpar.parallel.pipegcn.cost import candidates

        return candidates(scope, ranks)

    def oracle(self, plan: Plan, whole: Shard, *, seed: int) -> PassGraph | None:
        if not isinstance(self.codec, Identity):
            return None
        smooth = (self.smooth_features, self.smooth_gradients)
        rows, gradients = (Earlier(self.staleness, self.decay if each else None) for each in smooth)
        return StaleWhole(whole, Pass(seed), part_of=plan.part_of, rows=rows, gradients=gradients)

    def plan(self, workload: Workload, topology: Topology) -> Plan:
        return workload.flat_plan(topology)

    def describe(self, plan: Plan) -> Sequence[LayerFacts]:
        smoothed = [name for name in ("features", "gradients") if vars(self)[f"smooth_{name}"]]
        how = f"{name_of(self.codec)}, {self.staleness} epochs late"
        how += f", means of {' and '.join(smoothed)} with decay {self.decay:g}" if smoothed else ""
        return (LayerFacts(mode="late halo", how=how, settings=dict(vars(self))),) * plan.num_layers

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
        chosen: dict[Phase, bool] = {"forward": self.smooth_features, "backward": self.smooth_gradients}
        smooth = frozenset[Phase](phase for phase, on in chosen.items() if on)

        def late(comm: Communicator, codec: Wire) -> CodedExchange:
            return LateExchange(comm, codec, staleness=self.staleness, smooth=smooth, decay=self.decay)

        if self.staleness == 0:
            exchange: MakeExchange = CodedExchange
        else:
            exchange = late
        return halo_engine(
            shard,
            model,
            task,
            comm,
            seed=seed,
            first_layer=first_layer,
            overlap=self.overlap,
            codec=self.codec,
            halo=self.halo,
            exchange=exchange,
            kept="late" if self.staleness else None,
            exactness=self.exactness,
            features_exact="exact" not in self.exactness,
            crosses_epochs=self.staleness > 0,
        )
