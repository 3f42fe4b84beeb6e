"""SANCUS: Y[N_P, F] = sum_q A[N_P, N_q] X'[N_q, F], X'[N_q] the rows of part q's last broadcast.

Peng, Chen, Shao, Shen, Chen, Cao, SANCUS: Staleness-Aware Communication-Avoiding Full-Graph Decentralized Training in
Large-Scale Graph Neural Networks, PVLDB 15(9), 2022 (doi:10.14778/3538598.3538614). Specification, bytes and deviations
from the paper and the public code: docs/strategies/sancus.md.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import Annotated

from annotated_types import Ge

from gnnpar.codecs.adaptive.codec import Adaptive
from gnnpar.codecs.delta import refuse_delta
from gnnpar.parallel.base import HALO, CodedStrategy
from gnnpar.parallel.broadcast import broadcast_engine
from gnnpar.parallel.context import BuildContext
from gnnpar.parallel.declared import Declaration, Proposes
from gnnpar.parallel.engine import Engine, PassGraph
from gnnpar.parallel.local import Pass
from gnnpar.parallel.priced import Problem
from gnnpar.parallel.row_bytes import RowBytes
from gnnpar.parallel.sancus.view import CachedParts, Rule, SkippingGraph, SkippingWhole
from gnnpar.parallel.strategy import Capabilities, name_of
from gnnpar.partition.shard import Shard
from gnnpar.placement import Plan
from gnnpar.pricing.price import Traffic
from gnnpar.pricing.steps import Step
from gnnpar.pricing.work import Work

_CHOSEN = "broadcasts are skipped while it trains: bytes and time are those of all, without what measuring takes"


@dataclass(frozen=True, kw_only=True)
class Sancus(CodedStrategy, Proposes):
    """Parameters of SANCUS. `period`: epochs after which a part broadcasts in any case. `bound`: relative change of its
    rows above which it does; null: changes are not measured. `period=1`: all parts broadcast in every epoch (CAGNET).

    `prefetch`, `codec`: as for CAGNET. Gradients are sent in every epoch. Evaluation is exact.
    """

    period: Annotated[int, Ge(1)] | None = 2
    bound: Annotated[float, Ge(0)] | None = None
    prefetch: Annotated[int, Ge(0)] = 1
    limit = {"period": 1}
    mode = "broadcast copies"

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
        return replace(HALO, whole_neighborhoods=False, row_order=False, crosses_epochs=self.period != 1)

    def check(self, num_ranks: int, num_layers: int, epochs: int) -> None:
        super().check(num_ranks, num_layers, epochs)
        if self.bound is None and self.period is not None and self.period > epochs:
            raise ValueError(
                f"strategy.period={self.period} in a run of {epochs} epochs: copies would be those of the initial "
                f"weights to its end; set it to {epochs} or less, set strategy.bound, or raise epochs"
            )

    def oracle(self, plan: Plan, whole: Shard, *, seed: int) -> PassGraph:
        return SkippingWhole(whole, Pass(seed), part_of=plan.part_of, rule=Rule(self.period, self.bound))

    def declared(self) -> Declaration:
        """Declare the price without skips: with a bound, skipped broadcasts are known only in training."""
        measured = self.bound is not None
        period = 1 if measured or self.period is None else self.period

        def sent(traffic: Traffic, work: Work, rows: RowBytes, problem: Problem) -> Traffic:
            chosen = measured and self.period != 1 and problem.ranks > 1 and traffic.bound == "exact"
            return replace(traffic, bound="most") if chosen else traffic

        return Declaration(
            family="sancus",
            step=Step("parts", prefetch=self.prefetch, sends=(1 / period, 1.0), kept=(1.0, 0.0), kept_own=measured),
            words=[f"every {period} epochs"],
            options={"prefetch": self.prefetch, "period": self.period},
            notes=(_CHOSEN,) if measured else (),
            sent=sent,
        )

    @property
    def how(self) -> str:
        when = [] if self.period is None else [f"every {self.period} epochs"]
        when += [] if self.bound is None else [f"changes above {self.bound:g}"]
        return f"{name_of(self.codec)}, {' and '.join(when)}"

    def build(self, context: BuildContext) -> Engine:
        copies = None if self.period == 1 else CachedParts(context.comm, Rule(self.period, self.bound))
        return broadcast_engine(
            context,
            self,
            prefetch=self.prefetch,
            training=partial(SkippingGraph, copies=copies),
            parts={"copies": copies},
        )
