"""What an epoch of DIGEST takes, on average: that of graph parallelism, whose messages travel every `period` epochs.

Units: seconds, bytes. Memory: the table of halo rows beside graph parallelism's.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from gnnpar.files import JsonDict
from gnnpar.parallel.priced import Problem
from gnnpar.parallel.row_bytes import RowBytes, coded_price
from gnnpar.pricing.candidate import Scope, codec_fields, quality_of
from gnnpar.pricing.flat import ExchangeCandidate
from gnnpar.pricing.machine import Machine
from gnnpar.pricing.price import Memory, Phases, Price, Traffic
from gnnpar.pricing.quality import Quality
from gnnpar.pricing.work import Direction, Work

if TYPE_CHECKING:
    from gnnpar.parallel.digest.strategy import Digest

PERIOD = 2  # of candidates: a longer one always costs less, so that a search would take the longest


@dataclass(frozen=True, kw_only=True)
class TableCandidate(ExchangeCandidate):
    """`period`: epochs from refresh to refresh; `gradients`: do those of halo rows travel then?"""

    family: str = "digest"
    period: int = PERIOD
    gradients: bool = False

    @property
    def label(self) -> str:
        words = [f"digest, every {self.period} epochs"]
        words += ["with gradients"] if self.gradients else []
        words += ["no overlap"] if self.overlap == "none" else []
        words += [f"{self.bits} bit"] if self.bits != 32 else []
        return ", ".join(words + (["first layer held"] if self.held else []))

    @property
    def quality(self) -> frozenset[Quality]:
        return quality_of(self.bits, stale=self.period > 1 or not self.gradients)

    @property
    def fields(self) -> JsonDict:
        return {"codec": codec_fields(self.bits), "period": self.period, "gradients": self.gradients}

    def share(self, direction: Direction) -> float:
        """Of epochs that send in this direction."""
        return 0.0 if direction == "backward" and not self.gradients else 1 / self.period

    def copies(self, work: Work, layer: int, direction: Direction) -> float:
        return self.share(direction)

    def layer_phases(
        self, work: Work, machine: Machine, layer: int, direction: Direction, *, lost: float, visit: float
    ) -> Phases:
        every = super().layer_phases(work, machine, layer, direction, lost=lost, visit=visit)
        share = self.share(direction)
        return replace(every, wire=every.wire * share, encode=every.encode * share)

    def memory(self, work: Work) -> tuple[Memory, ...]:
        width = sum(work.exchanged_width(i, "forward") for i in range(work.ir.num_layers)) if self.period > 1 else 0
        rows = (sum(halo) for halo in work.parts.halo)
        return tuple(replace(m, halo=m.halo + 4.0 * width * n) for m, n in zip(super().memory(work), rows, strict=True))


def candidates(scope: Scope, ranks: int) -> Iterator[TableCandidate]:
    if ranks > 1:
        yield TableCandidate(parts=ranks)
        yield TableCandidate(parts=ranks, bits=16)


def cost(strategy: Digest, problem: Problem, machine: Machine) -> Price:
    rows = RowBytes(strategy.codec, problem.number, strategy.halo, linear=True)
    live = TableCandidate(
        parts=problem.ranks,
        held=problem.kept != "no",
        overlap="none" if strategy.overlap == "none" else "edges",
        period=strategy.period,
        gradients=strategy.gradients,
    )

    def traffic() -> Traffic:
        every = rows.halo_traffic(problem.work(live), params=problem.params)
        forward, backward = every.forward * live.share("forward"), every.backward * live.share("backward")
        bound = "mean" if every.bound == "exact" and strategy.period > 1 and every.forward else every.bound
        return replace(every, forward=forward, backward=backward, bound=bound)

    return coded_price(rows, live, problem, machine, traffic)
