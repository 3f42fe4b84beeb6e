"""Figures of compare_all: epochs and accuracy on sbm, accuracy on every dataset, validation against time and bytes."""

import math
from collections.abc import Iterable, Mapping, Sequence
from operator import itemgetter
from pathlib import Path
from typing import Any

import numpy as np
import records
import reports
from compare_all.cells import LINKS, Rows, by_cell, differences, methods_of, ratios, seconds

from gnnpar.report.statistics import Estimate, geometric_mean, mean

STYLES = {"speed": ("#7a8794", -0.12), "paced": ("#2b7bba", 0.12)}
MODELS = {"gcn": ("#2b7bba", -0.2), "sage": ("#1a9e77", 0.0), "gat": ("#e09f1f", 0.2), "resgcn": ("#8e5ea2", 0.0)}
COLUMNS = 5  # of panels beside each other
# of time to accuracy: exact blue, rounded green, quantized orange, stale violet; those between look like one of them
LINES = {
    "single, all threads": "#000000",
    "vanilla": "#76b7d8",
    "graph_parallel": "#2b7bba",
    "graph_parallel bf16": "#1a9e77",
    "adaqp": "#d9780f",
    "gnnpipe": "#8e5ea2",
    "minibatch": "#c2255c",
    "control": "#7a8794",
}
EDGE = 6.0  # points; what is beyond is a number at the edge, so that intervals stay readable

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


def overview(studies: Mapping[str, Rows], file: Path) -> None:
    """Epoch time by link (GCN; not of mini-batches: other work), and accuracy less that of `single`, paired by seed."""
    cells = by_cell(studies)
    accuracy = {model: methods for (study, model), methods in cells.items() if study == "accuracy"}
    timed = {study: cells[study, "gcn"] for study in LINKS if (study, "gcn") in cells}
    names = methods_of({("", which): methods for which, methods in {**accuracy, **timed}.items()})
    if not names:
        return
    plt = reports.pyplot(8)
    figure, (times, off) = plt.subplots(1, 2, figsize=(8, 0.9 + 0.22 * len(names)), layout="constrained")
    for study, methods in timed.items():
        for i, name in enumerate(names):
            if name in methods and "minibatch" not in name:
                colour, shift = STYLES[study]
                _point(times, geometric_mean(list(seconds(methods[name]).values())), i + shift, colour, LINKS[study])
    _accuracy(off, accuracy, names)
    times.set(xlabel="seconds an epoch (GCN)", xlim=(0, None))
    off.set_xlabel("test accuracy over single, points")
    for axes in (times, off):
        _rows(axes, names)
        _legend(axes, [axes])
    reports.save(figure, file)


def datasets(studies: Mapping[str, Rows], file: Path) -> None:
    """The same difference on every other dataset: a panel each, on one scale."""
    cells = by_cell(studies)
    names, shown = methods_of(cells), list(dict.fromkeys(study for study, _ in cells))
    if not names:
        return
    plt = reports.pyplot(7)
    columns = min(COLUMNS, len(shown))
    lines = -(-len(shown) // columns)
    size = (1.2 + 1.5 * columns, lines * (0.9 + 0.18 * len(names)))
    figure, grid = plt.subplots(
        lines, columns, figsize=size, sharex=True, sharey=True, squeeze=False, layout="constrained"
    )
    axes = grid.flatten()
    for axis, study in zip(axes, shown, strict=False):
        _accuracy(axis, {model: methods for (of, model), methods in cells.items() if of == study}, names)
        axis.set_title(study)
        axis.tick_params(labelbottom=True)
    for axis in axes[len(shown) :]:
        axis.set_axis_off()
    _rows(axes[0], names)
    _legend(axes[columns - 1], axes, loc="upper left", bbox_to_anchor=(1, 1))
    figure.supxlabel("test metric over single, points")
    reports.save(figure, file)


def to_target(studies: Mapping[str, Rows], file: Path) -> None:
    """Validation against training seconds and megabytes sent, of some methods; means over seeds."""
    cells = {study: methods for (study, _), methods in by_cell(studies).items()}
    if not cells:
        return
    plt = reports.pyplot(7)
    figure, axes = plt.subplots(len(cells), 2, figsize=(8, 2.8 * len(cells)), squeeze=False, layout="constrained")
    for row, (study, methods) in zip(axes, cells.items(), strict=True):
        for axis, key, unit in zip(row, ("time/train_seconds", "comm/total_bytes_so_far"), (1, 1e6), strict=True):
            for name in (name for name in LINES if name in methods):
                x, y = (
                    np.mean([[e[k] for e in run["curve"]] for run in methods[name]], 0) for k in (key, "metric/val")
                )
                if x[-1] > 0:
                    axis.plot(x / unit, 100 * y, color=LINES[name], linewidth=1, label=name)
        row[0].set(xlabel="training seconds", ylabel=f"{study}: validation, %", xscale="log")
        row[1].set(xlabel="MB sent", xscale="log")
        _legend(row[1], row, fontsize=5, loc="upper left", bbox_to_anchor=(1, 1))
    reports.save(figure, file)


def _accuracy(axes: Any, models: Mapping[str, Mapping[str, Rows]], names: Sequence[str]) -> None:
    for model, methods in models.items():
        colour, shift = MODELS[model]
        for i, name in enumerate(names):
            found = differences(methods.get(name, ()), methods.get("single", ()))
            if found and name != "single":
                _point(axes, mean(found), i + shift, colour, model)
    axes.set_xlim(-EDGE, EDGE)
    axes.axvline(0.0, color="#5a6572", linewidth=0.6)
    axes.axvline(-0.3, color="#5a6572", linewidth=0.6, linestyle=":")


def _point(axes: Any, e: Estimate, at: float, colour: str, label: str) -> None:
    if abs(e.value) > EDGE and label in MODELS:  # models beside each other, as they stand above each other else
        row = round(at)
        inwards = EDGE - 0.3 - 1.5 * round((at - row) / 0.2 + 1)
        side, ends = math.copysign(inwards, e.value), "left" if e.value < 0 else "right"
        axes.text(side, row, f"{e.value:+.1f}", color=colour, size=5, va="center", ha=ends)
        axes.plot([], [], "o", color=colour, markersize=3.5, label=label)
        return
    if e.low == e.low:
        axes.plot([e.low, e.high], [at, at], color=colour, linewidth=1)
    axes.plot([e.value], [at], "o", color=colour, markersize=3.5, label=label)


def _rows(axes: Any, names: Sequence[str]) -> None:
    axes.set_yticks(range(len(names)), names)
    axes.set_ylim(len(names) - 0.5, -0.5)


def _legend(axes: Any, of: Iterable[Any], **place: Any) -> None:
    """Each label once."""
    named = {label: handle for each in of for handle, label in zip(*each.get_legend_handles_labels(), strict=True)}
    axes.legend(named.values(), named, frameon=False, **place)


def shares(found: Mapping[str, Rows], file: Path) -> None:
    """Speed over one device with all threads against the share of communication.

    Of the lines of compare_all (six cells: three models, loopback and 1 Gbit/s; ratios inside blocks) and, dashed, of
    bandwidth (GCN over 0.3 and 0.1 Gbit/s), in which no device stands alone: its epoch is that of compare_all there.
    Share: of a cell of compare_all, what the control saves, which sends nothing; of bandwidth, what vanilla waits.
    """
    plt = reports.pyplot(8)
    figure, axis = plt.subplots(figsize=(8, 4.6), layout="constrained")
    both, jobs = by_cell({name: found[name] for name in LINKS}), reports.by(records.read(BANDWIDTH), itemgetter("job"))
    saved = [mean([1 - 1 / r for r in ratios(m["control"], m["vanilla"])]).value for m in both.values()]
    cells = sorted(zip(saved, both.values(), strict=True), key=itemgetter(0))
    slow = [
        (rate, mean(list(map(waited, jobs[f"{rate} vanilla"]))).value) for rate in SLOW if f"{rate} vanilla" in jobs
    ]
    alone = geometric_mean(list(seconds(both["paced", "gcn"][ALONE]).values())).value
    x, ends = [100 * share for share, _ in cells], dict[str, tuple[float, float]]()
    for name, (colour, style, _) in SHADES.items():
        line = [geometric_mean(ratios(methods[name], methods[ALONE])) for _, methods in cells]
        axis.plot(x, [e.value for e in line], style, color=colour, lw=1.3)
        axis.fill_between(x, [e.low for e in line], [e.high for e in line], color=colour, alpha=0.12, lw=0)
        dashed = [(x[-1], line[-1].value)]
        for rate, share in slow:
            if rows := jobs.get(f"{rate} {name}"):
                dashed.append((100 * share, geometric_mean([alone / s for s in seconds(rows).values()]).value))
        if len(dashed) > 1:
            axis.plot(*zip(*dashed, strict=True), "--", color=colour, lw=0.9)
        ends[name] = dashed[-1]
    axis.axhline(1.0, color="#000000", lw=0.8)
    axis.text(94, 1.03, "single, all threads", ha="right", va="bottom")
    for is_far in (False, True):  # a name beside the end of each line, from above to below, none on another one
        height = 1.0
        for name in sorted((n for n in ends if (ends[n][0] > 80) == is_far), key=lambda n: -ends[n][1]):
            height = min(ends[name][1], height / APART)
            axis.text(94.5 if is_far else 66, height, SHADES[name][2], color=SHADES[name][0], va="center", size=7)
    axis.set(xlabel="share of a vanilla epoch that passes in communication, %", xlim=(10, 94), yscale="log")
    axis.set(ylabel="times as fast as one device with all threads", ylim=(0.045, 1.25))
    axis.set_yticks([0.05, 0.1, 0.2, 0.5, 1], ["0.05", "0.1", "0.2", "0.5", "1"])
    axis.minorticks_off()
    reports.save(figure, file)


def waited(row: Mapping[str, Any]) -> float:
    """The part of an epoch in which its slowest rank waits for messages or reduces."""
    told = row["result"]["breakdown_seconds"]
    epoch = sum(told[key] for key in ("compute", "encode", "exposed_wire", "exposed_skew", "bubble", "reduce", "other"))
    return (told["exposed_wire"] + told["exposed_skew"] + told["reduce"]) / epoch
