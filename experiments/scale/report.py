"""Memory, bytes and limits against the size of the graph, and papers100M on paper.

Slopes are those of least squares through logarithms: 1 is linear in the edges. What no line has is left out.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import reports
from records import Files

Key = tuple[int, str]  # ranks, strategy
Lines = Mapping[Key, Mapping[int, Any]]  # -> scale -> line
GIB = 2**30
MACHINE = 24 * GIB
# SAR (MLSys 2022), read off its charts: GB of a machine under SAR and without, seconds of an epoch under SAR
PUBLISHED = {
    ("sage", 32): (95.0, 149.0, 7.4),
    ("sage", 64): (47.0, 83.0, 5.1),
    ("sage", 128): (25.0, 50.0, 3.8),
    ("gat", 32): (67.0, None, None),
    ("gat", 64): (35.0, 126.0, None),
    ("gat", 128): (19.5, 75.0, None),
}
COLOURS = {"single": "#000000", "graph_parallel": "#2b7bba", "graph_parallel bf16": "#1a9e77", "adaqp": "#d9780f"}
COLOURS |= {"sar": "#76b7d8", "gnnpipe": "#8e5ea2"}


def slope(x: Sequence[float], y: Sequence[float]) -> float:
    """Of log y over log x."""
    return float(np.polyfit(np.log(x), np.log(y), 1)[0])


def by_key(rows: Sequence[Any]) -> dict[Key, dict[int, Any]]:
    """(ranks, strategy) -> scale -> line."""
    found = reports.by(sorted(rows, key=lambda row: row["scale"]), lambda row: (row["ranks"], row["strategy"]))
    return {key: {row["scale"]: row for row in found[key]} for key in sorted(found)}


def scales_of(found: Mapping[Key, Mapping[int, Any]]) -> list[int]:
    return sorted({scale for lines in found.values() for scale in lines})


def peak(row: Any) -> float:
    return max(row["memory_bytes"]["peak"])


def growth(found: Lines, of: Callable[[Any], float], last: Callable[[float, Any], str]) -> Iterator[list[object]]:
    """Yield lines of ranks, strategy, MiB at every scale, the slope, and what `last` says of the largest graph."""
    for key, lines in found.items():
        values = {scale: of(row) for scale, row in lines.items()}
        edges = [row["edges"] for row in lines.values()]
        rise = f"{slope(edges, list(values.values())):.2f}" if len(values) > 1 else "-"
        cells = [f"{values[s] / 2**20:,.1f}" if s in values else "-" for s in scales_of(found)]
        yield [*key, *cells, rise, last(values[max(values)], lines[max(values)])]


def memory(found: Lines) -> str:
    edges = {scale: row["edges"] for lines in found.values() for scale, row in lines.items()}
    heads = [f"2^{scale} nodes, {edges[scale]:,} edges" for scale in scales_of(found)]
    shown = growth(found, peak, lambda value, row: f"{value / row['edges']:.1f}")
    return reports.table(["ranks", "strategy", *heads, "slope", "bytes an edge"], shown)


def sent(found: Lines) -> str:
    found = {key: lines for key, lines in found.items() if key[0] > 1}
    heads = [f"2^{scale}" for scale in scales_of(found)]
    shown = growth(
        found, lambda row: row["bytes_per_epoch"]["total"], lambda value, row: f"{value / 2 ** row['scale']:,.0f}"
    )
    return reports.table(["ranks", "strategy", *heads, "slope", "bytes a node"], shown)


def limits(found: Lines) -> str:
    """Where ranks of one machine stop fitting, by the bytes an edge of the largest graph measured: extrapolated."""
    shown = []
    for (ranks, name), lines in found.items():
        scale = max(lines)
        total = sum(lines[scale]["memory_bytes"]["peak"])
        fits = scale + math.floor(math.log2(MACHINE / total))
        shown.append([ranks, name, f"{total * 2 ** (24 - scale) / GIB:,.1f}", f"2^{fits}"])
    heads = ("ranks", "strategy", "GiB of all ranks at 2^24 nodes", "largest that fits 24 GiB, nodes")
    return reports.table(heads, shown)


def papers(rows: Sequence[Any]) -> str:
    """The planner's prices on paper between two cuts, beside SAR's charts."""
    priced, shown = {(row["model"], row["ranks"], row["strategy"], row["cut"]): row for row in rows}, []

    def between(*key: object, what: str, form: str, unit: float = 1) -> str:
        values = sorted(priced[*key, cut][what] for cut in ("random", "0.3 of random"))
        return " to ".join(f"{value / unit:{form}}" for value in values)

    for (model, ranks), published in PUBLISHED.items():
        told = [f"{value:g}" if value is not None else "-" for value in published]
        gigabytes = [between(model, ranks, n, what="peak_bytes", form=".1f", unit=1e9) for n in ("sar", "vanilla")]
        seconds = between(model, ranks, "sar", what="seconds", form=".1f")
        without = "out of memory" if published[1] is None else told[1]
        shown.append([model, ranks, gigabytes[0], told[0], gigabytes[1], without, seconds, told[2]])
    heads = ("model", "ranks", "SAR, GB: modelled", "SAR: published", "vanilla, GB: modelled", "vanilla: published")
    return reports.table((*heads, "SAR, s an epoch: modelled", "epoch: published"), shown)


def draw_memory(found: Lines, files: Files) -> None:
    """Memory of the fullest rank, and bytes sent, against the edges."""
    plt = reports.pyplot(8)
    figure, axes = plt.subplots(1, 2, figsize=(8, 3.4), layout="constrained")
    for (ranks, name), lines in found.items():
        edges = [row["edges"] for row in lines.values()]
        style = {1: "-", 2: "-", 4: "--", 8: ":"}[ranks]
        values = [peak(row) / GIB for row in lines.values()]
        axes[0].plot(edges, values, style, color=COLOURS[name], lw=1.2)
        if ranks > 1:
            total = [row["bytes_per_epoch"]["total"] / GIB for row in lines.values()]
            axes[1].plot(edges, total, style, color=COLOURS[name], lw=1.2)
    for name, colour in COLOURS.items():
        axes[0].plot([], [], color=colour, label=name)
    for ranks, style in ((2, "-"), (4, "--"), (8, ":")):
        axes[1].plot([], [], style, color="#000000", label=f"{ranks} ranks")
    for axis, title in zip(axes, ("peak of the fullest rank, GiB", "sent an epoch by all ranks, GiB"), strict=True):
        axis.set(xscale="log", yscale="log", xlabel="edges", ylabel=title)
        axis.legend(frameon=False, loc="upper left")
    reports.save(figure, files.figure)


def before(files: Files, _: object) -> str:
    """Return the tables of measured and computed memory, and draw the figure. Study files have the tables of times."""
    shown = {}
    if found := by_key(files.read("memory")):
        shown["Peak memory of the fullest rank in an epoch, MiB"] = memory(found)
        shown["Sent in an epoch by all ranks, MiB"] = sent(found)
        shown["24 GiB, extrapolated"] = limits(found)
        draw_memory(found, files)
    if rows := files.read("papers100m"):
        shown["Papers100M on paper, beside SAR's charts"] = papers(rows)
    return "\n\n".join(f"### {title}\n\n{table}" for title, table in shown.items()) + "\n"
