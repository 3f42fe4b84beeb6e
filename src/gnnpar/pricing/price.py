"""The predicted cost of an epoch: seconds by phase, bytes held by category, bytes sent by phase."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Literal

from gnnpar.files import JsonDict

Bound = Literal["exact", "mean", "most"]
_SAFETY = 1.08  # for rounding by allocators and for small tensors


@dataclass(frozen=True)
class Phases:
    """Seconds of an epoch on its critical path. `wire`: messages that are not hidden; `bubble`: stages that wait."""

    compute: float = 0.0
    encode: float = 0.0
    wire: float = 0.0
    bubble: float = 0.0
    reduce: float = 0.0

    @property
    def seconds(self) -> float:
        return self.compute + self.encode + self.wire + self.bubble + self.reduce

    def __add__(self, other: Phases) -> Phases:
        return Phases(*(a + b for a, b in zip(vars(self).values(), vars(other).values(), strict=True)))

    def times(self, factor: float) -> Phases:
        return Phases(*(factor * value for value in vars(self).values()))


@dataclass(frozen=True, kw_only=True)
class Memory:
    """Peak bytes of one rank in an epoch by category. `parameters`: weights, gradients, two moments, and the summed
    vector; `saved`: between forward and backward; `transient`: the maximum at any time."""

    parameters: float = 0.0
    structure: float = 0.0
    features: float = 0.0
    saved: float = 0.0
    halo: float = 0.0
    history: float = 0.0
    transient: float = 0.0

    def __add__(self, other: Memory) -> Memory:
        return Memory(**{name: value + vars(other)[name] for name, value in vars(self).items()})

    @property
    def total(self) -> float:
        return _SAFETY * sum(asdict(self).values())

    def with_numbers_of(self, nbytes: int) -> Memory:
        """Return the memory with elements of this many bytes instead of 4; indices do not change. Parameters have at
        least 4 bytes, and so does `transient`, since 16-bit rows are summed in fp32."""
        wide = ("parameters", "transient")
        scale = {k: max(nbytes, 4) / 4 if k in wide else nbytes / 4 for k in vars(self) if k != "structure"}
        return Memory(**{k: scale.get(k, 1.0) * v for k, v in vars(self).items()})


@dataclass(frozen=True, kw_only=True)
class Traffic:
    """Bytes that an epoch after the first sends, all ranks together, payload and metadata, as result.json counts them.

    `bound`: kind of the figures; `most` for a codec that chooses its bits in training.
    """

    forward: float = 0.0
    backward: float = 0.0
    remat: float = 0.0
    push: float = 0.0
    stage: float = 0.0
    reduce: float = 0.0
    bound: Bound = "exact"

    @property
    def by_phase(self) -> dict[str, float]:
        return {f.name: vars(self)[f.name] for f in fields(self) if f.name != "bound"}

    @property
    def total(self) -> float:
        return sum(self.by_phase.values())

    def as_json(self) -> dict[str, object]:
        by_phase = {name: round(value) for name, value in self.by_phase.items()}
        return {"total": round(self.total), **by_phase, "is": self.bound}


def summed_nbytes(number: int) -> int:
    """Return the bytes of an element in a sum over ranks. number: bytes of a row's element; 16 bits sum in fp32."""
    return max(number, 4)


def ring_bytes(ranks: int, numbers: int, number: int) -> int:
    """Return the bytes of a ring sum of `numbers` elements of `number` bytes, over all ranks."""
    return 2 * (ranks - 1) * numbers * number


@dataclass(frozen=True, kw_only=True)
class Price:
    """A strategy's prediction of its epoch.

    phases: seconds by phase on the critical path. memory: by rank. `unpriced`: the reason that time and memory are not
    predicted; phases and memory are then empty. `notes`: differences between the priced and the running configuration.
    """

    label: str = ""
    phases: Mapping[str, float] = field(default_factory=dict)
    memory: tuple[Memory, ...] = ()
    traffic: Traffic | None = None
    unpriced: str = ""
    notes: tuple[str, ...] = ()

    @property
    def seconds(self) -> float:
        return sum(self.phases.values())

    @property
    def peak_bytes(self) -> float:
        return max((m.total for m in self.memory), default=0.0)

    def as_predicted(self) -> JsonDict:
        """Return the entry of plan.json and `gnnpar estimate --json`."""
        return {
            "epoch_seconds": self.seconds,
            "phases": dict(self.phases),
            "peak_bytes": [round(m.total) for m in self.memory],
            "label": self.label,
        }
