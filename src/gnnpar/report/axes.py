"""Scales of pictures: ends, ticks and places of values."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

_LEAST = 1e-300  # smallest value on a logarithmic scale


@dataclass(frozen=True)
class Axis:
    """A scale from low to high with its ticks."""

    low: float
    high: float
    ticks: Sequence[float]
    log: bool = False

    def at(self, value: float) -> float:
        """Return the place of a value in percent of the scale."""
        low, x, high = (self._on(each) for each in (self.low, value, self.high))
        return round(100 * (x - low) / (high - low), 2)

    def _on(self, value: float) -> float:
        return math.log(max(value, _LEAST)) if self.log else value

    def labels(self, gap: float) -> list[tuple[float, str]]:
        """Return places and texts of the ticks that are at least `gap` percent apart."""
        found: list[tuple[float, str]] = []
        for tick in self.ticks:
            if not found or self.at(tick) - found[-1][0] >= gap:
                found.append((self.at(tick), f"{tick:g}"))
        return found


def linear_axis(low: float, high: float) -> Axis:
    """Return a scale with at most six round ticks."""
    span = high - low or 1.0
    unit = 10.0 ** math.floor(math.log10(span / 2))
    step = next(unit * k for k in (1, 2, 5, 10) if span <= 5 * unit * k)
    ticks = [k * step for k in range(math.ceil(low / step), math.floor((low + span) / step) + 1)]
    return Axis(low, low + span, ticks)


def log_axis(values: Sequence[float]) -> Axis:
    """Return a logarithmic scale that holds all values but NaN."""
    known = [max(value, _LEAST) for value in values if value == value]
    room = max(1.1, (max(known) / min(known)) ** 0.06)
    low, high = min(known) / room, max(known) * room
    decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    steps = (1, 1.2, 1.5, 2, 3, 5, 7) if high < 4 * low else (1, 2, 3, 5) if len(decades) < 5 else (1,)
    ticks = [step * 10.0**k for k in decades[:: 1 + len(decades) // 10] for step in steps]
    inside = [tick for tick in ticks if low <= tick <= high]
    return Axis(low, high, inside if len(inside) > 1 else linear_axis(low, high).ticks, log=True)


def scale_of(largest: float, quantity: str) -> tuple[float, str]:
    """Return the divisor and the unit for the largest value."""
    units = {
        "seconds": ((3600.0, "h"), (60.0, "min"), (1.0, "s"), (1e-3, "ms"), (1e-6, "µs")),
        "bytes": ((2.0**30, "GiB"), (2.0**20, "MiB"), (2.0**10, "KiB"), (1.0, "B")),
    }[quantity]
    if quantity == "seconds" and 60 <= largest < 600:
        return 1.0, "s"
    return next((unit for unit in units if largest >= unit[0]), units[-1])


def spread_apart(heights: Sequence[float], gap: float, low: float, high: float) -> list[float]:
    """Push ascending heights apart, to `gap` if there is room between low and high."""
    found = list(heights)
    for _ in range(60):
        for i in range(1, len(found)):
            missing = gap - (found[i] - found[i - 1])
            if missing > 0:
                found[i] += missing / 2
                found[i - 1] -= missing / 2
        found = [min(max(height, low), high) for height in found]
    return found
