"""Tables and figure of README.md: `python experiments/scale/report.py [--figure FILE]`.

Slopes are those of least squares through logarithms: 1 is linear in the edges. What no line has is left out.
"""

import math
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent))

import pictures
import records
import reports

from gnnpar.report.statistics import geometric_mean

Key = tuple[int, str]  # ranks, strategy
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
    found: dict[Key, dict[int, Any]] = {}
    for row in rows:
        found.setdefault((row["ranks"], row["strategy"]), {})[row["scale"]] = row
    return {key: dict(sorted(found[key].items())) for key in sorted(found)}


def peak(row: Any) -> float:
    return max(row["memory_bytes"]["peak"])


def memory(found: Mapping[Key, Mapping[int, Any]]) -> Iterable[str]:
    scales = sorted({scale for lines in found.values() for scale in lines})
    edges = {scale: row["edges"] for lines in found.values() for scale, row in lines.items()}
    heads = [f"2^{scale} nodes, {edges[scale]:,} edges" for scale in scales]
    yield f"| ranks | strategy | {' | '.join(heads)} | slope | bytes an edge |"
    yield "|---" * (len(scales) + 4) + "|"
    for (ranks, name), lines in found.items():
        shown = [f"{peak(lines[s]) / 2**20:,.1f}" if s in lines else "-" for s in scales]
        last = lines[max(lines)]
        rise = (
            f"{slope([edges[s] for s in lines], [peak(row) for row in lines.values()]):.2f}" if len(lines) > 1 else "-"
        )
        yield f"| {ranks} | {name} | {' | '.join(shown)} | {rise} | {peak(last) / edges[max(lines)]:.1f} |"


def sent(found: Mapping[Key, Mapping[int, Any]]) -> Iterable[str]:
    scales = sorted({scale for lines in found.values() for scale in lines})
    yield f"| ranks | strategy | {' | '.join(f'2^{scale}' for scale in scales)} | slope | bytes a node |"
    yield "|---" * (len(scales) + 4) + "|"
    for (ranks, name), lines in found.items():
        if ranks == 1:
            continue
        total = {scale: row["bytes_per_epoch"]["total"] for scale, row in lines.items()}
        shown = [f"{total[s] / 2**20:,.1f}" if s in total else "-" for s in scales]
        edges = [row["edges"] for row in lines.values()]
        rise = f"{slope(edges, list(total.values())):.2f}" if len(lines) > 1 else "-"
        yield f"| {ranks} | {name} | {' | '.join(shown)} | {rise} | {total[max(total)] / 2 ** max(total):,.0f} |"


def limits(found: Mapping[Key, Mapping[int, Any]]) -> Iterable[str]:
    """Where ranks of one machine stop fitting, by the bytes an edge of the largest graph measured: extrapolated."""
    yield "| ranks | strategy | GiB of all ranks at 2^24 nodes | largest that fits 24 GiB, nodes |"
    yield "|---|---|---|---|"
    for (ranks, name), lines in found.items():
        scale = max(lines)
        total = sum(lines[scale]["memory_bytes"]["peak"])
        far = total * 2 ** (24 - scale)
        fits = scale + math.floor(math.log2(MACHINE / total))
        yield f"| {ranks} | {name} | {far / GIB:,.1f} | 2^{fits} |"


def times(rows: Sequence[Any]) -> Iterable[str]:
    """Mean epochs of the timed stages by scale; a slope over nodes."""
    found: dict[Key, dict[int, list[float]]] = {}
    for row in rows:
        scale, ranks, name = row["job"].split("; ")
        took = row["result"]["epoch_seconds"]["mean"]
        if took is not None:
            found.setdefault((int(ranks), name), {}).setdefault(int(scale), []).append(took)
    scales = sorted({scale for lines in found.values() for scale in lines})
    yield f"| ranks | strategy | {' | '.join(f'2^{scale}, s' for scale in scales)} | slope |"
    yield "|---" * (len(scales) + 3) + "|"
    for (ranks, name), lines in sorted(found.items()):
        means = {scale: geometric_mean(seconds) for scale, seconds in sorted(lines.items())}
        shown = [
            f"{means[s].value:.3f} ({means[s].low:.3f} to {means[s].high:.3f})" if s in means else "-" for s in scales
        ]
        rise = slope([2.0**s for s in means], [e.value for e in means.values()]) if len(means) > 1 else math.nan
        yield f"| {ranks} | {name} | {' | '.join(shown)} | {rise:.2f} |"


def papers(rows: Sequence[Any]) -> Iterable[str]:
    """The planner's prices on paper between two cuts, beside SAR's charts."""
    yield (
        "| model | ranks | SAR, GB: modelled | SAR: published | vanilla, GB: modelled | vanilla: published | "
        "SAR, s an epoch: modelled | epoch: published |"
    )
    yield "|---|---|---|---|---|---|---|---|"
    priced = {(row["model"], row["ranks"], row["strategy"], row["cut"]): row for row in rows}
    for (model, ranks), (sar, vanilla, seconds) in PUBLISHED.items():
        between = {
            (name, key): sorted(priced[model, ranks, name, cut][key] for cut in ("random", "0.3 of random"))
            for name in ("sar", "vanilla")
            for key in ("peak_bytes", "seconds")
        }
        gigabytes = {n: " to ".join(f"{b / 1e9:.1f}" for b in between[n, "peak_bytes"]) for n in ("sar", "vanilla")}
        modelled = " to ".join(f"{s:.1f}" for s in between["sar", "seconds"])
        shown = [f"{value:g}" if value is not None else "-" for value in (sar, vanilla, seconds)]
        without = "out of memory" if vanilla is None else shown[1]
        line = [model, str(ranks), gigabytes["sar"], shown[0], gigabytes["vanilla"], without, modelled, shown[2]]
        yield f"| {' | '.join(line)} |"


def draw(found: Mapping[Key, Mapping[int, Any]], file: Path) -> None:
    """Memory of the fullest rank, and bytes sent, against the edges."""
    plt = pictures.pyplot(8)
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
    pictures.save(figure, file)


def main() -> None:
    figure = reports.asked(HERE).figure
    found = by_key(records.read(HERE / "memory.jsonl"))
    if found:
        for title, lines in (
            ("Peak memory of the fullest rank in an epoch, MiB", memory(found)),
            ("Sent in an epoch by all ranks, MiB", sent(found)),
            ("24 GiB, extrapolated", limits(found)),
        ):
            print(f"### {title}\n")
            print("\n".join(lines) + "\n")
        draw(found, figure)
    for stage, title in (("times", "Epochs over loopback, measured"), ("dilated", "Epochs over 1 Gbit/s, dilated")):
        if rows := records.read(HERE / f"{stage}.jsonl"):
            print(f"### {title}\n")
            print("\n".join(times(rows)) + "\n")
    if rows := records.read(HERE / "papers100m.jsonl"):
        print("### Papers100M on paper, beside SAR's charts\n")
        print("\n".join(papers(rows)))


if __name__ == "__main__":
    main()
