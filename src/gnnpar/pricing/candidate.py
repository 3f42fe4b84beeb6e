"""A candidate: one configuration of a strategy on a number of ranks, which prices itself.

A planner enumerates candidates, or searches them by turning their knobs; it knows none of the classes.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Self

from gnnpar.files import JsonDict, JsonObject
from gnnpar.pricing.ir import ModelIR
from gnnpar.pricing.machine import Machine
from gnnpar.pricing.price import Memory, Phases, Price
from gnnpar.pricing.quality import Quality
from gnnpar.pricing.tasks import Task
from gnnpar.pricing.work import Held, Work

Values = JsonObject
Knobs = Mapping[str, Sequence[Any]]  # Any: a knob takes values of a type of its own


@dataclass(frozen=True, kw_only=True)
class Scope:
    """What candidates are enumerated for. `cached`: is layer 0 kept (first_layer=cached)?"""

    ir: ModelIR
    nodes: int
    cached: bool = False


@dataclass(frozen=True, kw_only=True)
class Candidate(ABC):
    """`family`: name of the strategy's YAML. stages x parts ranks. `held`: layer 0 keeps what it needs of the features
    over epochs (first_layer=cached)."""

    family: str
    parts: int = 1
    stages: int = 1
    held: bool = False

    @property
    def ranks(self) -> int:
        return self.parts * self.stages

    @property
    @abstractmethod
    def label(self) -> str:
        """What a user reads: 'hybrid 2 x 2, 4 chunks, 8 bit'."""

    @property
    def quality(self) -> frozenset[Quality]:
        """The classes of inexactness that a user must have allowed."""
        return frozenset({"exact"})

    @property
    def engine(self) -> str:
        """What runs it, as `Rates.visits` names it; '' where it is not calibrated."""
        return self.family

    def as_json(self) -> JsonDict:
        """Return its fields, for people and for comparing plans."""
        return {k: list(v) if isinstance(v, tuple) else v for k, v in vars(self).items()}

    @property
    def fields(self) -> JsonDict:
        """Overrides of the strategy's YAML."""
        return {}

    @abstractmethod
    def phases(self, work: Work, machine: Machine) -> Phases:
        """Seconds of an epoch. The work is cut into `parts` parts, rates are those of `engine`."""

    @abstractmethod
    def memory(self, work: Work) -> tuple[Memory, ...]:
        """By rank: stages of the grid, then parts."""

    @abstractmethod
    def tasks(self, work: Work, machine: Machine) -> list[Task]:
        """Return the tasks of an epoch for the event simulator; rates are those of `engine`."""

    def price(self, work: Work, machine: Machine) -> Price:
        phases = self.phases(*self.in_engine(work, machine))
        return Price(label=self.label, phases=vars(phases), memory=self.memory(work))

    def in_engine(self, work: Work, machine: Machine) -> tuple[Work, Machine]:
        """Both with the rates that kernels have in this candidate's engine."""
        assert work.parts.parts == self.parts
        there = Machine(machine.fabric, tuple(r.of_engine(self.engine) for r in machine.rates))
        return replace(work, rates=tuple(r.of_engine(self.engine) for r in work.rates)), there

    def placed(self, work: Work, machine: Machine) -> Self:
        """With layers on the stages as is best for the devices they run on."""
        return self

    def layers_of(self, num_layers: int) -> tuple[range, ...]:
        """Layers of each stage."""
        return (range(num_layers),)

    def keeps(self, held: Held) -> Held:
        """Return the cache of layer 0, if first_layer=cached would keep `held`."""
        return "no"

    # What a search may change. A knob is a name with values; the first one is the default.

    def knobs(self, ir: ModelIR) -> Knobs:
        return {}

    def turned(self, knobs: Values) -> Self:
        """With these values of its knobs."""
        return replace(self, **knobs)

    @property
    def turns(self) -> Values:
        """The value of each knob."""
        return vars(self)

    def makes_sense(self, nodes: int) -> bool:
        """Is there enough of the graph for its chunks?"""
        return True

    @property
    def may_hold(self) -> bool:
        """Does it send less where layer 0 is held?"""
        return False

    @property
    def ordered(self) -> bool:
        """Does it matter which rank is which device?"""
        return True

    @property
    def whole_halo(self) -> bool:
        """Does a rank hold all remote rows that it reads at once?"""
        return True


def even_cuts(num_layers: int, stages: int) -> tuple[int, ...]:
    """First layers of stages of equal length; the first ones have one more where they differ."""
    size, more = divmod(num_layers, stages)
    return tuple(s * size + min(s, more) for s in range(stages))


def layers_between(cuts: tuple[int, ...], num_layers: int) -> tuple[range, ...]:
    """Layers of each stage, of their first layers."""
    return tuple(range(a, b) for a, b in zip(cuts, (*cuts[1:], num_layers), strict=True))


def codec_fields(bits: int) -> JsonDict:
    """Return the codec of so many bits, as its YAML has it."""
    if bits == 32:
        return {"_target_": "gnnpar.codecs.codec.Identity"}
    if bits == 16:
        return {"_target_": "gnnpar.codecs.codec.BFloat16"}
    return {"_target_": "gnnpar.codecs.uniform.Uniform", "bits": bits, "gradient_bits": None, "score_bits": 8}


def quality_of(bits: int, *, stale: bool = False) -> frozenset[Quality]:
    """Of rows in so many bits on the wire."""
    qualities: set[Quality] = {"stale"} if stale else set()
    if bits < 32:
        qualities.add("rounded" if bits == 16 else "quantized")
    return frozenset(qualities or {"exact"})
