"""Predicted and measured, configuration by configuration; shared with planner_choice."""

import statistics
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import records
import reports


@dataclass(frozen=True)
class Pair:
    """One configuration. Seconds an epoch (the geometric mean over launches), bytes of the largest rank."""

    said: dict[str, Any]
    launches: tuple[float, ...]
    peak_bytes: float | None

    @property
    def family(self) -> str:
        return self.said["family"]

    @property
    def label(self) -> str:
        return self.said["label"]

    @property
    def predicted(self) -> float:
        return self.said["epoch_seconds"]

    @property
    def measured(self) -> float:
        return statistics.median(self.launches)

    @property
    def error(self) -> float:
        """Signed and relative to what was measured."""
        return self.predicted / self.measured - 1

    @property
    def predicted_bytes(self) -> float:
        return max(self.said["peak_bytes"])

    @property
    def spread(self) -> float | None:
        """Of two launches or more: the largest over the smallest, less one."""
        return max(self.launches) / min(self.launches) - 1 if len(self.launches) > 1 else None


def read(predictions: Path, results: Path, epoch: str = "median") -> list[Pair]:
    """Of configurations that were launched, in the order of the list. `epoch`: of a launch, its median or its mean."""
    launches, peaks = defaultdict(list), defaultdict(list)
    for row in records.read(results):
        result = row["result"]
        launches[row["job"]].append(result["epoch_seconds"][epoch])
        peak = result.get("peak_bytes") or result["memory_bytes"]["peak"]  # KEPT of the committed lines
        if all(peak or [None]):
            peaks[row["job"]].append(max(peak))
    said = [row for row in records.read(predictions) if row["job"] in launches]
    return [Pair(s, tuple(launches[s["job"]]), max(peaks[s["job"]], default=None)) for s in said]


def by(pairs: Sequence[Pair], *keys: str) -> dict[tuple[Any, ...], list[Pair]]:
    return reports.by(pairs, lambda pair: tuple(pair.said[key] for key in keys))


def median_error(pairs: Sequence[Pair], *, factor: float = 1.0) -> float:
    """Of predictions times a factor."""
    return statistics.median(abs(factor * p.predicted / p.measured - 1) for p in pairs)
