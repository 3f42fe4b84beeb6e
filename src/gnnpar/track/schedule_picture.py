"""A schedule as an SVG picture: panels of timelines on one time axis. A lane per rank: forwards blue, backwards orange,
darker for later slots; waiting grey; messages as thin lines below."""

from __future__ import annotations

import html
import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

Row = tuple[int, str, float, float]  # rank, action text (F3@1) or phase, start seconds, end seconds
_ACTION = re.compile(r"([SR]?)([FB])(\d+)@(\d+)")
_WAITS = ("bubble", "exposed", "exposed_wire", "exposed_skew")  # phases of the clock in which a rank waits
_LEFT, _RIGHT, _WIDTH = 64, 16, 1100
_LANE, _BAR, _HEAD, _AXIS = 34, 22, 26, 34  # heights in pixels
_INK, _FAINT, _WAIT = "#1f2933", "#9aa5b1", "#e4e7eb"


@dataclass(frozen=True)
class Panel:
    """One timeline and the line above it."""

    title: str
    rows: Sequence[Row]


def schedule_picture(panels: Sequence[Panel]) -> str:
    """Return an SVG document. Raise ValueError if all panels are empty."""
    drawn = [panel for panel in panels if panel.rows]
    if not drawn:
        raise ValueError("a picture of no actions: every panel is empty")
    numbers = [int(m[3]) for p in drawn for row in p.rows if (m := _ACTION.fullmatch(row[1]))]
    slots = 1 + max(numbers, default=0)
    until = max(row[3] for panel in drawn for row in panel.rows) or 1.0
    body, top = [], 8
    for panel in drawn:
        lines, height = _panel(panel, top, until, slots)
        body += lines
        top += height
    body += _axis(top, until)
    body += _legend(top + _AXIS)
    height = top + _AXIS + 30
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{_WIDTH}" height="{height}" viewBox="0 0 {_WIDTH} {height}" '
        'font-family="sans-serif" font-size="11">'
    )
    return "\n".join([head, f'<rect width="{_WIDTH}" height="{height}" fill="#ffffff"/>', *body, "</svg>", ""])


def _panel(panel: Panel, top: int, until: float, slots: int) -> tuple[list[str], int]:
    ranks = sorted({row[0] for row in panel.rows})
    lines = [f'<text x="{_LEFT}" y="{top + 14}" font-weight="bold" fill="{_INK}">{html.escape(panel.title)}</text>']
    for number, rank in enumerate(ranks):
        y = top + _HEAD + number * _LANE
        lines.append(f'<text x="{_LEFT - 8}" y="{y + 15}" text-anchor="end" fill="{_INK}">rank {rank}</text>')
        mine = [row for row in panel.rows if row[0] == rank]
        for kind in ("compute", "wait", "message"):  # draw waits inside an action over it
            lines += [line for row in mine if (line := _mark(row, kind, y, until, slots))]
        right = _x(until, until)
        lines.append(f'<path d="M{_LEFT} {y + _BAR + 8.5}H{right:.1f}" stroke="{_WAIT}" stroke-width="1" fill="none"/>')
    return lines, _HEAD + len(ranks) * _LANE + 10


def _mark(row: Row, kind: str, y: float, until: float, slots: int) -> str:
    """Return the drawing of a row, or '' if it is of another kind."""
    _, text, start, end = row
    action = _ACTION.fullmatch(text)
    x, width = _x(start, until), max(0.4, _x(end, until) - _x(start, until))
    title = f"<title>{html.escape(text)}  {start * 1e3:.3f} to {end * 1e3:.3f} ms</title>"
    if kind == "wait" and text in _WAITS:
        return f'<rect x="{x:.2f}" y="{y}" width="{width:.2f}" height="{_BAR}" fill="{_WAIT}">{title}</rect>'
    if action is None:
        return ""
    message, direction, slot, _ = action.groups()
    colour = _colour(direction, int(slot), slots)
    if kind == "message" and message == "S":
        return f'<rect x="{x:.2f}" y="{y + _BAR + 2}" width="{width:.2f}" height="3" fill="{colour}">{title}</rect>'
    if kind != "compute" or message:
        return ""
    bar = (
        f'<rect x="{x:.2f}" y="{y}" width="{width:.2f}" height="{_BAR}" fill="{colour}" stroke="#ffffff" '
        f'stroke-width="0.5">{title}</rect>'
    )
    if width < 8 + 7 * len(slot):
        return bar
    ink = "#ffffff" if int(slot) > slots / 2 else _INK
    return f'{bar}<text x="{x + width / 2:.1f}" y="{y + 15}" text-anchor="middle" fill="{ink}">{slot}</text>'


def _colour(direction: str, slot: int, slots: int) -> str:
    """Return blue for forwards, orange for backwards, from light to dark over the slots."""
    light, dark = {"F": ((189, 215, 238), (31, 97, 157)), "B": ((252, 216, 180), (184, 84, 14))}[direction]
    share = slot / max(1, slots - 1)
    return "#" + "".join(f"{round(a + (b - a) * min(1.0, share)):02x}" for a, b in zip(light, dark, strict=True))


def _x(seconds: float, until: float) -> float:
    return _LEFT + (_WIDTH - _LEFT - _RIGHT) * seconds / until


def _axis(top: float, until: float) -> Iterable[str]:
    """Yield the axis in milliseconds, with ticks at round numbers."""
    step = _round(until * 1e3 / 8)
    for number in range(int(until * 1e3 / step) + 1):
        x = _x(number * step / 1e3, until)
        yield f'<path d="M{x:.1f} {top}v5" stroke="{_FAINT}"/>'
        yield f'<text x="{x:.1f}" y="{top + 18}" text-anchor="middle" fill="{_INK}">{number * step:g}</text>'
    yield f'<text x="{_LEFT - 8}" y="{top + 18}" text-anchor="end" fill="{_INK}">ms</text>'


def _round(value: float) -> float:
    """Return 1, 2 or 5 times a power of ten, not below `value`."""
    power = 10.0 ** math.floor(math.log10(value))
    return next(factor * power for factor in (1, 2, 5, 10) if factor * power >= value * (1 - 1e-9))


def _legend(top: float) -> Iterable[str]:
    words = (("forward", _colour("F", 1, 2)), ("backward", _colour("B", 1, 2)), ("waiting", _WAIT))
    for number, (word, colour) in enumerate(words):
        x = _LEFT + 110 * number
        yield f'<rect x="{x}" y="{top + 2}" width="14" height="12" fill="{colour}"/>'
        yield f'<text x="{x + 20}" y="{top + 12}" fill="{_INK}">{word}</text>'
    x = _LEFT + 110 * len(words)
    yield f'<text x="{x}" y="{top + 12}" fill="{_INK}">numbers are slots; thin lines below: sends</text>'
