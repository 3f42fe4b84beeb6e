"""What an epoch of CAGNET takes: all rows to all ranks, part after part. Units: seconds, bytes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from gnnpar.durable import JsonDict
from gnnpar.parallel.priced import Problem, priced
from gnnpar.parallel.row_bytes import SENDS_NOTHING, RowBytes
from gnnpar.pricing.broadcast import BroadcastCandidate, whole_parts
from gnnpar.pricing.candidate import Knobs, Scope, codec_fields, quality_of
from gnnpar.pricing.ir import ModelIR
from gnnpar.pricing.machine import Machine
from gnnpar.pricing.price import Price
from gnnpar.pricing.quality import Quality

if TYPE_CHECKING:
    from gnnpar.parallel.cagnet.strategy import Cagnet


@dataclass(frozen=True, kw_only=True)
class CagnetCandidate(BroadcastCandidate):
    family: str = "cagnet"

    @property
    def label(self) -> str:
        words = ["cagnet"] + ([f"{self.bits} bit"] if self.bits != 32 else [])
        words += [f"{self.prefetch} parts ahead"] if self.prefetch != 1 else []
        return ", ".join(words + (["first layer held"] if self.held else []))

    @property
    def quality(self) -> frozenset[Quality]:
        return quality_of(self.bits)

    @property
    def fields(self) -> JsonDict:
        return {"codec": codec_fields(self.bits), "prefetch": self.prefetch}

    def knobs(self, ir: ModelIR) -> Knobs:
        return {"bits": (32, 16)}


def candidates(scope: Scope, ranks: int) -> Iterator[CagnetCandidate]:
    if ranks > 1:
        yield CagnetCandidate(parts=ranks)
        yield CagnetCandidate(parts=ranks, bits=16)


def cost(strategy: Cagnet, problem: Problem, machine: Machine) -> Price:
    rows = RowBytes(strategy.codec, problem.number)
    if not rows.known:
        return Price(unpriced=rows.unknown)
    live = CagnetCandidate(parts=problem.ranks, held=problem.kept == "result", prefetch=strategy.prefetch)
    traffic = rows.halo_traffic(whole_parts(problem.work(live)), params=problem.params)
    if not rows.sends:
        return Price(traffic=traffic, unpriced=SENDS_NOTHING)
    bits, notes = rows.bits()
    bits = 32 if problem.ranks == 1 else bits
    return priced(live.turned({"bits": bits}), problem, machine, traffic, notes)
