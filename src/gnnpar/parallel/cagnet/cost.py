"""What an epoch of CAGNET takes: all rows to all ranks, part after part. Units: seconds, bytes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import isqrt
from typing import TYPE_CHECKING

from gnnpar.files import JsonDict
from gnnpar.parallel.cagnet.grid import Grid
from gnnpar.parallel.cagnet.grid_cost import GridWork
from gnnpar.parallel.cagnet.replicated import refuse_fold
from gnnpar.parallel.priced import Problem
from gnnpar.parallel.row_bytes import RowBytes, coded_price
from gnnpar.pricing.broadcast import BroadcastCandidate, whole_parts
from gnnpar.pricing.candidate import Knobs, Scope, codec_fields, quality_of
from gnnpar.pricing.flat import exchanged_folds, ring_bytes
from gnnpar.pricing.ir import ModelIR
from gnnpar.pricing.machine import Machine
from gnnpar.pricing.price import Memory, Phases, Price, Traffic
from gnnpar.pricing.quality import Quality
from gnnpar.pricing.tasks import Task
from gnnpar.pricing.work import Direction, Work

if TYPE_CHECKING:
    from gnnpar.parallel.cagnet.strategy import Cagnet


@dataclass(frozen=True, kw_only=True)
class CagnetCandidate(BroadcastCandidate):
    """`replication`: ranks that share the in-edges of their rows, whose square divides the number of parts."""

    family: str = "cagnet"
    replication: int = 1

    @property
    def label(self) -> str:
        words = ["cagnet"] + ([f"replication {self.replication}"] if self.replication > 1 else [])
        words += [f"{self.bits} bit"] if self.bits != 32 else []
        words += [f"{self.prefetch} parts ahead"] if self.prefetch != 1 else []
        return ", ".join(words + (["first layer held"] if self.held else []))

    @property
    def quality(self) -> frozenset[Quality]:
        return quality_of(self.bits)

    @property
    def fields(self) -> JsonDict:
        return {"codec": codec_fields(self.bits), "prefetch": self.prefetch, "replication": self.replication}

    def knobs(self, ir: ModelIR) -> Knobs:
        return {"bits": (32, 16)}

    def on_grid(self, work: Work) -> GridWork:
        return GridWork(work, Grid(self.parts, self.replication), self.bits, self.prefetch)

    def layer_phases(
        self, work: Work, machine: Machine, layer: int, direction: Direction, *, lost: float, visit: float
    ) -> Phases:
        if self.replication == 1:
            return super().layer_phases(work, machine, layer, direction, lost=lost, visit=visit)
        return self.on_grid(work).phases(machine, layer, direction, lost=lost, visit=visit)

    def memory(self, work: Work) -> tuple[Memory, ...]:
        return super().memory(work) if self.replication == 1 else self.on_grid(work).memory()

    def tasks(self, work: Work, machine: Machine) -> list[Task]:
        return super().tasks(work, machine) if self.replication == 1 else self.on_grid(work).tasks(machine, self.engine)


def candidates(scope: Scope, ranks: int) -> Iterator[CagnetCandidate]:
    """1.5 dimensions where partial sums of ranks add up to a layer's result."""
    sums = all(f.linear for i in range(scope.ir.num_layers) for f in scope.ir.folds(i))
    most = isqrt(ranks) if sums else 1
    for copies in (c for c in range(1, most + 1) if ranks > 1 and ranks % c**2 == 0):
        yield CagnetCandidate(parts=ranks, replication=copies)
        yield CagnetCandidate(parts=ranks, replication=copies, bits=16)


def cost(strategy: Cagnet, problem: Problem, machine: Machine) -> Price:
    rows = RowBytes(strategy.codec, problem.number)
    live = CagnetCandidate(
        parts=problem.ranks,
        held=problem.kept == "result",
        prefetch=strategy.prefetch,
        replication=strategy.replication,
    )

    def traffic() -> Traffic:
        if strategy.replication == 1:
            return rows.halo_traffic(whole_parts(problem.work(live)), params=problem.params)
        strategy.check_ranks(problem.ranks)
        for layer in range(problem.ir.num_layers):
            for fold in problem.ir.folds(layer):
                refuse_fold(fold.kind, layer, strategy.replication, linear=fold.linear)
        return replicated_traffic(strategy.replication, rows, problem, live)

    return coded_price(rows, live, problem, machine, traffic)


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
    total = ring_bytes(problem.ranks, problem.params + 1 + work.ir.summed_moments, rows.summed)
    return Traffic(forward=sent[False], backward=sent[True], reduce=total, bound=rows.bound)
