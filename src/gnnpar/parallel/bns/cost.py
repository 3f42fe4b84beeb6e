"""BNS-GCN: graph parallelism on `rate` of the halo rows and of the edges from them.

Expected values: rows are drawn one by one, so their number varies by sqrt(rate (1 - rate) n).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from gnnpar.parallel.priced import Problem
from gnnpar.parallel.row_bytes import RowBytes, coded_price
from gnnpar.pricing.machine import Machine
from gnnpar.pricing.price import Price
from gnnpar.pricing.steps import CodedCandidate, Step

if TYPE_CHECKING:
    from gnnpar.parallel.bns.strategy import BoundarySampling

_NOT_IN_TIME = "drawing and cutting the sample of an epoch is not in the time"


@dataclass(frozen=True, kw_only=True)
class SampledCandidate(CodedCandidate):
    """`rate`: share of boundary rows that travel."""

    family: str = "bns"
    overlap: Literal["none", "edges"] = "edges"
    rate: float = 1.0

    @property
    def step(self) -> Step:
        return Step("halo", overlap="inner" if self.overlap == "edges" else "none", share=self.rate)

    @property
    def words(self) -> list[str]:
        return [f"{self.rate:g} of the boundary rows"] + ["no overlap"] * (self.overlap == "none")


def cost(strategy: BoundarySampling, problem: Problem, machine: Machine) -> Price:
    live = SampledCandidate(overlap="none" if strategy.overlap == "none" else "edges", rate=strategy.rate)
    notes = (_NOT_IN_TIME,) if strategy.rate < 1 else ()
    return coded_price(RowBytes(strategy.codec, problem.number), live, problem, machine, notes=notes)
