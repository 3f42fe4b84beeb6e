"""Predicted and measured, configuration by configuration; shared with planner_choice."""

import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any  # of JSON

import records
import reports

KEYS = ("graph", "model", "ranks", "link")
Pairs = Sequence[dict[str, Any]]


def read(predictions: Path, results: Path, epoch: str = "median") -> Pairs:
    """Return the predictions of configurations that were launched, each with what was measured.

    launches: seconds an epoch of each, its median or its mean (`epoch`). measured: their median. ratio: predicted over
    measured. bytes, predicted_bytes: of the largest rank, or None.
    """
    runs, pairs = reports.by(records.read(results), lambda row: row["job"]), []
    for said in (row for row in records.read(predictions) if row["job"] in runs):
        told = [row["result"] for row in runs[said["job"]]]
        peaks = [
            each.get("peak_bytes") or each["memory_bytes"]["peak"] for each in told
        ]  # the first of committed lines
        launches = [each["epoch_seconds"][epoch] for each in told]
        measured = {"launches": launches, "measured": statistics.median(launches)}
        measured["ratio"] = said["epoch_seconds"] / measured["measured"]
        measured["bytes"] = max((max(peak) for peak in peaks if all(peak or [None])), default=None)
        pairs.append({**said, **measured, "predicted_bytes": max(said["peak_bytes"])})
    return pairs


def by(pairs: Pairs, *keys: str) -> dict[tuple[Any, ...], Pairs]:
    return reports.by(pairs, lambda pair: tuple(pair[key] for key in keys))


def spread(pair: dict[str, Any]) -> float:
    """Return the longest launch over the shortest, less one."""
    return max(pair["launches"]) / min(pair["launches"]) - 1


def ratio(pairs: Pairs) -> float:
    """Return the geometric mean of predicted over measured."""
    return statistics.geometric_mean(pair["ratio"] for pair in pairs)


def median_error(pairs: Pairs, *, factor: float = 1.0) -> float:
    """Return the median error of predictions times a factor."""
    return statistics.median(abs(factor * pair["ratio"] - 1) for pair in pairs)
