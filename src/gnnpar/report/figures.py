"""Figures for papers as svg, pdf and png, each with its data as csv."""

from __future__ import annotations

import io
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gnnpar.files import JsonDict, open_atomic, write_text_atomic
from gnnpar.report import colours, curves, plots
from gnnpar.report.comparison import Comparison
from gnnpar.report.exports import as_csv
from gnnpar.report.formatting import marked
from gnnpar.report.groups import Group
from gnnpar.report.runs import by
from gnnpar.settings import ConfigError

if TYPE_CHECKING:
    from matplotlib.axes import Axes

FORMATS = {"svg": {"Date": None}, "pdf": {"CreationDate": None}, "png": {}}  # form -> metadata without a date
_WIDTH = 7.0  # inches: text width of a page, or both columns
_CURVES = 2.8  # inches: height of a panel of curves
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


def on_paper() -> AbstractContextManager[None]:
    """Return a context in which matplotlib draws for papers."""
    import matplotlib as mpl

    return mpl.rc_context(_STYLE)


def write_figures(comparison: Comparison, folder: Path) -> list[Path]:
    """Write NAME.svg, .pdf, .png and .csv with a panel per task, for figures with data; return the files."""
    if folder.exists() and not folder.is_dir():
        raise ConfigError(f"--figures {folder} is a file; name a folder")
    folder.mkdir(parents=True, exist_ok=True)
    tint = colours.tints(comparison.groups, comparison.baseline)
    data: dict[str, tuple[str, Callable[[Sequence[Group]], Rows]]] = {  # file -> picture, lines of the csv
        "speedup": ("speed-up", _speedups),
        "breakdown": ("breakdown", lambda groups: _parts(groups, "breakdown_seconds", curves.breakdown_of)),
        "bytes": ("bytes", lambda groups: _parts(groups, "bytes_per_epoch", curves.bytes_of)),
        "accuracy_time": ("accuracy against time", lambda groups: _curves(groups, tint, "seconds")),
        "accuracy_bytes": ("accuracy against bytes", lambda groups: _curves(groups, tint, "bytes")),
    }
    names = curves.tasks(comparison.groups)
    tasks = {names[arena]: groups for arena, groups in by(comparison.groups, lambda group: group.arena).items()}
    drawn = {task: plots.pictures(groups, tint, comparison.baseline, pale=False) for task, groups in tasks.items()}
    files: list[Path] = []
    with on_paper():
        for name, (picture, rows_of) in data.items():
            shown = {task: known for task, each in drawn.items() if (known := each[picture]) is not None}
            if shown:
                rows = [{"task": task} | row for task in shown for row in rows_of(tasks[task])]
                write_text_atomic(folder / f"{name}.csv", as_csv(rows))
                files += [*_figure(folder / name, shown), folder / f"{name}.csv"]
    return files


def _figure(path: Path, pictures: Mapping[str, plots.Picture | plots.Curves]) -> list[Path]:
    """Write one figure as wide as a page, with two tasks per row."""
    from matplotlib.figure import Figure

    across = min(2, len(pictures))
    down = -(-len(pictures) // across)
    tall = [max(2.2, 0.34 * len(p.rows) + 1.0) if isinstance(p, plots.Picture) else _CURVES for p in pictures.values()]
    figure = Figure(figsize=(_WIDTH, down * max(tall)))
    panels = figure.subplots(down, across, squeeze=False).flatten()
    for axes, (task, picture) in zip(panels, pictures.items(), strict=False):
        axes.set_title(task, fontsize=8, loc="left", fontweight="bold")
        axes.set_xlim(0, 100)
        if isinstance(picture, plots.Picture):
            _draw_rows(axes, picture)
        else:
            _draw_curves(axes, picture)
    for axes in panels[len(pictures) :]:
        axes.set_visible(False)
    named = dict(pair for axes in panels for pair in zip(*axes.get_legend_handles_labels()[::-1], strict=True))
    if named:  # legend of the parts of bars; curves have labels at their ends
        figure.legend(named.values(), named, loc="outside lower center", ncols=6)
    for form, without_date in FORMATS.items():
        drawn = io.BytesIO()  # matplotlib's own writers hide errors of a full disk
        figure.savefig(drawn, format=form, metadata=without_date)
        with open_atomic(path.with_suffix(f".{form}")) as out:
            out.write(drawn.getvalue())
    return [path.with_suffix(f".{form}") for form in FORMATS]


def _named(group: Group, busy: bool = False) -> JsonDict:
    name, grey = marked(group.name, busy), group.timeless
    return {"strategy": group.first["strategy"], "configuration": name, "no_statement_on_speed": grey}


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


def _parts(groups: Sequence[Group], field: str, parts_of: curves.Parts) -> Rows:
    """Return one row per part of a configuration, mean over its runs; at most six parts, the small ones together."""
    return [
        _named(group, group.time_busy and field == "breakdown_seconds") | {"part": part, field: value}
        for group, parts in curves.bars(groups, parts_of)
        for part, value in parts.items()
    ]


def _curves(groups: Sequence[Group], tint: Mapping[str, str], axis: str) -> Rows:
    """Return one row per evaluation: the mean over runs (run empty), and each run of configurations in colour."""
    shown = [g for g in groups if not (axis == "seconds" and g.timeless)]  # without times that do not measure speed
    rows: Rows = []
    for line in curves.lines(shown, tint, axis):
        group = line.group
        named = _named(group) | {"label": line.label, "in_colour": line.in_colour}
        target = "" if group.target is None else 100 * group.target
        metric = {"metric": group.first["metric"] or "metric", "target_percent": target}
        for k, run in enumerate(line.curves):
            which = {"run": "" if line.averaged and not k else str(k)}
            points = [
                {"epoch": epoch, "seconds": time, "bytes": sent, "percent": val} for epoch, time, sent, val in run
            ]
            rows += [named | which | metric | point for point in points]
    return rows


def _draw_rows(axes: Axes, picture: plots.Picture) -> None:
    for i, row in enumerate(picture.rows):
        for kind, left, width, colour, _ in row.marks:
            if kind == "bar":
                axes.barh(i, width, left=left, height=0.56, color=colour)
            elif kind == "span":
                axes.plot([left, left + width], [i, i], color=colour, linewidth=1)
            elif kind == "dot":
                axes.plot([left], [i], ".", color=colour, alpha=0.45, markersize=3)
            else:
                axes.plot([left], [i], "D", color=colour, mfc="none" if kind == "hollow" else colour, markersize=5)
        axes.text(102, i, row.text, va="center", fontsize=7)
    for name, colour in picture.keys.items():
        axes.plot([], [], "s", color=colour, label=name)
    for place in picture.lines:
        axes.axvline(place, color=_SOFT, linewidth=0.6, linestyle=":")
    axes.set_xticks(*zip(*picture.ticks, strict=True))
    axes.set_yticks(range(len(picture.rows)), [f"{row.name}\n{row.details}" for row in picture.rows], fontsize=7)
    axes.tick_params(axis="y", length=0)
    axes.set_ylim(len(picture.rows) - 0.5, -0.5)
    axes.set_xlabel(picture.axis)


def _draw_curves(axes: Axes, picture: plots.Curves) -> None:
    for stroke in picture.strokes:
        xs, ys = zip(*stroke.points, strict=True)
        dash = "-" if stroke.dash == "none" else (0, [float(part) for part in stroke.dash.split()])
        style = {"linestyle": dash, "linewidth": 0.6 * stroke.width, "alpha": stroke.opacity}
        axes.plot(xs, ys, color=stroke.colour, **style)
    for label in picture.labels:
        if label.shown:
            place, arrow = (102, label.top), {"arrowstyle": "-", "color": label.colour, "linewidth": 0.5}
            style = {"fontsize": 7, "va": "center", "color": label.colour, "annotation_clip": False}
            axes.annotate(label.text, label.end, place, arrowprops=arrow, **style)
    if picture.target is not None:
        axes.axhline(picture.target, color=_SOFT, linewidth=0.6, linestyle=":")
    axes.set_xticks(*zip(*picture.x_ticks, strict=True))
    axes.set_yticks([100 - place for place, _ in picture.y_ticks], [text for _, text in picture.y_ticks])
    axes.set_ylim(100, 0)
    axes.set_xlabel(picture.across)
    axes.set_ylabel(picture.up)
