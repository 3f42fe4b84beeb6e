"""The pictures of the page, as plotly specifications: plain data, drawn in the browser.

One picture per task (dataset and model), groups from top to bottom, a strategy in the same colour everywhere. report.js
fills in the page's colours of text, grid and background (light, dark, paper), and places the labels of curves beside
their ends (`labels`) without overlap.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from html import escape

from gnnpar.files import JsonDict
from gnnpar.report import colours, curves
from gnnpar.report.curves import Curve
from gnnpar.report.emphasis import OTHER, cut, groups_in_colour, short_name, six_parts
from gnnpar.report.formatting import marked
from gnnpar.report.groups import Group
from gnnpar.track.text import counted

Spec = JsonDict
LABELS = {"exposed_wire": "exposed, wire", "exposed_skew": "exposed, skew", "host": "host, off the device"}


def label(group: Group, *, busy: bool = False) -> str:
    """Return two lines for an axis: the strategy, and the settings that distinguish the group."""
    first = group.first
    details = " ".join(filter(None, (first["variant"], group.changed, group.ranks)))
    return f"{escape(marked(first['strategy'], busy))}<br><span style='font-size:10px'>{escape(cut(details))}</span>"


def speedup(groups: Sequence[Group], baseline: str, colour: Mapping[str, str]) -> Spec:
    """Draw a marker per group with its interval, and a dot per block; grey if times do not measure speed."""
    shown = [group for group in groups if group.speedup is not None]
    names = [label(group, busy=group.ratio_busy) for group in shown]
    data: list[Spec] = []
    for i, group in enumerate(shown):
        estimate, tint = group.speedup, colours.GREY if group.timeless else colour[group.first["strategy"]]
        assert estimate is not None
        open_ = "-open" if group.timeless or group.control else ""
        data.append(
            {
                "type": "scatter",
                "mode": "markers",
                "x": list(group.ratios.values()),
                "y": [i] * len(group.ratios),
                "marker": {"color": tint, "size": 5, "opacity": 0.45},
                "hovertemplate": "one block: %{x:.3f}<extra></extra>",
            }
        )
        point: Spec = {
            "type": "scatter",
            "mode": "markers",
            "x": [estimate.value],
            "y": [i],
            "marker": {"color": tint, "size": 11, "symbol": f"diamond{open_}", "line": {"width": 1.5, "color": tint}},
            "hovertemplate": _hover(estimate.value, estimate.low, estimate.high, estimate.n),
        }
        if estimate.low == estimate.low:
            ends = {"array": [estimate.high - estimate.value], "arrayminus": [estimate.value - estimate.low]}
            point["error_x"] = {"type": "data", "symmetric": False, **ends, "color": tint, "thickness": 1.6, "width": 5}
        data.append(point)
    ratios = [r for g in shown for r in g.ratios.values()]
    low, high, ticks = log_axis([*ratios, *(e for g in shown if g.speedup for e in (g.speedup.low, g.speedup.high))])
    layout = _horizontal(names, f"times faster than {escape(baseline)}", high)
    ends = {"type": "log", "range": [math.log10(low), math.log10(high)]}
    layout["xaxis"] |= ends | {"tickvals": ticks, "ticktext": [f"{tick:g}" for tick in ticks]}
    line = {"type": "line", "x0": 1, "x1": 1, "yref": "paper", "y0": 0, "y1": 1, "line": {"width": 1, "dash": "dot"}}
    return {"data": data, "layout": layout | {"shapes": [line]}}


def log_axis(values: Sequence[float]) -> tuple[float, float, list[float]]:
    """Return ends and ticks of a logarithmic axis that holds 1 and all values but NaN."""
    known = [1.0, *(max(value, 1e-300) for value in values if value == value)]
    room = max(1.1, (max(known) / min(known)) ** 0.06)
    low, high = min(known) / room, max(known) * room
    decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    steps = (1, 1.2, 1.5, 2, 3, 5, 7) if high < 4 * low else (1, 2, 3, 5) if len(decades) < 5 else (1,)
    ticks = [step * 10.0**k for k in decades[:: 1 + len(decades) // 10] for step in steps]
    return low, high, [tick for tick in ticks if low <= tick <= high]


def _hover(value: float, low: float, high: float, n: int) -> str:
    interval = f", 95 % [{low:.3f}, {high:.3f}]" if low == low else ""
    return f"{value:.3f}{interval}, {counted(n, 'block')}<extra></extra>"


def stacked(
    groups: Sequence[Group],
    parts_of: Callable[[Group], Mapping[str, float] | None],
    tints: Mapping[str, str],
    quantity: str,
    *,
    timed: bool = False,
) -> Spec | None:
    """Draw stacked bars of at most six parts, with their totals; return None if no group has any."""
    bars = [(group, parts) for group in groups if (parts := parts_of(group)) is not None]
    few = six_parts([parts for _, parts in bars])
    shown = list(zip((group for group, _ in bars), few, strict=True))
    return _bars(shown, {**tints} | {OTHER: colours.OTHER}, quantity, timed=timed)


def _bars(
    bars: Sequence[tuple[Group, Mapping[str, float]]],
    tints: Mapping[str, str],
    quantity: str,
    *,
    timed: bool = False,
) -> Spec | None:
    largest = max((sum(parts.values()) for _, parts in bars), default=0.0)
    if not largest:
        return None
    scale, unit = scale_of(largest, quantity)
    names = [label(group, busy=timed and group.time_busy) for group, _ in bars]
    places = list(range(len(bars)))
    faint = [0.4 if timed and group.timeless else 1.0 for group, _ in bars]
    data: list[Spec] = []
    for part, tint in tints.items():
        values = [parts.get(part, 0.0) / scale for _, parts in bars]
        if any(values):
            data.append(
                {
                    "type": "bar",
                    "orientation": "h",
                    "name": LABELS.get(part, part),
                    "x": values,
                    "y": places,
                    "marker": {"color": tint, "opacity": faint, "line": {"width": 0}},
                    "hovertemplate": f"{LABELS.get(part, part)}: %{{x:.4~g}} {unit}<extra></extra>",
                }
            )
    totals = [sum(parts.values()) / scale for _, parts in bars]
    forms = [" (%.3g)" if timed and group.timeless else " %.3g" for group, _ in bars]
    data.append(
        {
            "type": "scatter",
            "mode": "text",
            "x": totals,
            "y": places,
            "textposition": "middle right",
            "hoverinfo": "skip",
            "cliponaxis": False,
            "text": [form % total for form, total in zip(forms, totals, strict=True)],
        }
    )
    layout = _horizontal(names, unit, largest / scale * 1.2) | {"barmode": "stack", "bargap": 0.42}
    return {"data": data, "layout": layout}


def layers(groups: Sequence[Group]) -> Spec | None:
    """Draw stacked bars, one part per layer; return None if nothing is sent or known."""
    depths = {id(group): curves.layer_bytes(group) for group in groups}
    deepest = max(map(len, depths.values()), default=0)
    tints = {f"layer {k}": colours.SHADES[k % len(colours.SHADES)] for k in range(deepest)}

    def parts(group: Group) -> dict[str, float] | None:
        return dict(zip(tints, depths[id(group)], strict=False)) or None

    return _bars([(group, named) for group in groups if (named := parts(group))], tints, "bytes")


def accuracy(groups: Sequence[Group], colour: Mapping[str, str], axis: str) -> Spec | None:
    """Draw the validation metric over `axis` (seconds, bytes). At most six groups are in colour, with a label and a
    thin line for each run; other groups show the mean only, in grey."""
    drawn = [(group, runs) for group in groups if (runs := curves.curves_of(group, axis))]
    if not drawn:
        return None
    timed = [pair for pair in drawn if axis != "seconds" or not pair[0].timeless] or drawn
    largest = max(run.along(axis)[-1] for _, runs in timed for run in runs)
    scale, unit = scale_of(largest, axis)
    end = (largest / scale or 1.0) * 1.04
    in_colour = groups_in_colour([group for group, _ in drawn], [s for s, c in colour.items() if c != colours.GREY])
    data: list[Spec] = []
    labels: list[Spec] = []
    for group, runs in sorted(drawn, key=lambda pair: pair[0] in in_colour):  # draw grey ones first
        strategy = group.first["strategy"]
        pale = axis == "seconds" and group.timeless
        tint = colours.GREY if pale or group not in in_colour else colour[strategy]
        variants = [g for g, _ in drawn if g.first["strategy"] == strategy]
        line = {"color": tint, "dash": colours.DASHES[variants.index(group) % len(colours.DASHES)]}
        mean = curves.mean_curve(runs)
        if mean is not None and len(runs) > 1 and group in in_colour:
            data += [_line(run, axis, scale, group, line | {"width": 1}, opacity=0.25) for run in runs]
        wide = {"width": 2.4 if group in in_colour else 1.3}
        for k, run in enumerate([mean] if mean is not None else runs):
            data.append(_line(run, axis, scale, group, line | wide, pale=pale))
            inside = [(x / scale, y) for x, y in zip(run.along(axis), run.val, strict=True) if x / scale <= end]
            if k == 0 and inside:  # a grey curve may leave the picture
                at = {"x": inside[-1][0], "y": inside[-1][1], "strategy": strategy, "shown": group in in_colour}
                labels.append({"text": escape(short_name(group, [g for g, _ in drawn])), "colour": tint, **at})
    lows, highs = zip(*((min(run.val), max(run.val)) for _, runs in drawn for run in runs), strict=True)
    target = next((group.target for group in groups if group.target is not None), None)
    shown = [min(lows), max(highs), *([100 * target] if target is not None else [])]
    room = 0.04 * (max(shown) - min(shown) or 1.0)
    layout: Spec = {
        "height": 360,
        "xaxis": {
            "title": {"text": {"seconds": f"training time, {unit}", "bytes": f"sent, {unit}"}[axis]},
            "range": [0, end],
        },
        "yaxis": {
            "title": {"text": f"{escape(groups[0].first['metric'] or 'metric')} on validation, %"},
            "range": [min(shown) - room, max(shown) + room],
        },
        "showlegend": False,
    }
    if target is not None:
        ends = {"xref": "paper", "x0": 0, "x1": 1, "y0": 100 * target, "y1": 100 * target}
        layout["shapes"] = [{"type": "line", **ends, "line": {"width": 1, "dash": "dot"}}]
    return {"data": data, "layout": layout, "labels": labels}


def _line(
    curve: Curve, axis: str, scale: float, group: Group, line: Spec, *, opacity: float = 1.0, pale: bool = False
) -> Spec:
    name = marked(escape(group.name), axis == "seconds" and group.time_busy) + (" (no speed)" if pale else "")
    return {
        "type": "scatter",
        "mode": "lines",
        "x": [value / scale for value in curve.along(axis)],
        "y": curve.val,
        "line": line,
        "opacity": opacity,
        "name": name,
        "meta": {"strategy": group.first["strategy"]},
        "hoverinfo": "all" if opacity == 1.0 else "skip",
        "hovertemplate": "%{y:.2f} % at %{x:.4~g}<extra>" + name + "</extra>" if opacity == 1.0 else None,
    }


def scale_of(largest: float, quantity: str) -> tuple[float, str]:
    """Return the divisor and the unit for the largest value."""
    units = {
        "seconds": ((3600.0, "h"), (60.0, "min"), (1.0, "s"), (1e-3, "ms"), (1e-6, "µs")),
        "bytes": ((2.0**30, "GiB"), (2.0**20, "MiB"), (2.0**10, "KiB"), (1.0, "B")),
    }[quantity]
    if quantity == "seconds" and 60 <= largest < 600:
        return 1.0, "s"
    return next((unit for unit in units if largest >= unit[0]), units[-1])


def _horizontal(names: Sequence[str], title: str, highest: float) -> Spec:
    return {
        "height": 44 * len(names) + 62,
        "xaxis": {"title": {"text": title}, "range": [0, highest]},
        "yaxis": {
            "tickvals": list(range(len(names))),
            "ticktext": list(names),
            "range": [len(names) - 0.45, -0.55],
            "showgrid": False,
            "zeroline": False,
        },
        "margin": {"l": 8, "r": 8, "t": 4, "b": 40},
        "showlegend": False,  # the page has one for all pictures of a section
    }
