"""What an epoch is predicted to take: seconds by phase."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Phases:
    """Seconds of an epoch on its critical way. `wire`: communication that nothing hides; `bubble`: stages that wait."""

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
