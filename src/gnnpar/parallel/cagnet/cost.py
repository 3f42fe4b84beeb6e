"""CAGNET: whole parts to all ranks, one after the other; in 1.5 dimensions to the ranks of a grid's column."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import isqrt
from typing import TYPE_CHECKING

from gnnpar.parallel.cagnet.grid import Grid
from gnnpar.parallel.cagnet.replicated import refuse_fold
from gnnpar.parallel.priced import Problem
from gnnpar.parallel.row_bytes import RowBytes, coded_price
from gnnpar.pricing.candidate import Scope
from gnnpar.pricing.machine import Machine
from gnnpar.pricing.price import Price
from gnnpar.pricing.regrouped import Regrouped
from gnnpar.pricing.steps import CodedCandidate, Step

if TYPE_CHECKING:
    from gnnpar.parallel.cagnet.strategy import Cagnet


@dataclass(frozen=True, kw_only=True)
class CagnetCandidate(CodedCandidate):
    """`replication`: ranks that share the in-edges of their rows, whose square divides the number of parts."""

    options = ("prefetch", "replication")
    family: str = "cagnet"
    prefetch: int = 1
    replication: int = 1

    @property
    def step(self) -> Step:
        if self.replication == 1:
            return Step("parts", prefetch=self.prefetch)
        grid, ranks = Grid(self.parts, self.replication), range(self.parts)
        read = (tuple((grid.source(grid.column(r), s),) for s in range(grid.stages)) for r in ranks)
        return Step("grid", prefetch=self.prefetch, groups=Regrouped(tuple(map(grid.group, ranks)), tuple(read)))

    @property
    def words(self) -> list[str]:
        return [f"replication {self.replication}"] if self.replication > 1 else []


def candidates(scope: Scope, ranks: int) -> Iterator[CagnetCandidate]:
    """1.5 dimensions where partial sums of ranks add up to a layer's result."""
    sums = all(f.linear for i in range(scope.ir.num_layers) for f in scope.ir.folds(i))
    most = isqrt(ranks) if sums else 1
    for copies in (c for c in range(1, most + 1) if ranks > 1 and ranks % c**2 == 0):
        yield CagnetCandidate(parts=ranks, replication=copies)
        yield CagnetCandidate(parts=ranks, replication=copies, bits=16)


def cost(strategy: Cagnet, problem: Problem, machine: Machine) -> Price:
    rows, copies = RowBytes(strategy.codec, problem.number), strategy.replication
    if copies > 1:
        strategy.check_ranks(problem.ranks)
        for layer in range(problem.ir.num_layers):
            for fold in problem.ir.folds(layer):
                refuse_fold(fold.kind, layer, copies, linear=fold.linear)
    return coded_price(rows, CagnetCandidate(prefetch=strategy.prefetch, replication=copies), problem, machine)
