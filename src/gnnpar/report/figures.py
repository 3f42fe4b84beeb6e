"""Figures for papers as svg, pdf and png, each with its data as csv."""

from __future__ import annotations

import io
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from gnnpar.files import JsonDict, JsonObject, open_whole, write_text_whole
from gnnpar.report import colours, curves
from gnnpar.report.comparison import Comparison
from gnnpar.report.emphasis import OTHER, cut, groups_in_colour, short_name, six_parts, strategies_in_colour
from gnnpar.report.exports import as_csv
from gnnpar.report.formatting import marked
from gnnpar.report.groups import Group
from gnnpar.report.page.plots import log_axis, scale_of
from gnnpar.settings import ConfigError

if TYPE_CHECKING:
    from matplotlib.axes import Axes

FORMATS = ("svg", "pdf", "png")
_WIDTH = 7.0  # inches: text width of a page, or both columns
_CURVES = 2.8  # inches: height of a panel of curves
_LINE = 8.5  # points between labels of curves
_SOFT = "#5a6572"
_STYLE: dict[Any, Any] = {  # Any: matplotlib's keys are a Literal of all of them
    "font.size": 8,
    "font.family": "sans-serif",
    "text.parse_math": False,  # names may have dollar signs
    "text.usetex": False,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.linewidth": 0.6,
    "legend.frameon": False,
    "legend.fontsize": 7,
    "svg.fonttype": "none",
    "pdf.fonttype": 42,
    "svg.hashsalt": "gnnpar",
    "savefig.dpi": 200,
    "figure.constrained_layout.use": True,
}
Rows = list[JsonDict]


class Drawing(NamedTuple):
    """rows: lines of the csv from a task's groups. draw: draws them on axes. height: inches per group, and at least."""

    rows: Callable[[Sequence[Group]], Rows]
    draw: Callable[[Axes, Rows], None]
    height: tuple[float, float]


def on_paper() -> AbstractContextManager[None]:
    """Return a context in which matplotlib draws for papers."""
    import matplotlib as mpl

    return mpl.rc_context(_STYLE)


def write_figures(comparison: Comparison, folder: Path) -> list[Path]:
    """Write NAME.svg, .pdf, .png and .csv with a panel per task, for figures with data; return the files."""
    if folder.exists() and not folder.is_dir():
        raise ConfigError(f"--figures {folder} is a file; name a folder")
    folder.mkdir(parents=True, exist_ok=True)
    chosen = strategies_in_colour(comparison.groups, comparison.baseline)
    tint = colours.of_strategies(chosen, [row["strategy"] for row in comparison.rows])
    bars, lines = (0.34, 2.2), (0.0, _CURVES)
    figures = {
        "speedup": Drawing(_speedups, lambda axes, rows: _draw_speedups(axes, rows, comparison.baseline, tint), bars),
        "breakdown": Drawing(
            lambda groups: _parts(groups, "breakdown_seconds", curves.breakdown_of),
            lambda axes, rows: _draw_parts(axes, rows, colours.TIME, "seconds"),
            bars,
        ),
        "bytes": Drawing(
            lambda groups: _parts(groups, "bytes_per_epoch", curves.bytes_of),
            lambda axes, rows: _draw_parts(axes, rows, colours.BYTES, "bytes"),
            bars,
        ),
    } | {
        f"accuracy_{name}": Drawing(
            lambda groups, axis=axis: _curves(groups, chosen, axis),
            lambda axes, rows, axis=axis: _draw_curves(axes, rows, axis, tint),
            lines,
        )
        for name, axis in (("time", "seconds"), ("bytes", "bytes"))
    }
    names = curves.tasks(comparison.groups)
    tasks = {name: [group for group in comparison.groups if group.arena == arena] for arena, name in names.items()}
    files: list[Path] = []
    with on_paper():
        for name, drawing in figures.items():
            rows = {task: found for task, groups in tasks.items() if (found := drawing.rows(groups))}
            if rows:
                files += [*_figure(folder / name, rows, drawing), _data(folder / f"{name}.csv", rows)]
    return files


def _figure(path: Path, rows: Mapping[str, Rows], drawing: Drawing) -> list[Path]:
    """Write one figure as wide as a page, with two tasks a row."""
    from matplotlib.figure import Figure

    across = min(2, len(rows))
    down = -(-len(rows) // across)
    tallest = max(len({row["configuration"] for row in found}) for found in rows.values())
    each, least = drawing.height
    figure = Figure(figsize=(_WIDTH, down * max(least, each * tallest + 1.0)))
    panels = figure.subplots(down, across, squeeze=False).flatten()
    for axes, (task, found) in zip(panels, rows.items(), strict=False):
        axes.set_title(task, fontsize=8, loc="left", fontweight="bold")
        drawing.draw(axes, found)
    for axes in panels[len(rows) :]:
        axes.set_visible(False)
    named = dict(pair for axes in panels for pair in zip(*axes.get_legend_handles_labels()[::-1], strict=True))
    if named:  # legend of the parts of bars; curves have labels beside them
        figure.legend(named.values(), named, loc="outside lower center", ncols=6)
    files = [path.with_suffix(f".{form}") for form in FORMATS]
    dates = {".svg": {"Date": None}, ".pdf": {"CreationDate": None}, ".png": {}}
    for file in files:
        drawn = io.BytesIO()  # matplotlib's own writers hide errors of a full disk
        figure.savefig(drawn, format=file.suffix[1:], metadata=dates[file.suffix])
        with open_whole(file) as out:
            out.write(drawn.getvalue())
    return files


def _data(file: Path, rows: Mapping[str, Rows]) -> Path:
    write_text_whole(file, as_csv([{"task": task} | row for task, found in rows.items() for row in found]))
    return file


def _named(group: Group, busy: bool = False) -> JsonDict:
    name, grey = marked(group.name, busy), group.timeless
    return {"strategy": group.first["strategy"], "configuration": name, "no_statement_on_speed": grey}


def _by_configuration(rows: Rows) -> list[Rows]:
    return [list(some) for _, some in groupby(rows, key=lambda row: row["configuration"])]


def _speedups(groups: Sequence[Group]) -> Rows:
    """Return one row per configuration (block empty), and one per block of it."""
    rows: Rows = []
    for group in groups:
        if group.speedup is not None:
            estimate, blocks = group.speedup, group.ratios.items()
            named = _named(group, group.ratio_busy) | {"control": group.control}
            known = {"low": estimate.low, "high": estimate.high} if estimate.low == estimate.low else {}
            rows.append(named | {"block": "", "ratio": estimate.value, "low": "", "high": ""} | known)
            rows += [named | {"block": str(block), "ratio": ratio, "low": "", "high": ""} for block, ratio in blocks]
    return rows


def _draw_speedups(axes: Axes, rows: Rows, baseline: str, tint: Mapping[str, str]) -> None:
    configurations = _by_configuration(rows)
    for i, (mean, *blocks) in enumerate(configurations):
        grey = mean["no_statement_on_speed"]
        colour = colours.GREY if grey else tint[mean["strategy"]]
        face = "none" if grey or mean["control"] else colour
        axes.plot([row["ratio"] for row in blocks], [i] * len(blocks), ".", color=colour, alpha=0.45, markersize=3)
        axes.plot([mean["ratio"]], [i], "D", color=colour, markerfacecolor=face, markersize=5)
        if mean["low"] != "":
            axes.plot([mean["low"], mean["high"]], [i, i], color=colour, linewidth=1)
    axes.axvline(1, color=_SOFT, linewidth=0.6, linestyle=":")
    shown = [row[name] for row in rows for name in ("ratio", "low", "high") if row[name] != ""]
    low, high, ticks = log_axis(shown)
    axes.set_xscale("log")
    axes.minorticks_off()
    axes.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
    axes.set_xlim(low, high)
    _label_bars(axes, configurations, f"times faster than {baseline}")


def _parts(groups: Sequence[Group], field: str, parts_of: Callable[[Group], dict[str, float] | None]) -> Rows:
    """Return one row per part of a configuration, mean over its runs; at most six parts, the small ones together."""
    given = [(group, parts) for group in groups if (parts := parts_of(group))]
    if not any(sum(parts.values()) for _, parts in given):
        return []
    few = six_parts([parts for _, parts in given])
    return [
        _named(group, group.time_busy and field == "breakdown_seconds") | {"part": part, field: value}
        for (group, _), parts in zip(given, few, strict=True)
        for part, value in parts.items()
    ]


def _draw_parts(axes: Axes, rows: Rows, tints: Mapping[str, str], quantity: str) -> None:
    field = list(rows[0])[-1]
    configurations = _by_configuration(rows)
    largest = max(sum(row[field] for row in some) for some in configurations)
    scale, unit = scale_of(largest, quantity)
    for i, some in enumerate(configurations):
        left = 0.0
        grey = quantity == "seconds" and some[0]["no_statement_on_speed"]
        for row in some:
            width, part = row[field] / scale, row["part"]
            colour = tints.get(part, colours.OTHER)
            name = part.replace("_", ", ") if part != OTHER else OTHER
            axes.barh(i, width, left=left, height=0.56, color=colour, label=name, alpha=0.4 if grey else 1.0)
            left += width
        axes.text(left, i, f" ({left:.3g})" if grey else f" {left:.3g}", va="center", fontsize=7)
    axes.set_xlim(0, largest / scale * 1.18)
    _label_bars(axes, configurations, unit)


def _curves(groups: Sequence[Group], chosen: Sequence[str], axis: str) -> Rows:
    """Return one row per evaluation: the mean over runs (run empty), and each run of configurations in colour."""
    shown = [g for g in groups if not (axis == "seconds" and g.timeless)]  # without times that do not measure speed
    drawn = [(group, runs) for group in shown if (runs := curves.curves_of(group, axis))]
    in_colour = groups_in_colour([group for group, _ in drawn], chosen)
    rows: Rows = []
    for group, runs in sorted(drawn, key=lambda pair: pair[0] in in_colour):  # draw grey ones first
        mean = curves.mean_curve(runs)
        several = runs if mean is None or (len(runs) > 1 and group in in_colour) else []
        target = "" if group.target is None else 100 * group.target
        for k, run in enumerate(several if mean is None else [mean, *several]):
            label = short_name(group, [g for g, _ in drawn])
            named = _named(group) | {
                "label": label,
                "in_colour": group in in_colour,
                "run": "" if run is mean else str(k),
            }
            metric = {"metric": group.first["metric"] or "metric", "target_percent": target}
            rows += [
                named | metric | {"epoch": epoch, "seconds": seconds, "bytes": sent, "percent": percent}
                for epoch, seconds, sent, percent in zip(run.epochs, run.seconds, run.bytes, run.val, strict=True)
            ]
    return rows


def _draw_curves(axes: Axes, rows: Rows, axis: str, tint: Mapping[str, str]) -> None:
    scale, unit = scale_of(max(row[axis] for row in rows), axis)
    used: dict[str, int] = {}
    labels: list[tuple[str, float, float, str]] = []
    for some in _by_configuration(rows):
        first = some[0]
        strategy, coloured = first["strategy"], first["in_colour"]
        dashes = ("-", "--", ":", "-.")[used.setdefault(strategy, 0) % 4]
        used[strategy] += 1
        colour = tint[strategy] if coloured else colours.GREY
        for k, (run, points) in enumerate(groupby(some, key=lambda row: row["run"])):
            drawn = list(points)
            xs, ys = [row[axis] / scale for row in drawn], [row["percent"] for row in drawn]
            thin = run != "" and some[0]["run"] == ""
            wide, alpha = (0.5, 0.3) if thin else (1.4, 1.0) if coloured else (0.7, 0.7)
            axes.plot(xs, ys, color=colour, linestyle=dashes, linewidth=wide, alpha=alpha)
            if k == 0 and coloured:
                labels.append((first["label"], xs[-1], ys[-1], colour))
    if rows[0]["target_percent"] != "":
        axes.axhline(rows[0]["target_percent"], color=_SOFT, linewidth=0.6, linestyle=":")
    axes.set_xlim(left=0)
    axes.set_xlabel({"seconds": f"training time, {unit}", "bytes": f"sent, {unit}"}[axis])
    axes.set_ylabel(f"{rows[0]['metric']} on validation, %")
    _label_curves(axes, labels)


def _label_curves(axes: Axes, labels: Sequence[tuple[str, float, float, str]]) -> None:
    """Write names right of the axes, as near to the ends of their curves as they fit, with lines to them."""
    low, high = axes.get_ylim()
    gap = _LINE * (high - low) / (0.7 * 72 * _CURVES)  # 0.7: share of a panel without titles and ticks
    ordered = sorted(labels, key=lambda label: label[2])
    heights = [y for _, _, y, _ in ordered]
    for _ in range(60):
        for i in range(1, len(heights)):
            missing = gap - (heights[i] - heights[i - 1])
            if missing > 0:
                heights[i] += missing / 2
                heights[i - 1] -= missing / 2
        heights = [min(max(height, low), high) for height in heights]
    for (text, x, y, colour), height in zip(ordered, heights, strict=True):
        axes.annotate(
            text,
            (x, y),
            (1.02, height),
            textcoords=axes.get_yaxis_transform(),
            fontsize=7,
            va="center",
            color=colour,
            annotation_clip=False,
            arrowprops={"arrowstyle": "-", "color": colour, "linewidth": 0.5, "shrinkA": 0, "shrinkB": 1},
        )


def _label_bars(axes: Axes, configurations: Sequence[Sequence[JsonObject]], title: str) -> None:
    names = [str(some[0]["configuration"]).split(" ", 1) for some in configurations]
    axes.set_yticks(range(len(names)), ["\n".join(map(cut, name)) for name in names], fontsize=7)
    axes.tick_params(axis="y", length=0)
    axes.invert_yaxis()
    axes.set_xlabel(title)
