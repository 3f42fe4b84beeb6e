"""Vector figures for papers, svg and pdf: breakdown bars, speed-up with intervals, accuracy against time and bytes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gnnpar.report import colours, curves
from gnnpar.report.comparison import Comparison
from gnnpar.report.emphasis import strategies_in_colour
from gnnpar.report.groups import Group
from gnnpar.report.page.plots import scale_of
from gnnpar.settings import ConfigError

if TYPE_CHECKING:
    from matplotlib.axes import Axes

FORMATS = ("svg", "pdf")
_STYLE: dict[Any, Any] = {  # Any: matplotlib's keys are a Literal of all of them
    "font.size": 8,
    "font.family": "sans-serif",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.linewidth": 0.6,
    "legend.frameon": False,
    "legend.fontsize": 7,
    "svg.fonttype": "none",
    "pdf.fonttype": 42,
    "svg.hashsalt": "gnnpar",
    "figure.constrained_layout.use": True,
}


def write_figures(comparison: Comparison, folder: Path) -> list[Path]:
    """The files written: NAME.svg and NAME.pdf, a panel a task; what no run has data for is left out."""
    import matplotlib as mpl

    if folder.exists() and not folder.is_dir():
        raise ConfigError(f"--figures {folder} is a file; name a folder")
    folder.mkdir(parents=True, exist_ok=True)
    chosen = strategies_in_colour(comparison.groups, comparison.baseline)
    tint = colours.of_strategies(chosen, [row["strategy"] for row in comparison.rows])
    names = curves.tasks(comparison.groups)
    tasks = {name: [group for group in comparison.groups if group.arena == arena] for arena, name in names.items()}
    drawn: dict[str, Callable[[Axes, list[Group]], bool]] = {
        "speedup": lambda axes, groups: _speedup(axes, groups, comparison.baseline, tint),
        "breakdown": lambda axes, groups: _stacked(axes, groups, "breakdown_seconds", colours.TIME, "seconds"),
        "bytes": lambda axes, groups: _stacked(axes, groups, "bytes_per_epoch", colours.BYTES, "bytes"),
        "accuracy_time": lambda axes, groups: _accuracy(axes, groups, "seconds", tint),
        "accuracy_bytes": lambda axes, groups: _accuracy(axes, groups, "bytes", tint),
    }
    files: list[Path] = []
    with mpl.rc_context(_STYLE):
        for name, draw in drawn.items():
            files += _figure(folder / name, tasks, draw)
    return files


def _figure(path: Path, tasks: Mapping[str, list[Group]], draw: Callable[[Axes, list[Group]], bool]) -> list[Path]:
    """One figure, two panels a row; no file where no panel has data."""
    from matplotlib.figure import Figure

    across = min(2, len(tasks))
    down = -(-len(tasks) // across)
    tallest = max(map(len, tasks.values()))
    figure = Figure(figsize=(3.5 * across, down * max(2.2, 0.34 * tallest + 1.0)))
    panels = figure.subplots(down, across, squeeze=False).flatten()
    any_data = False
    for axes, (task, groups) in zip(panels, tasks.items(), strict=False):
        has_data = draw(axes, groups)
        any_data |= has_data
        axes.set_title(task, fontsize=8, loc="left", fontweight="bold")
        axes.set_visible(has_data)
    for axes in panels[len(tasks) :]:
        axes.set_visible(False)
    if not any_data:
        return []
    named = dict(pair for axes in panels for pair in zip(*axes.get_legend_handles_labels()[::-1], strict=True))
    if named:
        wide = max(map(len, named)) > 20
        figure.legend(named.values(), named, loc="outside lower center", ncols=across * (2 if wide else 4))
    files = [path.with_suffix(f".{form}") for form in FORMATS]
    for file in files:
        figure.savefig(file, metadata={"Date": None} if file.suffix == ".svg" else {"CreationDate": None})
    return files


def _speedup(axes: Axes, groups: Sequence[Group], baseline: str, tint: Mapping[str, str]) -> bool:
    shown = [group for group in groups if group.speedup is not None]
    for i, group in enumerate(shown):
        estimate, colour = group.speedup, colours.GREY if group.timeless else tint[group.first["strategy"]]
        assert estimate is not None
        face = "none" if group.timeless or group.control else colour
        axes.plot(list(group.ratios.values()), [i] * len(group.ratios), ".", color=colour, alpha=0.45, markersize=3)
        axes.plot([estimate.value], [i], "D", color=colour, markerfacecolor=face, markersize=5)
        axes.plot([estimate.low, estimate.high], [i, i], color=colour, linewidth=1)
    axes.axvline(1, color="#5a6572", linewidth=0.6, linestyle=":")
    axes.set_xlim(left=0)
    _label(axes, shown, f"times faster than {baseline}")
    return bool(shown)


def _stacked(axes: Axes, groups: Sequence[Group], field: str, tints: Mapping[str, str], quantity: str) -> bool:
    bars_of = [(group, parts) for group in groups if (parts := curves.means_of(group, field, list(tints)))]
    largest = max((sum(parts.values()) for _, parts in bars_of), default=0.0)
    if not largest:
        return False
    scale, unit = scale_of(largest, quantity)
    left = [0.0] * len(bars_of)
    for part, tint in tints.items():
        widths = [parts[part] / scale for _, parts in bars_of]
        if any(widths):
            bars = axes.barh(
                range(len(bars_of)), widths, left=left, height=0.56, color=tint, label=part.replace("_", ", ")
            )
            for bar, (group, _) in zip(bars, bars_of, strict=True):
                bar.set_alpha(0.4 if quantity == "seconds" and group.timeless else 1.0)
        left = [before + width for before, width in zip(left, widths, strict=True)]
    for i, ((group, _), total) in enumerate(zip(bars_of, left, strict=True)):
        grey = quantity == "seconds" and group.timeless
        axes.text(total, i, f" ({total:.3g})" if grey else f" {total:.3g}", va="center", fontsize=7)
    axes.set_xlim(0, largest / scale * 1.18)
    _label(axes, [group for group, _ in bars_of], unit)
    return True


def _accuracy(axes: Axes, groups: Sequence[Group], axis: str, tint: Mapping[str, str]) -> bool:
    shown = [
        group for group in groups if not (axis == "seconds" and group.timeless)
    ]  # grey times are no curve on paper
    drawn = [(group, runs) for group in shown if (runs := curves.curves_of(group))]
    if not drawn:
        return False
    scale, unit = scale_of(max(run.along(axis)[-1] for _, runs in drawn for run in runs), axis)
    used: dict[str, int] = {}
    for group, runs in drawn:
        strategy = group.first["strategy"]
        colour, dashes = tint[strategy], ("-", "--", ":", "-.")[used.setdefault(strategy, 0) % 4]
        used[strategy] += 1
        mean = curves.mean_curve(runs)
        if mean is not None:
            for run in runs if len(runs) > 1 else ():
                axes.plot(
                    [x / scale for x in run.along(axis)],
                    run.val,
                    color=colour,
                    linestyle=dashes,
                    linewidth=0.5,
                    alpha=0.3,
                )
        for k, run in enumerate([mean] if mean is not None else runs):
            name = " ".join(filter(None, (strategy, group.first["variant"], group.changed))) if k == 0 else None
            axes.plot(
                [x / scale for x in run.along(axis)], run.val, color=colour, linestyle=dashes, linewidth=1.4, label=name
            )
    target = next((group.target for group in groups if group.target is not None), None)
    if target is not None:
        axes.axhline(100 * target, color="#5a6572", linewidth=0.6, linestyle=":")
    axes.set_xlabel({"seconds": f"training time, {unit}", "bytes": f"sent, {unit}"}[axis])
    axes.set_ylabel(f"{groups[0].first['metric'] or 'metric'} on validation, %")
    return True


def _label(axes: Axes, groups: Sequence[Group], title: str) -> None:
    axes.set_yticks(range(len(groups)), ["\n".join(group.name.split(" ", 1)) for group in groups], fontsize=7)
    axes.invert_yaxis()
    axes.set_xlabel(title)
