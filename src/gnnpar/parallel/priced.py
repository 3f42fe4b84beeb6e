"""What a strategy may implement so that `gnnpar plan` and `gnnpar estimate` can price it.

Both Protocols are optional: a strategy without `cost` is listed as unpriced.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Protocol, runtime_checkable

from gnnpar.models.gnn import GNN
from gnnpar.parallel.strategy import FirstLayer, Workload
from gnnpar.pricing.candidate import Candidate, Scope
from gnnpar.pricing.ir import ModelIR
from gnnpar.pricing.machine import Machine
from gnnpar.pricing.price import Price, Traffic, summed_nbytes
from gnnpar.pricing.work import Held, Work


@dataclass(frozen=True, kw_only=True, eq=False)
class Problem:
    """A run to price, in numbers: the graph and the model on `ranks` ranks.

    `number`: bytes of a number of a row, `summed`: of one that ranks add up. `kept`: what layer 0 keeps over epochs
    where first_layer=cached, else 'no'. `threads`: of a rank, for what is measured on the machine at hand. `work_of`:
    parts -> the work of a partition, nothing kept.
    """

    workload: Workload
    model: GNN
    ir: ModelIR
    ranks: int
    work_of: Callable[[int], Work]
    number: int = 4
    first_layer: FirstLayer = "live"
    kept: Held = "no"
    seed: int = 0
    threads: int = 1

    @property
    def summed(self) -> int:
        return summed_nbytes(self.number)

    @property
    def params(self) -> int:
        return sum(p.numel() for p in self.model.parameters())

    def work(self, candidate: Candidate) -> Work:
        """Of a candidate's parts, with what its layer 0 keeps."""
        return replace(self.work_of(candidate.parts), held=candidate.keeps(self.kept))


@runtime_checkable
class Priced(Protocol):
    """A strategy that prices itself as it is configured."""

    def cost(self, problem: Problem, machine: Machine) -> Price:
        """Seconds, bytes and memory of an epoch on the ranks of `machine`; ValueError where the run is refused."""
        ...


@runtime_checkable
class Enumerated(Priced, Protocol):
    """A strategy with configurations that a planner may choose from."""

    def candidates(self, scope: Scope, ranks: int) -> Iterable[Candidate]:
        """Return configurations on exactly so many ranks, a typical one of each engine first: calibration measures
        that."""
        ...


def priced(
    candidate: Candidate, problem: Problem, machine: Machine, traffic: Traffic | None, notes: tuple[str, ...] = ()
) -> Price:
    """Return the price of the candidate that stands for a configured strategy."""
    return replace(candidate.price(problem.work(candidate), machine), traffic=traffic, notes=notes)
