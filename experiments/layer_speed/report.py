"""Tables of README.md: `python experiments/layer_speed/report.py [FILE]`.

Seconds are medians of blocks. A ratio is the geometric mean of the ratios inside blocks, a difference their mean, each
with Student's interval of 95 %. A target is reached, or missed, where the whole interval says so.
"""

import statistics
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any  # of JSON

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent))

import records
import reports

from gnnpar.report.statistics import Estimate, geometric_mean, mean

MIB = 2**20
OURS, MAPPED = "gnnpar", "mapped"
OWN = ("own", "own, PyG's order")
FASTER = {"RGCNConv": 2.0, "FastRGCNConv": 2.0, "GATv2Conv": 3.0, "TransformerConv": 3.0}  # at least
MEMORY = {"GATv2Conv": 1 / 3, "TransformerConv": 1 / 3}  # of its peak, at most
WEIGHTED, SLOWER, ADDED = 1.1, 1.05, 0.5  # at most; the last in seconds
Row = Mapping[str, Any]


def main() -> None:
    rows = records.read(reports.asked(HERE, file="results.jsonl").file)
    tables = {
        "layers: forward and backward": layers_table,
        "weighted sums: forward and backward": sums_table,
        "mapped models: an epoch of `single`": models_table,
        "start: CPU seconds to the first epoch": start_table,
    }
    for title, table in tables.items():
        print("\n".join(["", f"### {title}", "", *table(rows)]))


def groups(rows: Iterable[Row], part: str) -> Iterator[tuple[str, int, Sequence[Mapping[str, float]]]]:
    """(case, threads, seconds of its blocks)."""
    found: dict[tuple[str, int], list[Mapping[str, float]]] = {}
    for row in rows:
        if row["part"] == part and "seconds" in row:
            found.setdefault((row["case"], row.get("threads", 0)), []).append(row["seconds"])
    for (case, threads), blocks in found.items():
        yield case, threads, blocks


def typical(blocks: Sequence[Mapping[str, float]], name: str) -> float:
    return statistics.median(block[name] for block in blocks)


def ratio(blocks: Sequence[Mapping[str, float]], name: str, base: str) -> Estimate:
    return geometric_mean([block[name] / block[base] for block in blocks])


def shown(estimate: Estimate, sign: str = "") -> str:
    return " ".join([f"{estimate.value:{sign}.2f}", f"({estimate.low:{sign}.2f} to {estimate.high:{sign}.2f})"])


def verdict(inside: Callable[[float], bool], estimate: Estimate) -> str:
    """Are both ends of the interval on the side of the target?"""
    ends = {inside(estimate.low), inside(estimate.high)}
    return "open" if len(ends) == 2 else "yes" if ends == {True} else "no"


def layers_table(rows: Sequence[Row]) -> Iterator[str]:
    yield (
        "| layer | threads | ours | PyG's | its time | times faster (95 %) | at least | reached | peak, ours | its "
        "| share |"
    )
    yield "|" + "---|" * 11
    peaks_of = {row["case"]: row["peak_bytes"] for row in rows if "peak_bytes" in row}
    for case, threads, blocks in groups(rows, "layers"):
        peaks = peaks_of[case]
        for name in (name for name in peaks if name != OURS):
            found, least = ratio(blocks, name, OURS), FASTER[name]
            reached = verdict(lambda value, least=least: value >= least, found)
            share = peaks[OURS] / peaks[name]
            bytes_shown = " | ".join(f"{peaks[key] / MIB:.0f} MiB" for key in (OURS, name))
            memory = f" (at most 0.33: {'yes' if share <= MEMORY[name] else 'no'})" if name in MEMORY else ""
            yield (
                f"| {case} | {threads} | {typical(blocks, OURS):.3f} s | {name} "
                f"| {typical(blocks, name):.3f} s | {shown(found)} | {least:g} | {reached} | {bytes_shown} "
                f"| {share:.3f}{memory} |"
            )


def sums_table(rows: Sequence[Row]) -> Iterator[str]:
    yield "| rows | threads | unweighted | weighted | weighted / unweighted (95 %) | at most | reached |"
    yield "|" + "---|" * 7
    for case, threads, blocks in groups(rows, "sums"):
        found = ratio(blocks, "weighted", "unweighted")
        times = " | ".join(f"{1000 * typical(blocks, name):.1f} ms" for name in ("unweighted", "weighted"))
        reached = verdict(lambda value: value <= WEIGHTED, found)
        yield f"| {case} | {threads} | {times} | {shown(found)} | {WEIGHTED} | {reached} |"


def models_table(rows: Sequence[Row]) -> Iterator[str]:
    yield "| model | threads | mapped | beside | its time | mapped / it (95 %) | at most | reached |"
    yield "|" + "---|" * 8
    for case, threads, blocks in groups(rows, "models"):
        for name in (name for name in OWN if name in blocks[0]):
            found = ratio(blocks, MAPPED, name)
            reached = verdict(lambda value: value <= SLOWER, found)
            yield (
                f"| {case} | {threads} | {typical(blocks, MAPPED):.3f} s | {name} "
                f"| {typical(blocks, name):.3f} s | {shown(found)} | {SLOWER} | {reached} |"
            )


def start_table(rows: Sequence[Row]) -> Iterator[str]:
    yield "| run | `gnnpar train` | `gnnpar.train` | Python adds (95 %) | at most | reached |"
    yield "|" + "---|" * 6
    for case, _, blocks in groups(rows, "start"):
        found = mean([block["gnnpar.train"] - block["gnnpar train"] for block in blocks], fewest=3)
        times = " | ".join(f"{typical(blocks, name):.2f} s" for name in ("gnnpar train", "gnnpar.train"))
        reached = verdict(lambda value: value <= ADDED, found)
        yield f"| {case} | {times} | {shown(found, '+')} s | {ADDED} | {reached} |"


if __name__ == "__main__":
    main()
