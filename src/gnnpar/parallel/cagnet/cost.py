"""What an epoch of CAGNET takes: all rows to all ranks, part after part. Units: seconds, bytes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from gnnpar.durable import JsonDict
from gnnpar.parallel.cagnet.grid import Grid
from gnnpar.parallel.priced import Problem, priced
from gnnpar.parallel.row_bytes import SENDS_NOTHING, RowBytes
from gnnpar.pricing.broadcast import BroadcastCandidate, whole_parts
from gnnpar.pricing.candidate import Knobs, Scope, codec_fields, quality_of
from gnnpar.pricing.flat import exchanged_folds, ring_bytes
from gnnpar.pricing.ir import ModelIR
from gnnpar.pricing.machine import Machine
from gnnpar.pricing.price import Price, Traffic
from gnnpar.pricing.quality import Quality

if TYPE_CHECKING:
    from gnnpar.parallel.cagnet.strategy import Cagnet

_NO_TIME = "time and memory of strategy.replication above 1 are not predicted"


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
    if strategy.replication > 1:
        strategy.check_ranks(problem.ranks)
        return Price(traffic=replicated_traffic(strategy.replication, rows, problem, live), unpriced=_NO_TIME)
    traffic = rows.halo_traffic(whole_parts(problem.work(live)), params=problem.params)
    if not rows.sends:
        return Price(traffic=traffic, unpriced=SENDS_NOTHING)
    bits, notes = rows.bits()
    bits = 32 if problem.ranks == 1 else bits
    return priced(live.turned({"bits": bits}), problem, machine, traffic, notes)


def replicated_traffic(copies: int, rows: RowBytes, problem: Problem, live: CagnetCandidate) -> Traffic:
    """Rows of each part to a column of ranks, partial sums to the owners of their rows; the same back."""
    work, grid = problem.work(live), Grid(problem.ranks, copies)
    nodes = work.parts.nodes
    read = sum(n * sum(p != q for p in grid.readers(q)) for q, n in enumerate(nodes))
    added = (copies - 1) * sum(nodes)
    sent = {False: 0.0, True: 0.0}
    for fold in exchanged_folds(work):
        for back in (False, True) if fold.learned else (False,):
            sent[back] += read * rows.row(fold.src, gradient=back) + added * rows.row((fold.out,), gradient=back)
    total = ring_bytes(problem.ranks, problem.params + 1 + work.ir.summed_moments, rows.number)
    return Traffic(forward=sent[False], backward=sent[True], reduce=total, bound=rows.bound)
