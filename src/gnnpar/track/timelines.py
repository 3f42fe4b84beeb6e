"""Timelines of ranks: a Chrome trace for chrome://tracing and ui.perfetto.dev, and an SVG picture of a schedule.

Trace Event Format: complete events (ph X), times in microseconds. One process per rank, one thread per row: compute,
send, receive, phases. Spans that overlap inside a row get separate rows, because viewers nest overlapping spans.
"""

from __future__ import annotations

import html
import math
import re
from collections.abc import Callable, Iterable, Iterator, Sequence

from gnnpar.files import JsonDict

Row = tuple[int, str, float, float]  # rank, action text (F3@1) or phase, start seconds, end seconds
ROWS = ("compute", "send", "receive", "phases")
_ROW_OF = {"F": "compute", "B": "compute", "S": "send", "R": "receive"}  # first letter of an action: F3@1, SF3@1, RF3@1
_LANES = 100  # thread ids of a row

_ACTION = re.compile(r"([SR]?)([FB])(\d+)@(\d+)")
_WAITS = ("bubble", "exposed", "exposed_wire", "exposed_skew")  # phases of the clock in which a rank waits
_LEFT, _RIGHT, _WIDTH = 64, 16, 1100
_LANE, _BAR, _HEAD, _AXIS = 34, 22, 26, 34  # heights in pixels
_INK, _FAINT, _WAIT = "#1f2933", "#9aa5b1", "#e4e7eb"


def row_of(text: str) -> str:
    """Return the row of an action or phase, of ROWS."""
    return _ROW_OF.get(text[:1], "phases") if "@" in text else "phases"


def chrome_trace(rows: Iterable[Row], facts: JsonDict, row_of: Callable[[str], str] = row_of) -> JsonDict:
    """Return the trace as data. facts: for its otherData."""
    events: list[JsonDict] = []
    free: dict[tuple[int, str], list[float]] = {}
    for rank, text, start, end in sorted(rows, key=lambda row: (row[0], row[2], -row[3])):
        row = row_of(text)
        lanes = free.setdefault((rank, row), [])
        lane = next((i for i, until in enumerate(lanes) if until <= start), len(lanes))
        lanes[lane : lane + 1] = [max(start, end)]
        event = {"name": text, "cat": row, "ph": "X", "pid": rank, "tid": ROWS.index(row) * _LANES + lane}
        events.append(event | {"ts": start * 1e6, "dur": max(0.0, end - start) * 1e6})
    return {"traceEvents": [*_names(free), *events], "displayTimeUnit": "ms", "otherData": facts}


def _names(free: dict[tuple[int, str], list[float]]) -> Iterator[JsonDict]:
    """Yield the metadata events with the names and the order of ranks and rows."""

    def named(kind: str, rank: int, tid: int, name: str, index: int) -> Iterator[JsonDict]:
        place: JsonDict = {"ph": "M", "pid": rank, "tid": tid}
        yield {"name": f"{kind}_name", **place, "args": {"name": name}}
        yield {"name": f"{kind}_sort_index", **place, "args": {"sort_index": index}}

    for rank in sorted({rank for rank, _ in free}):
        yield from named("process", rank, 0, f"rank {rank}", rank)
    for (rank, row), lanes in sorted(free.items()):
        for lane in range(len(lanes)):
            tid = ROWS.index(row) * _LANES + lane
            yield from named("thread", rank, tid, row + (f" {lane + 1}" if lane else ""), tid)


def schedule_picture(timelines: dict[str, Sequence[Row]]) -> str:
    """Return an SVG document: timelines by title, on one time axis, with a lane per rank. Forwards are blue, backwards
    orange, darker for later slots; waiting is grey; messages are thin lines below. Raise ValueError without rows."""
    if not (rows := [row for timeline in timelines.values() for row in timeline]):
        raise ValueError("a picture of no actions: every timeline is empty")
    slots = 1 + max((int(action[3]) for row in rows if (action := _ACTION.fullmatch(row[1]))), default=0)
    scale = (_WIDTH - _LEFT - _RIGHT) / (max(end for *_, end in rows) or 1.0)  # pixels per second
    body, top = [], 8
    for title, timeline in timelines.items():
        ranks = sorted({row[0] for row in timeline})
        body.append(f'<text x="{_LEFT}" y="{top + 14}" font-weight="bold">{html.escape(title)}</text>')
        for number, rank in enumerate(ranks):
            lane = [row for row in timeline if row[0] == rank]
            body += _lane(rank, lane, top + _HEAD + number * _LANE, scale, slots)
        top += _HEAD + len(ranks) * _LANE + 10
    body += [*_axis(top, scale), *_legend(top + _AXIS)]
    height = top + _AXIS + 30
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{_WIDTH}" height="{height}" viewBox="0 0 {_WIDTH} {height}" '
        f'font-family="sans-serif" font-size="11" fill="{_INK}">'
    )
    return "\n".join([head, _rect(0, 0, _WIDTH, height, "#ffffff"), *body, "</svg>", ""])


def _lane(rank: int, rows: list[Row], y: int, scale: float, slots: int) -> Iterator[str]:
    """Yield the drawing of a rank: computing, then waits (over the action that they are part of), then sends."""
    yield _text(_LEFT - 8, y + 15, f"rank {rank}", "end")
    waits, messages = list[str](), list[str]()
    for _, text, start, end in rows:
        x, width = _LEFT + start * scale, max(0.4, (end - start) * scale)
        title = f"<title>{html.escape(text)}  {start * 1e3:.3f} to {end * 1e3:.3f} ms</title>"
        action = _ACTION.fullmatch(text)
        if text in _WAITS:
            waits.append(_rect(x, y, width, _BAR, _WAIT, title))
        elif action is not None and action[1] == "S":
            messages.append(_rect(x, y + _BAR + 2, width, 3, _colour(action[2], int(action[3]), slots), title))
        elif action is not None and not action[1]:
            slot = int(action[3])
            yield _rect(x, y, width, _BAR, _colour(action[2], slot, slots), title)
            if width >= 8 + 7 * len(action[3]):
                yield _text(x + width / 2, y + 15, action[3], fill="#ffffff" if slot > slots / 2 else _INK)
    yield from (*waits, *messages)
    yield f'<path d="M{_LEFT} {y + _BAR + 8.5}H{_WIDTH - _RIGHT}" stroke="{_WAIT}"/>'


def _rect(x: float, y: float, width: float, height: float, fill: str, inner: str = "") -> str:
    """Return a rectangle with a thin white edge, which separates neighbours."""
    place = f'x="{x:.2f}" y="{y}" width="{width:.2f}" height="{height}"'
    return f'<rect {place} fill="{fill}" stroke="#ffffff" stroke-width="0.5">{inner}</rect>'


def _text(x: float, y: float, text: str, anchor: str = "middle", fill: str = _INK) -> str:
    return f'<text x="{x:.1f}" y="{y}" text-anchor="{anchor}" fill="{fill}">{text}</text>'


def _colour(direction: str, slot: int, slots: int) -> str:
    """Return blue for forwards, orange for backwards, from light to dark over the slots."""
    light, dark = {"F": ((189, 215, 238), (31, 97, 157)), "B": ((252, 216, 180), (184, 84, 14))}[direction]
    share = slot / max(1, slots - 1)
    return "#" + "".join(f"{round(a + (b - a) * min(1.0, share)):02x}" for a, b in zip(light, dark, strict=True))


def _axis(top: float, scale: float) -> Iterator[str]:
    """Yield the axis in milliseconds, with a tick at 1, 2 or 5 times a power of ten."""
    until = (_WIDTH - _LEFT - _RIGHT) / scale * 1e3
    power = 10.0 ** math.floor(math.log10(until / 8))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= until / 8 * (1 - 1e-9))
    for number in range(int(until / step + 1e-9) + 1):
        x = _LEFT + number * step / 1e3 * scale
        yield f'<path d="M{x:.1f} {top}v5" stroke="{_FAINT}"/>'
        yield _text(x, top + 18, f"{number * step:g}")
    yield _text(_LEFT - 8, top + 18, "ms", "end")


def _legend(top: float) -> Iterator[str]:
    words = (0, "forward", _colour("F", 1, 2)), (110, "backward", _colour("B", 1, 2)), (220, "waiting", _WAIT)
    for x, word, colour in words:
        yield _rect(_LEFT + x, top + 2, 14, 12, colour)
        yield _text(_LEFT + x + 20, top + 12, word, "start")
    yield _text(_LEFT + 330, top + 12, "numbers are slots; thin lines below: sends", "start")
