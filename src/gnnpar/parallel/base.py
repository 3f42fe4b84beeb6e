"""Defaults of strategies with one part a rank and all layers on every rank."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from importlib import import_module
from typing import TYPE_CHECKING, ClassVar, Self

from gnnpar.codecs.codec import CodecConfig, Exactness, Identity, check_epochs
from gnnpar.parallel.strategy import Workload
from gnnpar.placement import Plan, Topology

if TYPE_CHECKING:
    from gnnpar.parallel.declared import Declaration
    from gnnpar.parallel.priced import Problem
    from gnnpar.pricing.candidate import Candidate, Knobs, Scope, Values
    from gnnpar.pricing.ir import ModelIR
    from gnnpar.pricing.machine import Machine
    from gnnpar.pricing.price import Price


@dataclass(frozen=True, kw_only=True)
class FlatStrategy:
    """A strategy that runs with any setting, and is its own exact limit."""

    def exact_limit(self) -> Self:
        return self

    def check(self, num_ranks: int, num_layers: int, epochs: int) -> None:
        """Anything runs."""

    def plan(self, workload: Workload, topology: Topology) -> Plan:
        return workload.flat_plan(topology)


@dataclass(frozen=True, kw_only=True)
class CodedStrategy(FlatStrategy):
    """A strategy that sends rows by `codec` in training. It is exact with the identity codec."""

    codec: CodecConfig = Identity()

    @property
    def exactness(self) -> frozenset[Exactness]:
        return self.codec.exactness

    def also(self, kind: Exactness) -> frozenset[Exactness]:
        """Return the exactness of the codec together with another kind of inexactness."""
        return (self.codec.exactness - {"exact"}) | frozenset[Exactness]({kind})

    def exact_limit(self) -> Self:
        return replace(self, codec=Identity())

    def check(self, num_ranks: int, num_layers: int, epochs: int) -> None:
        check_epochs(self.codec, epochs)


class Prices:
    """A strategy priced by `cost(strategy, problem, machine)` of the module `prices`, imported when it is asked."""

    prices: ClassVar[str]

    def cost(self, problem: Problem, machine: Machine) -> Price:
        return import_module(self.prices).cost(self, problem, machine)


class ByStep(FlatStrategy):
    """A strategy that is priced by the step that it declares."""

    def declared(self) -> Declaration:
        """Return the messages and folds of a layer, and the words for them."""
        raise NotImplementedError(f"{type(self).__name__} declares no step")

    def knobs(self, ir: ModelIR) -> Knobs:
        """Return the fields that a search may change, and `bits` on the wire, with their values."""
        return {"bits": (32, 16)}

    def cost(self, problem: Problem, machine: Machine) -> Price:
        return import_module("gnnpar.parallel.declared").cost(self, problem, machine)


class Proposes(ByStep):
    """A strategy that a planner may choose."""

    def proposals(self, scope: Scope, ranks: int) -> Iterable[Values]:
        """Return values of fields and of `bits` of each candidate: rows as they are, and rounded."""
        return [{}, {"bits": 16}] if ranks > 1 else []

    def candidates(self, scope: Scope, ranks: int) -> Iterable[Candidate]:
        declared = import_module("gnnpar.parallel.declared")
        return declared.candidates(self, ranks, self.proposals(scope, ranks))


class Declares(CodedStrategy, ByStep):
    """A strategy with a codec that is priced by its step."""


class Proposed(CodedStrategy, Proposes):
    """A strategy with a codec that a planner may choose."""
