"""What an epoch of SANCUS takes: that of CAGNET, without the broadcasts that are skipped. Units: seconds, bytes.

With a bound, how many are skipped is known in training alone: the price is then that of every broadcast.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from gnnpar.files import JsonDict
from gnnpar.parallel.priced import Problem
from gnnpar.parallel.row_bytes import RowBytes, coded_price
from gnnpar.pricing.broadcast import BroadcastCandidate, whole_parts
from gnnpar.pricing.candidate import Knobs, Scope, codec_fields, quality_of
from gnnpar.pricing.ir import ModelIR
from gnnpar.pricing.machine import Machine
from gnnpar.pricing.price import Bound, Memory, Price, Traffic
from gnnpar.pricing.quality import Quality
from gnnpar.pricing.work import Direction, Work

if TYPE_CHECKING:
    from gnnpar.parallel.sancus.strategy import Sancus

PERIOD = 2  # of candidates: a longer one always costs less, so that a search would take the longest
_CHOSEN = "broadcasts are skipped while it trains: bytes and time are those of all, without what measuring takes"


@dataclass(frozen=True, kw_only=True)
class SancusCandidate(BroadcastCandidate):
    """`period`: epochs from broadcast to broadcast; `measured`: copies of own rows are kept, too."""

    family: str = "sancus"
    period: int = PERIOD
    measured: bool = False

    @property
    def label(self) -> str:
        words = [f"sancus, every {self.period} epochs"] + ([f"{self.bits} bit"] if self.bits != 32 else [])
        words += [f"{self.prefetch} parts ahead"] if self.prefetch != 1 else []
        return ", ".join(words + (["first layer held"] if self.held else []))

    @property
    def quality(self) -> frozenset[Quality]:
        return quality_of(self.bits, stale=True)

    @property
    def fields(self) -> JsonDict:
        return {"codec": codec_fields(self.bits), "prefetch": self.prefetch, "period": self.period}

    def knobs(self, ir: ModelIR) -> Knobs:
        return {"bits": (32, 16)}

    def share(self, direction: Direction) -> float:
        return 1 / self.period if direction == "forward" else 1.0

    def memory(self, work: Work) -> tuple[Memory, ...]:
        width = sum(work.exchanged_width(i, "forward") for i in range(work.ir.num_layers))
        nodes = work.parts.nodes
        copies = (sum(nodes) - (0.0 if self.measured else n) for n in nodes)
        more = (4.0 * width * rows for rows in copies)
        return tuple(replace(m, halo=m.halo + n) for m, n in zip(super().memory(work), more, strict=True))


def candidates(scope: Scope, ranks: int) -> Iterator[SancusCandidate]:
    if ranks > 1:
        yield SancusCandidate(parts=ranks)
        yield SancusCandidate(parts=ranks, bits=16)


def cost(strategy: Sancus, problem: Problem, machine: Machine) -> Price:
    rows = RowBytes(strategy.codec, problem.number)
    skips = strategy.bound is None and strategy.period is not None
    live = SancusCandidate(
        parts=problem.ranks,
        held=problem.kept == "result",
        prefetch=strategy.prefetch,
        period=strategy.period if skips and strategy.period else 1,
        measured=strategy.bound is not None,
    )

    def traffic() -> Traffic:
        every = rows.halo_traffic(whole_parts(problem.work(live)), params=problem.params)
        bound: Bound = every.bound
        if problem.ranks > 1 and strategy.period != 1 and bound == "exact":
            bound = "mean" if skips else "most"
        return replace(every, forward=every.forward * live.share("forward"), bound=bound)

    return coded_price(rows, live, problem, machine, traffic, () if skips else (_CHOSEN,))
