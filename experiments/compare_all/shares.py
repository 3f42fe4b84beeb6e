"""Speed over one device with all threads against the share of communication.

Of the lines of compare_all (six cells: three models, loopback and 1 Gbit/s; ratios inside blocks) and, dashed, of
bandwidth (GCN over 0.3 and 0.1 Gbit/s), in which no device stands alone: its epoch is that of compare_all there.
Share: of a cell of compare_all, what the control saves, which sends nothing; of bandwidth, what vanilla waits.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import records
import reports
from compare_all.cells import Rows, by_cell, ratios, seconds

from gnnpar.report.statistics import Estimate, geometric_mean, mean

BANDWIDTH = Path(__file__).parents[1] / "bandwidth" / "results.jsonl"
ALONE = "single, all threads"
SHADES = {  # exact blue, rounded green, quantized orange, stale violet
    "control": ("#7a8794", ":", "control: sends nothing"),
    "graph_parallel bf16 cached": ("#1a9e77", "-.", "graph_parallel bf16, cached first layer"),
    "graph_parallel bf16": ("#1a9e77", "-", "graph_parallel bf16"),
    "adaqp": ("#d9780f", "-", "adaqp"),
    "graph_parallel": ("#2b7bba", "-", "graph_parallel"),
    "sar": ("#2b7bba", "-.", "sar"),
    "vanilla": ("#2b7bba", ":", "vanilla: no overlap"),
    "hybrid 1x2": ("#8e5ea2", "-.", "hybrid 1x2"),
    "gnnpipe": ("#8e5ea2", "-", "gnnpipe"),
}
SLOW = ("0.3", "0.1")  # Gbit/s, of bandwidth
APART = 1.09  # of labels that would touch, as a ratio
Points = dict[str, dict[float, Estimate]]  # method -> share -> times one device


def inside(found: Mapping[str, Rows]) -> Points:
    """The cells of compare_all."""
    points: Points = {name: {} for name in SHADES}
    for methods in by_cell({name: found[name] for name in ("speed", "paced")}).values():
        share = mean([1 - 1 / ratio for ratio in ratios(methods["control"], methods["vanilla"])]).value
        for name in SHADES:
            points[name][share] = geometric_mean(ratios(methods[name], methods[ALONE]))
    return {name: dict(sorted(each.items())) for name, each in points.items()}


def across(paced: Rows) -> Points:
    """The slow links of bandwidth, whose one device is that of `paced` on the same graph."""
    alone = geometric_mean(list(seconds(by_cell({"paced": paced})["paced", "gcn"][ALONE]).values())).value
    rows, points = records.read(BANDWIDTH), dict[str, dict[float, Estimate]]()
    for rate in SLOW:
        jobs = {name: [row for row in rows if row["job"] == f"{rate} {name}"] for name in SHADES}
        if jobs["vanilla"]:
            share = mean([waited(row) for row in jobs["vanilla"]]).value
            for name, mine in jobs.items():
                if mine:
                    points.setdefault(name, {})[share] = geometric_mean([alone / s for s in seconds(mine).values()])
    return points


def waited(row: Mapping[str, Any]) -> float:
    """The part of an epoch in which its slowest rank waits for messages or reduces."""
    told = row["result"]["breakdown_seconds"]
    epoch = sum(told[key] for key in ("compute", "encode", "exposed_wire", "exposed_skew", "bubble", "reduce", "other"))
    return (told["exposed_wire"] + told["exposed_skew"] + told["reduce"]) / epoch


def draw(found: Mapping[str, Rows], file: Path) -> None:
    plt = reports.pyplot(8)
    figure, axis = plt.subplots(figsize=(8, 4.6), layout="constrained")
    measured, slow = inside(found), across(found["paced"])
    ends: dict[str, tuple[float, float]] = {}
    for name, (colour, style, _) in SHADES.items():
        shares, values = list(measured[name]), list(measured[name].values())
        axis.plot([100 * s for s in shares], [e.value for e in values], style, color=colour, lw=1.3)
        low, high = [e.low for e in values], [e.high for e in values]
        axis.fill_between([100 * s for s in shares], low, high, color=colour, alpha=0.12, lw=0)
        ends[name] = shares[-1], values[-1].value
        if name in slow:
            far = [shares[-1], *slow[name]]
            beyond = [values[-1].value, *(e.value for e in slow[name].values())]
            axis.plot([100 * s for s in far], beyond, "--", color=colour, lw=0.9)
            ends[name] = far[-1], beyond[-1]
    axis.axhline(1.0, color="#000000", lw=0.8)
    axis.text(94, 1.03, "single, all threads", ha="right", va="bottom")
    label(axis, ends)
    axis.set(xlabel="share of a vanilla epoch that passes in communication, %", xlim=(10, 94), yscale="log")
    axis.set(ylabel="times as fast as one device with all threads", ylim=(0.045, 1.25))
    axis.set_yticks([0.05, 0.1, 0.2, 0.5, 1], ["0.05", "0.1", "0.2", "0.5", "1"])
    axis.minorticks_off()
    reports.save(figure, file)


def label(axis: Any, ends: Mapping[str, tuple[float, float]]) -> None:
    """A name beside the end of each line, in the order of the ends, none on another one."""
    sides: dict[bool, list[str]] = {}
    for name, (share, _) in ends.items():
        sides.setdefault(share > 0.8, []).append(name)
    for far, names in sides.items():
        at = spread({name: ends[name][1] for name in sorted(names, key=lambda name: -ends[name][1])})
        for name, height in at.items():
            axis.text(94.5 if far else 66, height, SHADES[name][2], color=SHADES[name][0], va="center", size=7)


def spread(values: Mapping[str, float]) -> dict[str, float]:
    """Heights from above to below, each lower by APART at least than the one before, the first than the line at 1."""
    placed: dict[str, float] = {}
    for name, value in values.items():
        placed[name] = min([value, 1 / APART, *(height / APART for height in placed.values())])
    return placed
