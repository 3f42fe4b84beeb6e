"""A candidate: one configuration of a strategy on a number of ranks, with its own price.

A planner enumerates candidates, or searches them by changing their knobs, without knowing their classes.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Self

from gnnpar.files import JsonDict, JsonObject
from gnnpar.placement import Quality
from gnnpar.pricing.ir import ModelIR
from gnnpar.pricing.machine import Machine
from gnnpar.pricing.price import Memory, Phases, Price
from gnnpar.pricing.tasks import SimulatedTask
from gnnpar.pricing.work import Held, Work

Values = JsonObject
Knobs = Mapping[str, Sequence[Any]]  # Any: each knob has its own type of values


@dataclass(frozen=True, kw_only=True)
class Scope:
    """The problem that candidates are enumerated for. `cached`: True if layer 0 is kept (first_layer=cached)."""

    ir: ModelIR
    nodes: int
    cached: bool = False


@dataclass(frozen=True, kw_only=True)
class Candidate(ABC):
    """A configuration on stages x parts ranks. `family`: name of the strategy's YAML. `held`: cache of layer 0 over
    epochs (first_layer=cached)."""

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
        """Return the displayed name: 'hybrid 2 x 2, 4 chunks, 8 bit'."""

    @property
    def quality(self) -> frozenset[Quality]:
        """Return the classes of inexactness that the user must allow."""
        return frozenset({"exact"})

    @property
    def engine(self) -> str:
        """Return the engine's name in `Rates.visits`; '' if it is not calibrated."""
        return self.family

    def as_json(self) -> JsonDict:
        """Return the fields, for display and for comparing plans."""
        return {k: list(v) if isinstance(v, tuple) else v for k, v in vars(self).items()}

    @property
    def fields(self) -> JsonDict:
        """Return the overrides of the strategy's YAML."""
        return {}

    def price(self, work: Work, machine: Machine) -> Price:
        """Return the price of an epoch, by default of `phases` and `memory`. The work is cut into `parts` parts."""
        phases = self.phases(*self.in_engine(work, machine))
        return Price(label=self.label, phases=vars(phases), memory=self.memory(work))

    def phases(self, work: Work, machine: Machine) -> Phases:
        """Return the seconds of an epoch by phase; rates are for `engine`."""
        raise NotImplementedError

    def memory(self, work: Work) -> tuple[Memory, ...]:
        """Return the memory of each rank: stages of the grid, then parts."""
        raise NotImplementedError

    def tasks(self, work: Work, machine: Machine) -> list[SimulatedTask]:
        """Return the tasks of an epoch for the event simulator; rates are for `engine`. Empty if unknown."""
        return []

    def in_engine(self, work: Work, machine: Machine) -> tuple[Work, Machine]:
        """Return work and machine with the rates of kernels in this candidate's engine."""
        assert work.parts.parts == self.parts
        there = Machine(machine.fabric, tuple(r.of_engine(self.engine) for r in machine.rates))
        return replace(work, rates=tuple(r.of_engine(self.engine) for r in work.rates)), there

    def placed(self, work: Work, machine: Machine) -> Self:
        """Return the candidate with the best layers for the devices of its stages."""
        return self

    def layers_of(self, num_layers: int) -> tuple[range, ...]:
        """Return the layers of each stage."""
        return (range(num_layers),)

    def keeps(self, held: Held) -> Held:
        """Return the cache of layer 0 of this candidate. held: cache that first_layer=cached asks for."""
        return "no"

    # Knobs: names with values, for a search to choose from. The first value is the default.

    def knobs(self, ir: ModelIR) -> Knobs:
        return {}

    def with_knobs(self, knobs: Values) -> Self:
        """Return the candidate with these values of its knobs."""
        return replace(self, **knobs)

    def makes_sense(self, nodes: int) -> bool:
        """Return True if the graph has enough nodes for its chunks."""
        return True

    @property
    def may_hold(self) -> bool:
        """Return True if it sends less with layer 0 cached."""
        return False

    @property
    def ordered(self) -> bool:
        """Return True if the assignment of ranks to devices matters."""
        return True

    @property
    def whole_halo(self) -> bool:
        """Return True if a rank holds all remote rows that it reads at once."""
        return True


def codec_fields(bits: int) -> JsonDict:
    """Return the codec of this many bits, as its YAML has it."""
    if bits == 32:
        return {"_target_": "gnnpar.codecs.codec.Identity"}
    if bits == 16:
        return {"_target_": "gnnpar.codecs.codec.BFloat16"}
    return {"_target_": "gnnpar.codecs.uniform.Uniform", "bits": bits, "gradient_bits": None, "score_bits": 8}


def quality_of(bits: int, *, stale: bool = False) -> frozenset[Quality]:
    """Return the quality of rows in this many bits on the wire."""
    qualities: set[Quality] = {"stale"} if stale else set()
    if bits < 32:
        qualities.add("rounded" if bits == 16 else "quantized")
    return frozenset(qualities or {"exact"})
