"""Pictures of a task as data, for the page and for papers: marks and bars on tracks, and curves. Places are in percent
of a track or of the picture, which fits every width; values are in the text, or under the cursor."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from gnnpar.report import colours, curves
from gnnpar.report import formatting as words
from gnnpar.report.colours import OTHER
from gnnpar.report.groups import Group
from gnnpar.report.runs import by
from gnnpar.report.statistics import Estimate
from gnnpar.track.console import num_bytes, seconds

_LEAST = 1e-300  # smallest value on a logarithmic scale
_LABELS = {"exposed_wire": "exposed, wire", "exposed_skew": "exposed, skew", "host": "host, off the device"}
_TEXT_OF: Mapping[str, Callable[[float], str]] = {"seconds": seconds, "bytes": num_bytes}
_UNITS = {
    "seconds": ((3600.0, "h"), (60.0, "min"), (1.0, "s"), (1e-3, "ms"), (1e-6, "µs")),
    "bytes": ((2.0**30, "GiB"), (2.0**20, "MiB"), (2.0**10, "KiB"), (1.0, "B")),
}
_TICK = 9  # percent of a track between two labels
_LINE = 6  # percent of a picture of curves between two labels
_HOVERED = 20  # points of a curve with their values under the cursor


@dataclass(frozen=True)
class Axis:
    """A scale from low to high with its ticks."""

    low: float
    high: float
    ticks: Sequence[float]
    log: bool = False

    def at(self, value: float) -> float:
        """Return the place of a value in percent of the scale."""
        low, x, high = (self._on(each) for each in (self.low, value, self.high))
        return round(100 * (x - low) / (high - low), 2)

    def _on(self, value: float) -> float:
        return math.log(max(value, _LEAST)) if self.log else value

    def labels(self) -> list[tuple[float, str]]:
        """Return places and texts of the ticks, at least _TICK percent apart."""
        found: list[tuple[float, str]] = []
        for tick in self.ticks:
            if not found or self.at(tick) - found[-1][0] >= _TICK:
                found.append((self.at(tick), f"{tick:g}"))
        return found


def linear_axis(low: float, high: float) -> Axis:
    """Return a scale with at most six round ticks."""
    span = high - low or 1.0
    unit = 10.0 ** math.floor(math.log10(span / 2))
    step = next(unit * k for k in (1, 2, 5, 10) if span <= 5 * unit * k)
    ticks = [k * step for k in range(math.ceil(low / step), math.floor((low + span) / step) + 1)]
    return Axis(low, low + span, ticks)


def log_axis(values: Sequence[float]) -> Axis:
    """Return a logarithmic scale that holds all values but NaN."""
    known = [max(value, _LEAST) for value in values if value == value]
    room = max(1.1, (max(known) / min(known)) ** 0.06)
    low, high = min(known) / room, max(known) * room
    decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    steps = (1, 1.2, 1.5, 2, 3, 5, 7) if high < 4 * low else (1, 2, 3, 5) if len(decades) < 5 else (1,)
    ticks = [step * 10.0**k for k in decades[:: 1 + len(decades) // 10] for step in steps]
    inside = [tick for tick in ticks if low <= tick <= high]
    return Axis(low, high, inside if len(inside) > 1 else linear_axis(low, high).ticks, log=True)


def scale_of(largest: float, quantity: str) -> tuple[float, str]:
    """Return the divisor and the unit for the largest value."""
    if quantity == "seconds" and 60 <= largest < 600:
        return 1.0, "s"
    return next((unit for unit in _UNITS[quantity] if largest >= unit[0]), _UNITS[quantity][-1])


class Mark(NamedTuple):
    """A part of a track. kind: dot, span, value, hollow, or bar."""

    kind: str
    left: float
    width: float
    colour: str
    hover: str


class Row(NamedTuple):
    """One configuration: name, its settings, marks, the text of its value and a smaller one below it."""

    name: str
    details: str
    marks: list[Mark]
    text: str
    below: str = ""


class Picture(NamedTuple):
    """Rows over one axis. lines: places of vertical lines; keys: names and colours of parts."""

    axis: str
    ticks: list[tuple[float, str]]
    lines: list[float]
    rows: list[Row]
    keys: Mapping[str, str]


Point = tuple[Group, Estimate, Iterable[float], str, str]  # with samples inside blocks, the texts of Row


def times(groups: Sequence[Group], tint: Mapping[str, str]) -> Picture | None:
    """Draw seconds of an epoch."""
    shown = [(g, g.epoch_seconds, g.times.values(), words.epoch_of(g), "") for g in groups if g.epoch_seconds]
    scale, unit = scale_of(max((estimate.value for _, estimate, *_ in shown), default=1.0), "seconds")
    return _points(shown, tint, seconds, f"{unit} an epoch", scale=scale)


def speedups(groups: Sequence[Group], tint: Mapping[str, str], baseline: str) -> Picture | None:
    """Draw times faster than the baseline."""
    shown = [(g, g.speedup, g.ratios.values(), *words.speedup_parts(g)) for g in groups if g.speedup]
    return _points(shown, tint, "{:.3f}".format, f"times faster than {baseline}", lines=[1.0])


def accuracies(groups: Sequence[Group], tint: Mapping[str, str], baseline: str) -> Picture | None:
    """Draw differences to the baseline in points, with a line at the negative control; accuracies if no group has a
    difference."""
    if any(group.difference for group in groups):
        found = [(g, _SAME if g.verdict == "baseline" else g.difference, words.verdict_of(g)) for g in groups]
        text, axis, lines = "{:+.2f}".format, f"points over {baseline}", [0.0]
    else:
        found = [(g, g.accuracy, "") for g in groups]
        text, axis, lines = "{:.2f}".format, "test at best validation, %", []
    shown = [(g, e, (), words.interval(g.accuracy), below) for g, e, below in found if e]
    lines += [estimate.value for group, estimate, *_ in shown if group.control]
    return _points(shown, tint, text, axis, lines=lines, timed=False)


_SAME = Estimate(0.0, math.nan, math.nan, 0)  # the baseline's difference to itself


def _points(
    shown: Sequence[Point],
    tint: Mapping[str, str],
    text: Callable[[float], str],
    axis: str,
    *,
    lines: Sequence[float] = (),
    timed: bool = True,
    scale: float = 1.0,
) -> Picture | None:
    """Draw a mark per group with its interval, and a dot per block; hollow for the negative control.

    text: of a value; timed: on a logarithmic axis, grey where times do not measure speed; scale: unit of the axis.
    """
    if not shown:
        return None
    ends = [x / scale for _, e, samples, *_ in shown for x in (e.value, e.low, e.high, *samples) if x == x]
    ends += [line / scale for line in lines]
    room = 0.05 * (max(ends) - min(ends))
    on = log_axis(ends) if timed else linear_axis(min(ends) - room, max(ends) + room)
    rows: list[Row] = []
    for group, estimate, samples, said, below in shown:
        grey = timed and group.timeless
        colour = colours.GREY if grey else tint[group.first["strategy"]]
        marks = [Mark("dot", on.at(x / scale), 0, colour, f"one block: {text(x)}") for x in samples]
        hover = text(estimate.value)
        if estimate.low == estimate.low:
            hover += f", 95 % [{text(estimate.low)}, {text(estimate.high)}], {estimate.n} samples"
            left, right = on.at(estimate.low / scale), on.at(estimate.high / scale)
            marks.append(Mark("span", left, round(right - left, 2), colour, hover))
        kind = "hollow" if grey or group.control else "value"
        marks.append(Mark(kind, on.at(estimate.value / scale), 0, colour, hover))
        rows.append(Row(group.first["strategy"], details(group), marks, said, below))
    return Picture(axis, on.labels(), [on.at(line / scale) for line in lines], rows, {})


def stacked(
    bars: Sequence[tuple[Group, Mapping[str, float]]], tints: Mapping[str, str], quantity: str, *, timed: bool = False
) -> Picture | None:
    """Draw bars of parts, with their totals. quantity: seconds or bytes."""
    if not bars:
        return None
    totals = [sum(parts.values()) for _, parts in bars]
    scale, unit = scale_of(max(totals), quantity)
    on, text = linear_axis(0.0, max(totals) / scale), _TEXT_OF[quantity]
    tints = {**tints, OTHER: colours.OF_OTHER}
    rows: list[Row] = []
    for (group, parts), total in zip(bars, totals, strict=True):
        marks, left = [], 0.0
        for part in (part for part in tints if parts.get(part)):
            start, left = left, left + parts[part] / scale
            width = round(on.at(left) - on.at(start), 2)
            hover = f"{_LABELS.get(part, part)}: {text(parts[part])}"
            marks.append(Mark("bar", on.at(start), width, tints[part], hover))
        said = words.bracketed(words.marked(text(total), timed and group.time_busy), timed and group.timeless)
        rows.append(Row(group.first["strategy"], details(group), marks, said))
    keys = {_LABELS.get(part, part): tint for part, tint in tints.items() if any(parts.get(part) for _, parts in bars)}
    return Picture(unit, on.labels(), [], rows, keys)


def layers(groups: Sequence[Group]) -> Picture | None:
    """Draw bytes of an epoch by layer."""
    sent = {group: {f"layer {k}": size for k, size in enumerate(curves.layer_bytes(group))} for group in groups}
    names = max(sent.values(), key=len, default={})
    tints = {name: colours.SHADES[k % len(colours.SHADES)] for k, name in enumerate(names)}
    return stacked(curves.bars(groups, sent.get, fewer=False), tints, "bytes")


def details(group: Group) -> str:
    """Return the settings that distinguish a group, and its ranks."""
    return colours.cut(" ".join(filter(None, (group.first["variant"], group.changed, group.ranks))))


Place = tuple[float, float]


class Stroke(NamedTuple):
    """A curve in percent of the picture, from its upper left. dots: points with a text."""

    strategy: str
    points: list[Place]
    dots: list[tuple[Place, str]]
    colour: str
    dash: str
    width: float
    opacity: float


class Label(NamedTuple):
    """The name of a curve, right of the picture at this height, and the end of the curve."""

    strategy: str
    text: str
    top: float
    end: Place
    colour: str
    shown: bool


class Curves(NamedTuple):
    """Validation over seconds or bytes. target: height of a line, or None."""

    across: str
    up: str
    x_ticks: list[tuple[float, str]]
    y_ticks: list[tuple[float, str]]
    target: float | None
    strokes: list[Stroke]
    labels: list[Label]


def accuracy(groups: Sequence[Group], tint: Mapping[str, str], axis: str) -> Curves | None:
    """Draw the validation metric over `axis` (seconds, bytes). At most six groups are in colour, with a label and a
    thin line for each run; other groups show the mean only, in grey."""
    found = curves.lines(groups, tint, axis)
    if not found:
        return None
    pale = {line.group for line in found if axis == "seconds" and line.group.timeless}
    clear = [line for line in found if line.group not in pale] or found  # a grey curve may leave the picture
    longest = max(curve[-1].cost(axis) for line in clear for curve in line.curves)
    scale, unit = scale_of(longest, axis)
    target = next((100 * group.target for group in groups if group.target is not None), None)
    heights = [each.val for line in found for curve in line.curves for each in curve]
    heights += [] if target is None else [target]
    room = 0.04 * (max(heights) - min(heights) or 1.0)
    on, up = linear_axis(0.0, 1.04 * longest / scale), linear_axis(min(heights) - room, max(heights) + room)

    def place(x: float, y: float) -> Place:
        return on.at(x / scale), round(100 - up.at(y), 2)

    strokes: list[Stroke] = []
    ends: list[Label] = []
    used: Counter[str] = Counter()
    for line in found:
        strategy = line.group.first["strategy"]
        colour = tint[strategy] if line.in_colour and line.group not in pale else colours.GREY
        dash = colours.DASHES[used[strategy] % len(colours.DASHES)]
        used[strategy] += 1
        for k, curve in enumerate(line.curves):
            points = [(each.cost(axis), each.val) for each in curve]
            path = [place(x, y) for x, y in points]
            if line.averaged and k:
                strokes.append(Stroke(strategy, path, [], colour, dash, 1, 0.25))
                continue
            timed = axis == "seconds"
            name = words.marked(line.group.name, timed and line.group.time_busy)
            name += " (no speed)" * (timed and line.group.timeless)
            dots = [(place(x, y), f"{name}: {y:.2f} % at {_TEXT_OF[axis](x)}") for x, y in points]
            dots = dots[::-1][:: -(-len(dots) // _HOVERED)]
            strokes.append(Stroke(strategy, path, dots, colour, dash, 2.4 if line.in_colour else 1.3, 1))
            inside = [(x, y) for x, y in points if x <= longest]
            if k == 0 and inside:
                last = place(*inside[-1])
                ends.append(Label(strategy, line.label, last[1], last, colour, line.in_colour))
    across = f"training time, {unit}" if axis == "seconds" else f"sent, {unit}"
    metric = f"{groups[0].first['metric'] or 'metric'} on validation, %"
    height = None if target is None else 100 - up.at(target)
    return Curves(across, metric, on.labels(), up.labels(), height, strokes, _labelled(ends))


def _labelled(ends: Sequence[Label]) -> list[Label]:
    """Push labels apart, to _LINE if there is room, separately for coloured labels and for each other strategy."""
    ordered = sorted(ends, key=lambda label: label.top)
    placed: list[Label] = []
    for labels in by(ordered, lambda label: "" if label.shown else label.strategy).values():
        tops = [label.top for label in labels]
        for _ in range(60):
            for i in range(1, len(tops)):
                if (missing := _LINE - (tops[i] - tops[i - 1])) > 0:
                    tops[i] += missing / 2
                    tops[i - 1] -= missing / 2
            tops = [min(max(top, 2), 98) for top in tops]
        placed += [label._replace(top=round(top, 2)) for label, top in zip(labels, tops, strict=True)]
    return placed


def pictures(
    groups: Sequence[Group], tint: Mapping[str, str], baseline: str, *, pale: bool = True
) -> dict[str, Picture | Curves | None]:
    """Return the pictures of a task by name, None without data. pale: curves over times that do not measure speed."""
    return {
        "time": times(groups, tint),
        "accuracy": accuracies(groups, tint, baseline),
        "bytes": stacked(curves.bars(groups, curves.bytes_of), colours.BYTES, "bytes"),
        "speed-up": speedups(groups, tint, baseline),
        "breakdown": stacked(curves.bars(groups, curves.breakdown_of), colours.TIME, "seconds", timed=True),
        "accuracy against time": accuracy([g for g in groups if pale or not g.timeless], tint, "seconds"),
        "accuracy against bytes": accuracy(groups, tint, "bytes"),
        "layers": layers(groups),
        "memory": stacked(curves.bars(groups, curves.live_bytes), colours.MEMORY, "bytes"),
    }
