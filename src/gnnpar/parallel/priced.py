"""Protocols of strategies that `gnnpar plan` and `gnnpar estimate` can price.

Both are optional: a strategy without `cost` is listed as unpriced.
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
    """A run to price: the graph and the model on `ranks` ranks.

    `number`: bytes per element of a row, `summed`: of elements that ranks add up. `kept`: rows that layer 0 keeps over
    epochs if first_layer=cached, else 'no'. `threads`: per rank, for measurements on this machine. `work_of`: number of
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
        """Return the work of a candidate's parts, with the rows that its layer 0 keeps."""
        return replace(self.work_of(candidate.parts), held=candidate.keeps(self.kept))


@runtime_checkable
class Priced(Protocol):
    """A strategy that prices itself as it is configured."""

    def cost(self, problem: Problem, machine: Machine) -> Price:
        """Return time, bytes and memory of an epoch on the ranks of `machine`. Raises ValueError for a refused run."""
        ...


@runtime_checkable
class Enumerated(Priced, Protocol):
    """A strategy with configurations that a planner may choose from."""

    def candidates(self, scope: Scope, ranks: int) -> Iterable[Candidate]:
        """Return configurations on exactly `ranks` ranks, a typical one of each engine first, which calibration
        measures."""
        ...


def priced(
    candidate: Candidate, problem: Problem, machine: Machine, traffic: Traffic | None, notes: tuple[str, ...] = ()
) -> Price:
    """Return the candidate's price, with the traffic and notes of a configured strategy."""
    return replace(candidate.price(problem.work(candidate), machine), traffic=traffic, notes=notes)
