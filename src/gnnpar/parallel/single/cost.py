"""What one device takes for an epoch: computing alone."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from gnnpar.parallel.priced import Problem, priced
from gnnpar.pricing.candidate import Scope
from gnnpar.pricing.flat import FlatCandidate, exchanged_layer
from gnnpar.pricing.machine import Machine
from gnnpar.pricing.price import Phases, Price, Traffic
from gnnpar.pricing.tasks import TaskGraph
from gnnpar.pricing.work import Direction, Piece, Work

if TYPE_CHECKING:
    from gnnpar.parallel.single.strategy import Single


@dataclass(frozen=True, kw_only=True)
class SingleCandidate(FlatCandidate):
    family: str = "single"

    @property
    def label(self) -> str:
        return "single, first layer held" if self.held else "single"

    def layer_phases(
        self, work: Work, machine: Machine, layer: int, direction: Direction, *, lost: float, visit: float
    ) -> Phases:
        return exchanged_layer(work, machine, layer, direction, lost=lost, visit=visit)

    def fold_tasks(
        self,
        graph: TaskGraph,
        p: int,
        tag: str,
        piece: Piece,
        nbytes: Mapping[int, float],
        ready: Sequence[int],
        idle: float,
    ) -> list[int]:
        return [graph.compute(f"{tag} inner", p, piece.inner, [ready[p]])]


def candidates(scope: Scope, ranks: int) -> Iterator[SingleCandidate]:
    if ranks == 1:
        yield SingleCandidate()


def cost(strategy: Single, problem: Problem, machine: Machine) -> Price:
    return priced(SingleCandidate(held=problem.kept != "no"), problem, machine, Traffic())
