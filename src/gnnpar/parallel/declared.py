"""Price a strategy by the `Step` that it declares, as it is configured."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from gnnpar.files import JsonDict
from gnnpar.parallel.cover.weights import Halo
from gnnpar.parallel.priced import Problem
from gnnpar.parallel.row_bytes import RowBytes, coded_price
from gnnpar.pricing.candidate import codec_fields
from gnnpar.pricing.machine import Machine
from gnnpar.pricing.price import Price, Traffic
from gnnpar.pricing.steps import CodedCandidate, Step
from gnnpar.pricing.work import Work

if TYPE_CHECKING:
    from gnnpar.parallel.base import Declares


def as_declared(traffic: Traffic, work: Work, rows: RowBytes, problem: Problem) -> Traffic:
    """Return the bytes of the step as they are."""
    return traffic


@dataclass(frozen=True, kw_only=True)
class Declaration:
    """How a strategy is priced. `words`: of its options, after the family in the label. `options`: fields that a plan
    sets, with their values. `halo`: strategy.halo; `linear`: a cover splits linear folds alone. `sent`: makes of the
    bytes of the step those that it sends, where they differ."""

    family: str
    step: Step
    words: Sequence[str] = ()
    options: Mapping[str, object] = field(default_factory=dict[str, object])
    notes: tuple[str, ...] = ()
    halo: Halo = "rows"
    linear: bool = False
    sent: Callable[[Traffic, Work, RowBytes, Problem], Traffic] = as_declared


@dataclass(frozen=True, kw_only=True)
class DeclaredCandidate(CodedCandidate):
    """A strategy as it is configured, but for its codec, which is one of `bits`."""

    strategy: Declares

    @property
    def step(self) -> Step:
        return self.strategy.declared().step

    @property
    def words(self) -> Sequence[str]:
        return self.strategy.declared().words

    @property
    def fields(self) -> JsonDict:
        return {"codec": codec_fields(self.bits), **self.strategy.declared().options}

    def as_json(self) -> JsonDict:
        return {name: value for name, value in super().as_json().items() if name != "strategy"} | dict(
            self.strategy.declared().options
        )


def candidates(strategy: Declares, ranks: int) -> Iterator[DeclaredCandidate]:
    """Return the strategy with rows as they are, and rounded."""
    for bits in (32, 16) if ranks > 1 else ():
        yield DeclaredCandidate(family=strategy.declared().family, parts=ranks, bits=bits, strategy=strategy)


def cost(strategy: Declares, problem: Problem, machine: Machine) -> Price:
    """Return the price of the strategy with its codec."""
    declared = strategy.declared()
    rows = RowBytes(strategy.codec, problem.number, declared.halo, linear=declared.linear)
    live = DeclaredCandidate(family=declared.family, strategy=strategy)

    def sent(traffic: Traffic, work: Work) -> Traffic:
        return declared.sent(traffic, work, rows, problem)

    return coded_price(rows, live, problem, machine, sent, declared.notes)


def beside(overlap: str) -> Literal["inner", "none"]:
    """Return what a halo exchange passes beside, under strategy.overlap."""
    return "none" if overlap == "none" else "inner"
