"""What an epoch of BNS-GCN takes: that of graph parallelism on `rate` of the halo rows and of the edges from them.

Units: seconds, bytes. Expected values: rows are drawn one by one, so their number varies by sqrt(rate (1 - rate) n).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from gnnpar.parallel.priced import Problem
from gnnpar.parallel.row_bytes import RowBytes, coded_price
from gnnpar.pricing.flat import ExchangeCandidate
from gnnpar.pricing.machine import Machine
from gnnpar.pricing.price import Memory, Phases, Price, Traffic
from gnnpar.pricing.statistics import PartStats
from gnnpar.pricing.tasks import Task
from gnnpar.pricing.work import Work

if TYPE_CHECKING:
    from gnnpar.parallel.bns.strategy import BoundarySampling

_NOT_IN_TIME = "drawing and cutting the sample of an epoch is not in the time"


@dataclass(frozen=True, kw_only=True)
class SampledCandidate(ExchangeCandidate):
    """`rate`: share of boundary rows that travel."""

    family: str = "bns"
    rate: float = 1.0

    @property
    def label(self) -> str:
        words = [f"bns, {self.rate:g} of the boundary rows"]
        words += ["no overlap"] if self.overlap == "none" else []
        words += [f"{self.bits} bit"] if self.bits != 32 else []
        return ", ".join(words)

    def phases(self, work: Work, machine: Machine) -> Phases:
        return super().phases(thinned(work, self.rate), machine)

    def memory(self, work: Work) -> tuple[Memory, ...]:
        """Return memory: the blocks of all halo rows stay beside those of the sample, and so do cached features of
        layer 0."""
        held = super().memory(thinned(work, self.rate))
        if self.rate == 1:
            return held
        whole, inner = super().memory(work), super().memory(thinned(work, 0.0))
        kept = 4.0 * work.ir.in_dim * (1 - self.rate) if work.held == "rows" else 0.0
        return tuple(
            replace(h, structure=h.structure + w.structure - i.structure, halo=h.halo + kept * sum(rows))
            for h, w, i, rows in zip(held, whole, inner, work.parts.halo, strict=True)
        )

    def tasks(self, work: Work, machine: Machine) -> list[Task]:
        return super().tasks(thinned(work, self.rate), machine)


def thinned(work: Work, rate: float) -> Work:
    """Return the work with a share of its halo rows and of the edges from them."""
    parts = work.parts
    cut, halo = (tuple(tuple(n * rate for n in row) for row in table) for table in (parts.cut, parts.halo))
    return replace(work, parts=PartStats(parts.nodes, parts.inner, cut, halo))


def cost(strategy: BoundarySampling, problem: Problem, machine: Machine) -> Price:
    rows, rate = RowBytes(strategy.codec, problem.number), strategy.rate
    overlap = "none" if strategy.overlap == "none" else "edges"
    live = SampledCandidate(parts=problem.ranks, held=problem.kept != "no", overlap=overlap, rate=rate)

    def traffic() -> Traffic:
        sent = rows.halo_traffic(thinned(problem.work(live), rate), params=problem.params)
        varies = 0 < rate < 1 and sent.bound == "exact" and problem.ranks > 1
        return replace(sent, bound="mean") if varies else sent

    return coded_price(rows, live, problem, machine, traffic, (_NOT_IN_TIME,) if rate < 1 else ())
