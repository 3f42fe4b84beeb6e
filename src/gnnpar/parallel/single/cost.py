"""One device: computing alone."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from gnnpar.parallel.priced import Problem, priced
from gnnpar.pricing.candidate import Scope
from gnnpar.pricing.machine import Machine
from gnnpar.pricing.price import Price, Traffic
from gnnpar.pricing.steps import FlatCandidate, Step

if TYPE_CHECKING:
    from gnnpar.parallel.single.strategy import Single


@dataclass(frozen=True, kw_only=True)
class SingleCandidate(FlatCandidate):
    family: str = "single"

    @property
    def step(self) -> Step:
        return Step("local")


def candidates(scope: Scope, ranks: int) -> Iterator[SingleCandidate]:
    if ranks == 1:
        yield SingleCandidate()


def cost(strategy: Single, problem: Problem, machine: Machine) -> Price:
    return priced(SingleCandidate(held=problem.kept != "no"), problem, machine, Traffic())
