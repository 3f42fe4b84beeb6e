"""SANCUS: CAGNET without the broadcasts that are skipped.

With a bound, how many are skipped is known in training alone: the price is then that of every broadcast.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from gnnpar.files import JsonDict
from gnnpar.parallel.priced import Problem
from gnnpar.parallel.row_bytes import RowBytes, coded_price
from gnnpar.pricing.candidate import Scope, codec_fields
from gnnpar.pricing.machine import Machine
from gnnpar.pricing.price import Price, Traffic
from gnnpar.pricing.steps import CodedCandidate, Step
from gnnpar.pricing.work import Work

if TYPE_CHECKING:
    from gnnpar.parallel.sancus.strategy import Sancus

PERIOD = 2  # of candidates: a longer one always costs less, so that a search would take the longest
_CHOSEN = "broadcasts are skipped while it trains: bytes and time are those of all, without what measuring takes"


@dataclass(frozen=True, kw_only=True)
class SancusCandidate(CodedCandidate):
    """`period`: epochs from broadcast to broadcast; `measured`: copies of own rows are kept, too."""

    family: str = "sancus"
    prefetch: int = 1
    period: int = PERIOD
    measured: bool = False

    @property
    def step(self) -> Step:
        sends = (1 / self.period, 1.0)
        kept, own = (1.0, 0.0), self.measured
        return Step("parts", prefetch=self.prefetch, sends=sends, kept=kept, kept_own=own)

    @property
    def words(self) -> list[str]:
        return [f"every {self.period} epochs"]

    @property
    def fields(self) -> JsonDict:
        return {"codec": codec_fields(self.bits), "prefetch": self.prefetch, "period": self.period}


def candidates(scope: Scope, ranks: int) -> Iterator[SancusCandidate]:
    if ranks > 1:
        yield SancusCandidate(parts=ranks)
        yield SancusCandidate(parts=ranks, bits=16)


def cost(strategy: Sancus, problem: Problem, machine: Machine) -> Price:
    measured = strategy.bound is not None
    live = SancusCandidate(
        prefetch=strategy.prefetch,
        period=1 if measured or strategy.period is None else strategy.period,
        measured=measured,
    )

    def traffic(sent: Traffic, work: Work) -> Traffic:
        chosen = measured and strategy.period != 1 and problem.ranks > 1 and sent.bound == "exact"
        return replace(sent, bound="most") if chosen else sent

    rows, notes = RowBytes(strategy.codec, problem.number), (_CHOSEN,) if measured else ()
    return coded_price(rows, live, problem, machine, traffic, notes)
