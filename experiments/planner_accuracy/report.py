"""How near predictions come: tables and figure.

A configuration's measured time is the median of its launches' medians. Nothing is fitted to these lines; the
column `corrected` multiplies a family's predictions by the geometric mean of measured over predicted of all others.
"""

import statistics
from collections.abc import Iterable, Sequence

import numpy as np
import reports
from planner_accuracy.pairs import Pair, by, median_error, read
from records import Files

from gnnpar.planner.planner import USABLE

COLOURS = {"single": "#444444", "graph_parallel": "#1b9e77", "adaqp": "#d95f02", "sar": "#7570b3", "gnnpipe": "#e7298a"}
KEYS = ("graph", "model", "ranks", "link")
Pairs = Sequence[Pair]


def correlations(pairs: Pairs) -> tuple[float, float]:
    """Return Spearman's and Kendall's correlation between predicted and measured seconds."""
    from scipy.stats import kendalltau, spearmanr

    predicted, measured = [p.predicted for p in pairs], [p.measured for p in pairs]
    return float(spearmanr(predicted, measured).statistic), float(kendalltau(predicted, measured).statistic)


def summary(pairs: Pairs) -> Iterable[str]:
    errors = [abs(p.error) for p in pairs]
    spreads = [p.spread for p in pairs if p.spread is not None]
    groups = [g for g in by(pairs, "graph", "model", "ranks").values() if len(g) > 2]
    rhos, taus = ([both[i] for both in map(correlations, groups)] for i in (0, 1))
    known = [p for p in pairs if p.peak_bytes]
    memory = [abs(p.predicted_bytes / p.peak_bytes - 1) for p in known if p.peak_bytes]
    false_fits = sum(p.peak_bytes > p.predicted_bytes / USABLE for p in known if p.peak_bytes)
    yield "| what | found | asked |"
    yield "|---|---|---|"
    yield f"| configurations (launches) | {len(pairs)} ({sum(len(p.launches) for p in pairs)}) | 40 |"
    yield f"| error of epoch time, median | {statistics.median(errors):.1%} | 10 % |"
    yield f"| error of epoch time, 95th percentile | {np.quantile(errors, 0.95):.1%} | 25 % |"
    yield f"| predicted over measured, geometric mean | {_ratio(pairs):.3f} | 1 |"
    if (blocks := min(len(p.launches) for p in pairs)) > 1:
        alone = [[p.predicted / p.launches[i] for p in pairs] for i in range(blocks)]
        medians = ", ".join(f"{statistics.median(abs(r - 1) for r in ratios):.1%}" for ratios in alone)
        means = ", ".join(f"{statistics.geometric_mean(ratios):.3f}" for ratios in alone)
        yield f"| a block of launches alone: median error | {medians} | |"
        yield f"| a block of launches alone: predicted over measured | {means} | |"
    if spreads:
        yield f"| two launches differ by, median | {statistics.median(spreads):.1%} | |"
    if rhos:
        shares = f"{sum(r >= 0.9 for r in rhos)} of {len(rhos)} cells"
        yield f"| Spearman within (graph, model, ranks), median and worst | {statistics.median(rhos):.2f}, {min(rhos):.2f} ({shares} at 0.9) | 0.9 |"  # noqa: E501
        yield f"| Kendall, the same | {statistics.median(taus):.2f}, {min(taus):.2f} | |"
    if memory:
        worst = max(memory)
        yield f"| error of peak memory, median and largest | {statistics.median(memory):.1%}, {worst:.1%} | 15 % |"
        yield f"| false fits (more than predicted / {USABLE}) | {false_fits} of {len(known)} | 0 |"


def _ratio(pairs: Pairs) -> float:
    return statistics.geometric_mean(p.predicted / p.measured for p in pairs)


def families(pairs: Pairs) -> str:
    """Errors by family; `corrected`: by a factor that the other families give."""
    heads = (
        "family",
        "configurations",
        "error, median",
        "largest",
        "predicted over measured",
        "corrected by the others",
    )
    lines = []
    for (family,), mine in by(pairs, "family").items():
        others = [p for p in pairs if p.family != family]
        corrected = f"{median_error(mine, factor=1 / _ratio(others)):.1%}" if others else ""
        largest = max(abs(p.error) for p in mine)
        found = (f"{median_error(mine):.1%}", f"{largest:.1%}", f"{_ratio(mine):.3f}")
        lines.append([family, len(mine), *found, corrected])
    return reports.table(heads, lines)


def cells(pairs: Pairs) -> str:
    """A line a (graph, model, ranks, link): how well candidates are ordered, and how clearly the best one wins."""
    heads = (*KEYS, "candidates", "error, median", "Spearman", "best measured", "ahead of next by")
    lines = []
    for key, mine in by(pairs, *KEYS).items():
        ordered = sorted(mine, key=lambda p: p.measured)
        rho = f"{correlations(mine)[0]:.2f}" if len(mine) > 2 else ""
        ahead = f"{ordered[1].measured / ordered[0].measured - 1:.1%}" if len(ordered) > 1 else ""
        lines.append([*key, len(mine), f"{median_error(mine):.1%}", rho, ordered[0].label, ahead])
    return reports.table(heads, lines)


def everything(pairs: Pairs) -> str:
    heads = (*KEYS, "candidate", "predicted ms", "measured ms", "error", "predicted MiB", "measured")
    lines = []
    for p in pairs:
        times = (f"{1e3 * p.predicted:.1f}", f"{1e3 * p.measured:.1f}", f"{p.error:+.0%}")
        peak = f"{p.peak_bytes / 2**20:.1f}" if p.peak_bytes else ""
        lines.append([*(p.said[key] for key in KEYS), p.label, *times, f"{p.predicted_bytes / 2**20:.1f}", peak])
    return reports.table(heads, lines)


def draw(pairs: Pairs, files: Files) -> None:
    """Predicted against measured, time and memory, a colour a family."""
    plt = reports.pyplot()
    figure, (left, right) = plt.subplots(1, 2, figsize=(8.6, 4.0), layout="constrained")
    for family, colour in COLOURS.items():
        mine = [p for p in pairs if p.family == family]
        times = [[1e3 * each for each in (p.measured, p.predicted)] for p in mine]
        sizes = [[each / 2**20 for each in (p.peak_bytes, p.predicted_bytes)] for p in mine if p.peak_bytes]
        left.scatter(*zip(*times, strict=True), s=18, color=colour, label=family)
        right.scatter(*(zip(*sizes, strict=True) if sizes else ([], [])), s=18, color=colour)
    for axis, what, band in ((left, "ms an epoch", 0.25), (right, "MiB at the peak of a rank", 0.15)):
        ends = [max(axis.get_xlim()[0] or 1, 0.1), axis.get_xlim()[1]]
        axis.plot(ends, ends, color="#999999", linewidth=0.8)
        low, high = ([e * factor for e in ends] for factor in (1 - band, 1 + band))
        axis.fill_between(ends, low, high, color="#eeeeee", zorder=0)
        axis.set(xscale="log", yscale="log", xlabel=f"measured, {what}", ylabel=f"predicted, {what}")
    left.legend(frameon=False, fontsize=7)
    reports.save(figure, files.figure)


def report(files: Files) -> None:
    pairs = read(files("predictions"), files())
    print("\n".join(summary(pairs)), families(pairs), cells(pairs), everything(pairs), sep="\n\n", end="\n\n")
    draw(pairs, files)
