"""DIGEST, on average: graph parallelism whose messages travel every `period` epochs, into a table of halo rows."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from gnnpar.files import JsonDict
from gnnpar.parallel.priced import Problem
from gnnpar.parallel.row_bytes import RowBytes, coded_price
from gnnpar.pricing.candidate import Scope, codec_fields
from gnnpar.pricing.machine import Machine
from gnnpar.pricing.price import Price
from gnnpar.pricing.steps import CodedCandidate, Step

if TYPE_CHECKING:
    from gnnpar.parallel.digest.strategy import Digest

PERIOD = 2  # of candidates: a longer one always costs less, so that a search would take the longest


@dataclass(frozen=True, kw_only=True)
class TableCandidate(CodedCandidate):
    """`period`: epochs from refresh to refresh; `gradients`: do those of halo rows travel then?"""

    family: str = "digest"
    overlap: Literal["none", "edges"] = "edges"
    period: int = PERIOD
    gradients: bool = False

    @property
    def step(self) -> Step:
        sends = (1 / self.period, self.gradients / self.period)
        overlap = "inner" if self.overlap == "edges" else "none"
        return Step("halo", overlap=overlap, sends=sends, kept=(float(self.period > 1), 0.0))

    @property
    def words(self) -> list[str]:
        words = [f"every {self.period} epochs"] + ["with gradients"] * self.gradients
        return words + ["no overlap"] * (self.overlap == "none")

    @property
    def fields(self) -> JsonDict:
        return {"codec": codec_fields(self.bits), "period": self.period, "gradients": self.gradients}


def candidates(scope: Scope, ranks: int) -> Iterator[TableCandidate]:
    if ranks > 1:
        yield TableCandidate(parts=ranks)
        yield TableCandidate(parts=ranks, bits=16)


def cost(strategy: Digest, problem: Problem, machine: Machine) -> Price:
    rows = RowBytes(strategy.codec, problem.number, strategy.halo, linear=True)
    overlap = "none" if strategy.overlap == "none" else "edges"
    live = TableCandidate(overlap=overlap, period=strategy.period, gradients=strategy.gradients)
    return coded_price(rows, live, problem, machine)
