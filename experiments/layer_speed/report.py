"""Layers, weighted sums, mapped models and starts beside their targets.

Seconds are medians of blocks. A ratio is the geometric mean of the ratios inside blocks, a difference their mean, each
with Student's interval of 95 %. A target is reached, or missed, where the whole interval says so.
"""

import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any  # of JSON

HERE = Path(__file__).parent

import reports
from records import Files

from gnnpar.report.statistics import Estimate, geometric_mean, mean

MIB = 2**20
OURS, MAPPED = "gnnpar", "mapped"
OWN = ("own", "own, PyG's order")
FASTER = {"RGCNConv": 2.0, "FastRGCNConv": 2.0, "GATv2Conv": 3.0, "TransformerConv": 3.0}  # at least
MEMORY = {"GATv2Conv": 1 / 3, "TransformerConv": 1 / 3}  # of its peak, at most
WEIGHTED, SLOWER, ADDED = 1.1, 1.05, 0.5  # at most; the last in seconds
LAYERS = ("layer", "threads", "ours", "PyG's", "its time", "times faster (95 %)", "at least", "reached")
LAYERS += ("peak, ours", "its", "share")
SUMS = ("rows", "threads", "unweighted", "weighted", "weighted / unweighted (95 %)", "at most", "reached")
MODELS = ("model", "threads", "mapped", "beside", "its time", "mapped / it (95 %)", "at most", "reached")
START = ("run", "`gnnpar train`", "`gnnpar.train`", "Python adds (95 %)", "at most", "reached")
Row = Mapping[str, Any]


def report(files: Files) -> None:
    rows = files.read()
    reports.show("layers: forward and backward", reports.table(LAYERS, layers(rows)))
    reports.show("weighted sums: forward and backward", reports.table(SUMS, sums(rows)))
    reports.show("mapped models: an epoch of `single`", reports.table(MODELS, models(rows)))
    reports.show("start: CPU seconds to the first epoch", reports.table(START, start(rows)))


def groups(rows: Iterable[Row], part: str) -> Iterator[tuple[str, int, Sequence[Mapping[str, float]]]]:
    """(case, threads, seconds of its blocks)."""
    timed = [row for row in rows if row["part"] == part and "seconds" in row]
    for (case, threads), mine in reports.by(timed, lambda row: (row["case"], row.get("threads", 0))).items():
        yield case, threads, [row["seconds"] for row in mine]


def typical(blocks: Sequence[Mapping[str, float]], name: str) -> float:
    return statistics.median(block[name] for block in blocks)


def ratio(blocks: Sequence[Mapping[str, float]], name: str, base: str) -> Estimate:
    return geometric_mean([block[name] / block[base] for block in blocks])


def verdict(inside: Callable[[float], bool], estimate: Estimate) -> str:
    """Are both ends of the interval on the side of the target?"""
    ends = {inside(estimate.low), inside(estimate.high)}
    return "open" if len(ends) == 2 else "yes" if ends == {True} else "no"


def layers(rows: Sequence[Row]) -> Iterator[list[object]]:
    peaks_of = {row["case"]: row["peak_bytes"] for row in rows if "peak_bytes" in row}
    for case, threads, blocks in groups(rows, "layers"):
        peaks = peaks_of[case]
        for name in (name for name in peaks if name != OURS):
            found, least = ratio(blocks, name, OURS), FASTER[name]
            reached = verdict(lambda value, least=least: value >= least, found)
            share = peaks[OURS] / peaks[name]
            memory = f" (at most 0.33: {'yes' if share <= MEMORY[name] else 'no'})" if name in MEMORY else ""
            times = [f"{typical(blocks, each):.3f} s" for each in (OURS, name)]
            sizes = [f"{peaks[each] / MIB:.0f} MiB" for each in (OURS, name)]
            faster = (reports.interval(found), f"{least:g}", reached)
            yield [case, threads, times[0], name, times[1], *faster, *sizes, f"{share:.3f}{memory}"]


def sums(rows: Sequence[Row]) -> Iterator[list[object]]:
    for case, threads, blocks in groups(rows, "sums"):
        found = ratio(blocks, "weighted", "unweighted")
        times = [f"{1000 * typical(blocks, name):.1f} ms" for name in ("unweighted", "weighted")]
        yield [case, threads, *times, reports.interval(found), WEIGHTED, verdict(lambda r: r <= WEIGHTED, found)]


def models(rows: Sequence[Row]) -> Iterator[list[object]]:
    for case, threads, blocks in groups(rows, "models"):
        for name in (name for name in OWN if name in blocks[0]):
            found = ratio(blocks, MAPPED, name)
            times = [f"{typical(blocks, each):.3f} s" for each in (MAPPED, name)]
            reached = (reports.interval(found), SLOWER, verdict(lambda value: value <= SLOWER, found))
            yield [case, threads, times[0], name, times[1], *reached]


def start(rows: Sequence[Row]) -> Iterator[list[object]]:
    for case, _, blocks in groups(rows, "start"):
        found = mean([block["gnnpar.train"] - block["gnnpar train"] for block in blocks], fewest=3)
        times = [f"{typical(blocks, name):.2f} s" for name in ("gnnpar train", "gnnpar.train")]
        reached = verdict(lambda value: value <= ADDED, found)
        yield [case, *times, f"{reports.interval(found, '+.2f')} s", ADDED, reached]
