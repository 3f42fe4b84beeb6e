"""Accuracy over seeds beside that of exact training: differences paired by seed, curves, what a control says."""

import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Any  # of JSON

from gnnpar.report.statistics import FEWEST_SEEDS, mean, non_inferiority

LAST = 0.8  # of a run: what validation gains after it
Row = Mapping[str, Any]
Runs = Mapping[int, Row]  # by seed
FIT = {"not inferior": "is unfit for", "inferior": "can carry"}


def points(row: Row) -> float:
    """Return the test metric at the best validation, in percent."""
    return 100 * row["result"]["metric"]["test_at_best_val"]


def test(runs: Runs) -> float:
    return statistics.fmean(map(points, runs.values()))


def differences(runs: Runs, exact: Runs) -> list[float]:
    return [points(runs[seed]) - points(exact[seed]) for seed in sorted(runs.keys() & exact.keys())]


def each(found: Sequence[float]) -> str:
    """Return the mean and all differences, where seeds are too few for an interval."""
    return f"{statistics.fmean(found):+.2f} ({', '.join(f'{one:+.2f}' for one in found)})"


def gap(found: Sequence[float], form: str = "+.2f") -> str:
    """Return the mean with its interval, or with all differences."""
    if len(found) < FEWEST_SEEDS:
        return each(found)
    over = mean(found)
    return f"{over.value:{form}} ({over.low:{form}} to {over.high:{form}})"


def average(runs: Runs, *path: str) -> float:
    """Return the mean of a number of result.json."""
    values = []
    for row in runs.values():
        value: Any = row["result"]
        for key in path:
            value = value[key]
        values.append(value)
    return statistics.fmean(values)


def validation(row: Row) -> list[tuple[int, float]]:
    """Return (epoch, metric) of every evaluation."""
    return row.get("validation") or [(point["epoch"], point["metric/val"]) for point in row["curve"]]


def late_gain(runs: Runs) -> float:
    """Return the points by which the last fifth of the epochs raises the best validation, mean over runs."""
    gains = []
    for row in runs.values():
        curve, end = validation(row), LAST * row["result"]["epochs"]
        gains.append(100 * (max(v for _, v in curve) - max(v for epoch, v in curve if epoch < end)))
    return statistics.fmean(gains)


def verdict(found: Sequence[float], gain: float, margin: float) -> str:
    return "not converged" if gain > margin else non_inferiority(found, margin)


def curve(runs: Runs, key: str, most: int | None = None) -> tuple[list[int], list[float]]:
    """Return epochs, at most so many and the last, and the mean over seeds at each."""
    at: dict[int, list[float]] = {}
    for row in runs.values():
        every = -(-len(row["curve"]) // (most or len(row["curve"])))
        for point in row["curve"][::-every]:
            at.setdefault(point["epoch"] + 1, []).append(point[key])
    return sorted(at), [statistics.fmean(at[epoch]) for epoch in sorted(at)]


def target(best: Iterable[float]) -> float:
    """Return the mean best validation of exact runs less one deviation."""
    values = list(best)
    return statistics.fmean(values) - (statistics.stdev(values) if len(values) > 1 else 0.0)
