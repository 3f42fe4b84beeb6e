"""PipeGCN: Y_t[N_P, F] = A[N_P, N_P] X_t[N_P, F] + A[N_P, halo] X_{t-k}[halo, F], k epochs late in both directions.

Wan, Li, Wolfe, Kyrillidis, Kim, Lin, PipeGCN: Efficient Full-Graph Training of Graph Convolutional Networks with
Pipelined Feature Communication, ICLR 2022 (arXiv 2203.10428). Specification, bytes and deviations from the paper and
the public code: docs/strategies/pipegcn.md.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Annotated

from annotated_types import Ge, Lt

from gnnpar.codecs.delta import refuse_delta
from gnnpar.comm.communicator import Phase
from gnnpar.parallel.context import BuildContext
from gnnpar.parallel.declared import Declaration, Proposes, overlapped_folds
from gnnpar.parallel.edges import Overlap
from gnnpar.parallel.engine import Engine, PassGraph
from gnnpar.parallel.halo_graph import halo_engine
from gnnpar.parallel.local import Pass
from gnnpar.parallel.row_bytes import Halo, refuse_nothing
from gnnpar.parallel.stale import RowPolicy, StaleWhole
from gnnpar.parallel.strategy import HALO, Capabilities, CodedStrategy, name_of
from gnnpar.partition.shard import Shard
from gnnpar.placement import Plan
from gnnpar.pricing.steps import Step


@dataclass(frozen=True)
class Late(RowPolicy):
    """Rows and gradients sent `staleness` epochs ago. `decays`: phase -> decay, for phases that read running means."""

    staleness: int
    decays: Mapping[Phase, float]

    def age(self, phase: Phase, epoch: int) -> int:
        return self.staleness

    def decay(self, phase: Phase) -> float | None:
        return self.decays.get(phase)


@dataclass(frozen=True, kw_only=True)
class PipeGCN(CodedStrategy, Proposes):
    """Parameters of PipeGCN. `staleness`: age in epochs of halo rows and of the gradients of boundary rows; 0: graph
    parallelism.

    `smooth_features`, `smooth_gradients`: read their running means with `decay` instead. `codec`: of both on the wire.
    `halo`: the messages of cut edges, for linear folds (`gnnpar.parallel.cover`). Evaluation reads rows of its own
    weights, exactly.
    """

    staleness: Annotated[int, Ge(0)] = 1
    smooth_features: bool = False
    smooth_gradients: bool = False
    decay: Annotated[float, Ge(0), Lt(1)] = 0.95
    overlap: Overlap = "edges"
    halo: Halo = "rows"
    limit = {"staleness": 0, "smooth_features": False, "smooth_gradients": False}
    mode = "late halo"

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
        return replace(HALO, crosses_epochs=self.staleness > 0)

    def check(self, num_ranks: int, num_layers: int, epochs: int) -> None:
        super().check(num_ranks, num_layers, epochs)
        if self.staleness >= epochs:
            raise ValueError(
                f"strategy.staleness={self.staleness} in a run of {epochs} epochs: no rank would ever read a row of "
                f"another one; set it below {epochs}, or raise epochs"
            )

    @property
    def policy(self) -> Late:
        """Return the age of the rows."""
        smooth: dict[Phase, bool] = {"forward": self.smooth_features, "backward": self.smooth_gradients}
        return Late(self.staleness, {phase: self.decay for phase, on in smooth.items() if on})

    def oracle(self, plan: Plan, whole: Shard, *, seed: int) -> PassGraph:
        return StaleWhole(whole, Pass(seed), part_of=plan.part_of, policy=self.policy)

    def declared(self) -> Declaration:
        """Declare messages that overlap the whole epoch and wait for `staleness` epochs."""
        if self.staleness == 0:
            step = Step("halo", overlap=overlapped_folds(self.overlap))
            return Declaration(family="pipegcn", step=step, words=["not late"], halo=self.halo)
        waiting = self.staleness + (self.smooth_features + self.smooth_gradients) / 2
        step = Step("halo", overlap="epoch", kept=(waiting, waiting))
        words = [f"{self.staleness} epochs late"] if self.staleness > 1 else []
        options = {"staleness": self.staleness}
        return Declaration(family="pipegcn", step=step, words=words, options=options, halo=self.halo, linear=True)

    @property
    def how(self) -> str:
        smoothed = [name for name in ("features", "gradients") if vars(self)[f"smooth_{name}"]]
        how = f"{name_of(self.codec)}, {self.staleness} epochs late"
        return how + (f", means of {' and '.join(smoothed)} with decay {self.decay:g}" if smoothed else "")

    def build(self, context: BuildContext) -> Engine:
        return halo_engine(
            context,
            self,
            overlap=self.overlap,
            halo=self.halo,
            policy=self.policy if self.staleness else None,
            kept="late",
            features_exact="exact" not in self.exactness,
            crosses_epochs=self.staleness > 0,
        )
