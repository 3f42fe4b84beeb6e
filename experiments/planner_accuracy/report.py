"""How near predictions come, configuration by configuration: tables and figure. planner_choice reads pairs, too.

A configuration's measured time is the median of its launches' medians. Nothing is fitted to these lines; the
column `corrected` multiplies a family's predictions by the geometric mean of measured over predicted of all others.
"""

import statistics
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any  # of JSON

import numpy as np
import records
import reports
from records import Files

from gnnpar.planner.planner import USABLE

KEYS = ("graph", "model", "ranks", "link")
COLOURS = {"single": "#444444", "graph_parallel": "#1b9e77", "adaqp": "#d95f02", "sar": "#7570b3", "gnnpipe": "#e7298a"}
FAMILIES = (
    "family",
    "configurations",
    "error, median",
    "largest",
    "predicted over measured",
    "corrected by the others",
)
CELLS = (*KEYS, "candidates", "error, median", "Spearman", "best measured", "ahead of next by")
ALL = (*KEYS, "candidate", "predicted ms", "measured ms", "error", "predicted MiB", "measured")
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


def correlations(pairs: Pairs) -> tuple[float, float]:
    """Return Spearman's and Kendall's correlation between predicted and measured seconds."""
    from scipy.stats import kendalltau, spearmanr

    both = [[pair[key] for pair in pairs] for key in ("epoch_seconds", "measured")]
    return float(spearmanr(*both).statistic), float(kendalltau(*both).statistic)


def summary(pairs: Pairs) -> Iterable[str]:
    times, launched = [abs(p["ratio"] - 1) for p in pairs], sum(len(p["launches"]) for p in pairs)
    both = [correlations(group) for group in by(pairs, *KEYS[:3]).values() if len(group) > 2]
    known = [p for p in pairs if p["bytes"]]
    memory = [abs(p["predicted_bytes"] / p["bytes"] - 1) for p in known]
    yield "| what | found | asked |"
    yield "|---|---|---|"
    yield f"| configurations (launches) | {len(pairs)} ({launched}) | 40 |"
    yield f"| error of epoch time, median | {statistics.median(times):.1%} | 10 % |"
    yield f"| error of epoch time, 95th percentile | {np.quantile(times, 0.95):.1%} | 25 % |"
    yield f"| predicted over measured, geometric mean | {ratio(pairs):.3f} | 1 |"
    if launched > len(pairs):
        yield f"| launches differ by, median | {statistics.median(map(spread, pairs)):.1%} | |"
    if both:
        rhos, taus = zip(*both, strict=True)
        ends, good = f"{statistics.median(rhos):.2f}, {min(rhos):.2f}", sum(r >= 0.9 for r in rhos)
        found = f"{ends} ({good} of {len(rhos)} cells at 0.9)"
        yield f"| Spearman within (graph, model, ranks), median and worst | {found} | 0.9 |"
        yield f"| Kendall, the same | {statistics.median(taus):.2f}, {min(taus):.2f} | |"
    if known:
        errors = f"{statistics.median(memory):.1%}, {max(memory):.1%}"
        yield f"| error of peak memory, median and largest | {errors} | 15 % |"
        false_fits = sum(p["bytes"] > p["predicted_bytes"] / USABLE for p in known)
        yield f"| false fits (more than predicted / {USABLE}) | {false_fits} of {len(known)} | 0 |"


def families(pairs: Pairs) -> Iterable[list[object]]:
    """Errors by family; `corrected`: by a factor that the other families give."""
    for (family,), mine in by(pairs, "family").items():
        others = [p for p in pairs if p["family"] != family]
        corrected = f"{median_error(mine, factor=1 / ratio(others)):.1%}" if others else ""
        largest = max(abs(p["ratio"] - 1) for p in mine)
        yield [family, len(mine), f"{median_error(mine):.1%}", f"{largest:.1%}", f"{ratio(mine):.3f}", corrected]


def cells(pairs: Pairs) -> Iterable[list[object]]:
    """A line a (graph, model, ranks, link): how well candidates are ordered, and how clearly the best one wins."""
    for key, mine in by(pairs, *KEYS).items():
        best, *rest = sorted(mine, key=lambda p: p["measured"])
        rho = f"{correlations(mine)[0]:.2f}" if len(mine) > 2 else ""
        ahead = f"{rest[0]['measured'] / best['measured'] - 1:.1%}" if rest else ""
        yield [*key, len(mine), f"{median_error(mine):.1%}", rho, best["label"], ahead]


def everything(pairs: Pairs) -> Iterable[list[object]]:
    for p in pairs:
        times = (f"{1e3 * p['epoch_seconds']:.1f}", f"{1e3 * p['measured']:.1f}", f"{p['ratio'] - 1:+.0%}")
        peak = f"{p['bytes'] / 2**20:.1f}" if p["bytes"] else ""
        yield [*(p[key] for key in KEYS), p["label"], *times, f"{p['predicted_bytes'] / 2**20:.1f}", peak]


def draw(pairs: Pairs, files: Files) -> None:
    """Predicted against measured, time and memory, a colour a family."""
    plt = reports.pyplot()
    figure, axes = plt.subplots(1, 2, figsize=(8.6, 4.0), layout="constrained")
    time, memory = (
        ("measured", "epoch_seconds", 1e3, "ms an epoch"),
        ("bytes", "predicted_bytes", 2**-20, "MiB at the peak of a rank"),
    )
    for axis, (measured, predicted, unit, what), band in zip(axes, (time, memory), (0.25, 0.15), strict=True):
        for family, colour in COLOURS.items():
            mine = [p for p in pairs if p["family"] == family and p[measured]]
            at = ([unit * p[key] for p in mine] for key in (measured, predicted))
            axis.scatter(*at, s=18, color=colour, label=family)
        ends = [max(axis.get_xlim()[0] or 1, 0.1), axis.get_xlim()[1]]
        axis.plot(ends, ends, color="#999999", linewidth=0.8)
        axis.fill_between(ends, *([e * f for e in ends] for f in (1 - band, 1 + band)), color="#eeeeee", zorder=0)
        axis.set(xscale="log", yscale="log", xlabel=f"measured, {what}", ylabel=f"predicted, {what}")
    axes[0].legend(frameon=False, fontsize=7)
    reports.save(figure, files.figure)


def report(files: Files) -> None:
    pairs = read(files("predictions"), files())
    shown = ((FAMILIES, families(pairs)), (CELLS, cells(pairs)), (ALL, everything(pairs)))
    print("\n".join(summary(pairs)), *(reports.table(*each) for each in shown), sep="\n\n", end="\n\n")
    draw(pairs, files)
