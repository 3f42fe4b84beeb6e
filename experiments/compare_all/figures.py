"""Figures of compare_all: epochs and accuracy on sbm, accuracy on every dataset, validation against time and bytes."""

import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import reports
from compare_all.cells import LINKS, Rows, by_cell, differences, methods_of, seconds

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


def overview(studies: Mapping[str, Rows], file: Path) -> None:
    """Epoch time by link (GCN; not of mini-batches: other work), and accuracy less that of `single`, paired by seed."""
    cells = by_cell(studies)
    accuracy = {model: methods for (study, model), methods in cells.items() if study == "accuracy"}
    timed = {study: cells.get((study, "gcn"), {}) for study in LINKS}
    shown = {
        cell: found for cell, found in cells.items() if cell[0] == "accuracy" or (cell[0] in LINKS and cell[1] == "gcn")
    }
    names = methods_of(shown)
    if not names:
        return
    plt = reports.pyplot(8)
    figure, (times, off) = plt.subplots(1, 2, figsize=(8, 0.9 + 0.22 * len(names)), layout="constrained")
    for study, (colour, shift) in STYLES.items():
        for i, name in enumerate(names):
            found = list(seconds(timed[study].get(name, ())).values())
            if found and "minibatch" not in name:
                _point(times, geometric_mean(found), i + shift, colour, LINKS[study])
    _accuracy(off, accuracy, names)
    times.set(xlabel="seconds an epoch (GCN)", xlim=(0, None))
    off.set_xlabel("test accuracy over single, points")
    for axes in (times, off):
        _rows(axes, names)
        _legend(axes, [axes])
    reports.save(figure, file)


def datasets(studies: Mapping[str, Rows], file: Path) -> None:
    """The same difference on every other dataset: a panel each, on one scale."""
    shown: dict[str, dict[str, Any]] = {}
    for (study, model), methods in by_cell(studies).items():
        shown.setdefault(study, {})[model] = methods
    names = methods_of(by_cell(studies))
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
    for axis, (study, models) in zip(axes, shown.items(), strict=False):
        _accuracy(axis, models, names)
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
            for name, runs in ((name, methods[name]) for name in LINES if name in methods):
                at = list(zip(*(run["curve"] for run in runs), strict=False))
                x = [mean([point[key] / unit for point in epoch]).value for epoch in at]
                y = [mean([100 * point["metric/val"] for point in epoch]).value for epoch in at]
                if x[-1] > 0:
                    axis.plot(x, y, color=LINES[name], linewidth=1, label=name)
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
