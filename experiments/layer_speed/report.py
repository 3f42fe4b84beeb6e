"""Layers, weighted sums, mapped models and starts beside their targets.

Seconds are medians of blocks. A ratio is the geometric mean of the ratios inside blocks, a difference their mean, each
with Student's interval of 95 %. A target is reached, or missed, where the whole interval says so.
"""

import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from typing import Any  # of JSON

import reports
from records import Files

from gnnpar.report.statistics import Estimate, geometric_mean, mean

OURS, MAPPED = "gnnpar", "mapped"
FASTER = {"RGCNConv": 2.0, "FastRGCNConv": 2.0, "GATv2Conv": 3.0, "TransformerConv": 3.0}  # at least
MEMORY = ("GATv2Conv", "TransformerConv")  # a third of its peak, at most
WEIGHTED, SLOWER, ADDED = 1.1, 1.05, 0.5  # at most; the last in seconds
LAYERS = ("layer", "threads", "ours", "PyG's", "its time", "times faster (95 %)", "at least", "reached")
LAYERS += ("peak, ours", "its", "share")
SUMS = ("rows", "threads", "unweighted", "weighted", "weighted / unweighted (95 %)", "at most", "reached")
MODELS = ("model", "threads", "mapped", "beside", "its time", "mapped / it (95 %)", "at most", "reached")
START = ("run", "`gnnpar train`", "`gnnpar.train`", "Python adds (95 %)", "at most", "reached")
Row = Mapping[str, Any]
Blocks = Sequence[Mapping[str, float]]  # name of a call -> seconds


def report(files: Files) -> None:
    rows = files.read()
    reports.show("layers: forward and backward", reports.table(LAYERS, layers(rows)))
    reports.show("weighted sums: forward and backward", reports.table(SUMS, sums(rows)))
    reports.show("mapped models: an epoch of `single`", reports.table(MODELS, models(rows)))
    reports.show("start: CPU seconds to the first epoch", reports.table(START, start(rows)))


def groups(rows: Sequence[Row], part: str) -> Iterator[tuple[str, int, Blocks]]:
    """(case, threads, seconds of its blocks)."""
    timed = [row for row in rows if row["part"] == part and "seconds" in row]
    for (case, threads), mine in reports.by(timed, lambda row: (row["case"], row.get("threads", 0))).items():
        yield case, threads, [row["seconds"] for row in mine]


def typical(blocks: Blocks, name: str, form: str = ".3f", unit: str = "s") -> str:
    return f"{statistics.median(block[name] for block in blocks) * (1000 if unit == 'ms' else 1):{form}} {unit}"


def ratio(blocks: Blocks, name: str, base: str) -> Estimate:
    return geometric_mean([block[name] / block[base] for block in blocks])


def beside(found: Estimate, *, least: float = -math.inf, most: float = math.inf, form: str = ".2f") -> list[str]:
    """Return the interval, the target, and whether both ends are on its side."""
    ends = {least <= end <= most for end in (found.low, found.high)}
    reached = "open" if len(ends) == 2 else "yes" if ends == {True} else "no"
    return [reports.interval(found, form), f"{least if math.isinf(most) else most:g}", reached]


def layers(rows: Sequence[Row]) -> Iterator[list[object]]:
    peaks_of = {row["case"]: row["peak_bytes"] for row in rows if "peak_bytes" in row}
    for case, threads, blocks in groups(rows, "layers"):
        for name, peak in peaks_of[case].items():
            if name != OURS:
                share = peaks_of[case][OURS] / peak
                memory = f" (at most 0.33: {'yes' if share <= 1 / 3 else 'no'})" if name in MEMORY else ""
                sizes = [f"{peaks_of[case][each] / 2**20:.0f} MiB" for each in (OURS, name)]
                times = [typical(blocks, OURS), name, typical(blocks, name)]
                faster = beside(ratio(blocks, name, OURS), least=FASTER[name])
                yield [case, threads, *times, *faster, *sizes, f"{share:.3f}{memory}"]


def sums(rows: Sequence[Row]) -> Iterator[list[object]]:
    for case, threads, blocks in groups(rows, "sums"):
        times = [typical(blocks, name, ".1f", "ms") for name in ("unweighted", "weighted")]
        yield [case, threads, *times, *beside(ratio(blocks, "weighted", "unweighted"), most=WEIGHTED)]


def models(rows: Sequence[Row]) -> Iterator[list[object]]:
    for case, threads, blocks in groups(rows, "models"):
        for name in (name for name in ("own", "own, PyG's order") if name in blocks[0]):
            times = [typical(blocks, MAPPED), name, typical(blocks, name)]
            yield [case, threads, *times, *beside(ratio(blocks, MAPPED, name), most=SLOWER)]


def start(rows: Sequence[Row]) -> Iterator[list[object]]:
    for case, _, blocks in groups(rows, "start"):
        found = mean([block["gnnpar.train"] - block["gnnpar train"] for block in blocks], fewest=3)
        interval, *target = beside(found, most=ADDED, form="+.2f")
        yield [
            case,
            *(typical(blocks, name, ".2f") for name in ("gnnpar train", "gnnpar.train")),
            f"{interval} s",
            *target,
        ]
