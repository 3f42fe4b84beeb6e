"""Time and bytes to a target on validation (protocol, rule 13); runs that never reach it are censored."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from gnnpar.report.runs import Result
from gnnpar.track.jsonl import read_rows
from gnnpar.track.keys import goodness


class Reached(NamedTuple):
    """Training seconds and bytes sent until the target, or until the end of the run if `censored`."""

    seconds: float
    bytes: float
    censored: bool


class Median(NamedTuple):
    """Bounds of a median: equal if it is known, high=inf if half of the runs never reached the target."""

    low: float
    high: float


def target_of(exact: Sequence[Result]) -> float | None:
    """Return the mean best validation of the exact baseline worse by one standard deviation over runs."""
    best = [r["metric"]["best_val"] for r in exact if r["metric"]["best_val"] is not None]
    if not best:
        return None
    slack = statistics.stdev(best) if len(best) > 1 else 0.0
    return statistics.fmean(best) - goodness(exact[0]["metric"]["name"], slack)


def reached(folder: Path, result: Result, target: float) -> Reached | None:
    """Return when a run first validates at `target`, or None without rows in metrics.jsonl."""
    counted = ("time/train_seconds", "comm/total_bytes_so_far")
    rows = [row for row in read_rows(folder) if all(row.get(name) is not None for name in counted)]
    if not rows:
        return None
    for row in rows:
        val = row.get("metric/val")
        if val is not None and goodness(result["metric"]["name"], val - target) >= 0:
            return Reached(row["time/train_seconds"], row["comm/total_bytes_so_far"], censored=False)
    return Reached(rows[-1]["time/train_seconds"], rows[-1]["comm/total_bytes_so_far"], censored=True)


def median(values: Sequence[float], censored: Sequence[bool]) -> Median | None:
    """Return bounds of the median: censored values may be anywhere above. None without values."""
    if not values:
        return None
    low = statistics.median(values)
    high = statistics.median(math.inf if cut else value for value, cut in zip(values, censored, strict=True))
    return Median(low, high)
