"""DIGEST: Y_t[N_P, F] = A[N_P, N_P] X_t[N_P, F] + A[N_P, halo] H[halo, F], H the halo rows of the last refresh.

Chai, Bai, Zhao, Cheng, Distributed Graph Neural Network Training with Periodic Stale Representation Synchronization,
2022 (arXiv 2206.00057). Specification, bytes and deviations from the paper: docs/strategies/digest.md.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Annotated

from annotated_types import Ge

from gnnpar.codecs.adaptive.codec import Adaptive
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
class Refreshed(RowPolicy):
    """Rows of every `period`-th epoch, read until the next refresh. `gradients`: refreshes also send gradients of halo
    rows."""

    period: int
    gradients: bool

    def travels(self, phase: Phase, epoch: int) -> bool:
        return epoch % self.period == 0 and (phase != "backward" or self.gradients)

    def age(self, phase: Phase, epoch: int) -> int | None:
        if phase == "backward":
            return 0 if self.travels(phase, epoch) else None
        return epoch % self.period


@dataclass(frozen=True, kw_only=True)
class Digest(CodedStrategy, Proposes):
    """Parameters of DIGEST. `period`: epochs between refreshes of the halo rows; the same rows are read between them.

    `gradients`: in an epoch that refreshes, gradients of halo rows go back to their owners; the paper sends none. With
    them, `period=1` is graph parallelism. `codec`: of all messages. `halo`: the messages of cut edges, for linear folds
    (`gnnpar.parallel.cover`). Evaluation reads rows of its own weights, exactly.
    """

    period: Annotated[int, Ge(1)] = 2
    gradients: bool = False
    overlap: Overlap = "edges"
    halo: Halo = "rows"
    limit = {"period": 1, "gradients": True}
    mode = "halo table"

    def __post_init__(self) -> None:
        refuse_nothing(self.codec, self.halo)
        if not self.at_limit:
            refuse_delta(self.codec, "digest", "does not send rows and gradients in every epoch")
        if isinstance(self.codec, Adaptive) and not self.at_limit:
            raise ValueError(
                "codec=adaptive chooses bits by the rows and gradients of every epoch, but strategy=digest sends rows "
                f"every {self.period} epochs and {'' if self.gradients else 'no '}gradients: use codec=uniform, "
                "random, bf16, drop or identity, or strategy.period=1 strategy.gradients=true"
            )

    @property
    def capabilities(self) -> Capabilities:
        return replace(HALO, crosses_epochs=self.period > 1)

    def check(self, num_ranks: int, num_layers: int, epochs: int) -> None:
        super().check(num_ranks, num_layers, epochs)
        if self.period > epochs:
            raise ValueError(
                f"strategy.period={self.period} in a run of {epochs} epochs: halo rows would be those of the initial "
                f"weights to its end; set it to {epochs} or less, or raise epochs"
            )

    def oracle(self, plan: Plan, whole: Shard, *, seed: int) -> PassGraph:
        return StaleWhole(whole, Pass(seed), part_of=plan.part_of, policy=Refreshed(self.period, self.gradients))

    def declared(self) -> Declaration:
        sends, kept = (1 / self.period, self.gradients / self.period), (float(self.period > 1), 0.0)
        step = Step("halo", overlap=overlapped_folds(self.overlap), sends=sends, kept=kept)
        words = [f"every {self.period} epochs"] + ["with gradients"] * self.gradients
        options = {"period": self.period, "gradients": self.gradients}
        return Declaration(family="digest", step=step, words=words, options=options, halo=self.halo, linear=True)

    @property
    def how(self) -> str:
        return f"{name_of(self.codec)}, every {self.period} epochs, {'with' if self.gradients else 'no'} gradients"

    def build(self, context: BuildContext) -> Engine:
        return halo_engine(
            context,
            self,
            overlap=self.overlap,
            halo=self.halo,
            policy=Refreshed(self.period, self.gradients),
            kept="table",
            features_exact="exact" not in self.exactness,
        )
