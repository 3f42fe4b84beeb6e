"""PipeGCN: all messages of an epoch pass beside its computing, and wait for `staleness` epochs."""

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
    from gnnpar.parallel.pipegcn.strategy import PipeGCN


@dataclass(frozen=True, kw_only=True)
class LateCandidate(CodedCandidate):
    """`means`: of how many directions running means are kept. `overlap`: where `staleness` is 0."""

    family: str = "pipegcn"
    overlap: Literal["none", "edges"] = "edges"
    staleness: int = 1
    means: int = 0

    @property
    def step(self) -> Step:
        if self.staleness == 0:
            return Step("halo", overlap="inner" if self.overlap == "edges" else "none")
        waiting = self.staleness + self.means / 2
        return Step("halo", overlap="epoch", kept=(waiting, waiting))

    @property
    def words(self) -> list[str]:
        return {0: ["not late"], 1: []}.get(self.staleness, [f"{self.staleness} epochs late"])

    @property
    def fields(self) -> JsonDict:
        return {"codec": codec_fields(self.bits), "staleness": self.staleness}


def candidates(scope: Scope, ranks: int) -> Iterator[LateCandidate]:
    if ranks > 1:
        yield LateCandidate(parts=ranks)
        yield LateCandidate(parts=ranks, bits=16)


def cost(strategy: PipeGCN, problem: Problem, machine: Machine) -> Price:
    rows = RowBytes(strategy.codec, problem.number, strategy.halo, linear=strategy.staleness > 0)
    live = LateCandidate(
        overlap="none" if strategy.overlap == "none" else "edges",
        staleness=strategy.staleness,
        means=strategy.smooth_features + strategy.smooth_gradients,
    )
    return coded_price(rows, live, problem, machine)
