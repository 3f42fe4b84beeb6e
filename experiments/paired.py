"""Accuracy over seeds beside that of exact training: differences paired by seed, curves, what a control says."""

import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any  # of JSON

import reports

from gnnpar.report.statistics import FEWEST_SEEDS, mean, non_inferiority

MIB = 2**20
LAST = 0.8  # of a run: what validation gains after it
Row = Mapping[str, Any]
Runs = Mapping[int, Row]  # by seed
FIT = {"not inferior": "is unfit for", "inferior": "can carry"}


def cells(rows: Iterable[Row]) -> dict[tuple[str, ...], dict[str, dict[int, Row]]]:
    """Return cell -> method -> seed -> its last line."""
    found: dict[tuple[str, ...], dict[str, dict[int, Row]]] = {}
    for row in rows:
        *cell, method = row["job"].split("; ")
        found.setdefault(tuple(cell), {}).setdefault(method, {})[row["result"]["seed"]] = row
    return found


def control(found: Sequence[float], margin: float) -> str:
    """Return what the differences of the drop control say of a dataset."""
    verdict = non_inferiority(found, margin)
    return f"\nThe drop control is {verdict}: the dataset {FIT.get(verdict, 'may not carry')} the claim."


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


def sent(row: Row) -> float:
    """Return MiB an epoch, all ranks, without the sum of parameters' gradients."""
    found = row["result"]["bytes_per_epoch"]
    return (found["total"] - found["reduce"]) / MIB


def accuracy_table(
    variants: Mapping[str, Runs],
    exact: Runs,
    *,
    margin: float,
    nbytes: Callable[[Row], float],
    form: tuple[str, str],
    heads: Mapping[str, str],
    seeds: bool = False,
) -> str:
    """Return a line a variant, its differences paired with exact training. nbytes: MiB an epoch. form: of differences
    and MiB. heads: other headings of columns."""
    rows = {name: statistics.fmean(map(nbytes, runs.values())) for name, runs in variants.items()}
    base = statistics.fmean(map(nbytes, exact.values()))
    gains = {name: late_gain(runs) for name, runs in variants.items()}
    gaps = {name: differences(runs, exact) for name, runs in variants.items()}
    of: dict[str, Callable[[str], object]] = {
        "variant": str,
        "test": lambda name: f"{test(variants[name]):.1f}",
        "over exact, points": lambda name: gap(gaps[name], form[0]),
        "verdict": lambda name: verdict(gaps[name], gains[name], margin) if name != "exact" else "",
        "gradient error": lambda name: f"{average(variants[name], 'fidelity', 'relative_error', 'mean'):.3f}",
        "cosine": lambda name: f"{average(variants[name], 'fidelity', 'cosine', 'mean'):.3f}",
        "MiB an epoch": lambda name: f"{rows[name]:{form[1]}}",
        "of exact": lambda name: f"{rows[name] / base:.3f}",
        "last loss": lambda name: f"{average(variants[name], 'loss', 'last'):.3f}",
        "late gain": lambda name: f"{gains[name]:+.1f}",
    }
    of |= {"seeds": lambda name: len(variants[name])} if seeds else {}
    return reports.columns({heads.get(head, head): cell for head, cell in of.items()}, variants)


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
