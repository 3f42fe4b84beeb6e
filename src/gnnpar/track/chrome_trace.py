"""A timeline as a Chrome trace: JSON for chrome://tracing and ui.perfetto.dev.

Trace Event Format: complete events (ph X), times in microseconds. One process per rank, one thread per row: compute,
send, receive, phases. Spans that overlap inside a row get separate rows, because viewers nest overlapping spans.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from gnnpar.files import JsonDict, write_json_atomic

Row = tuple[int, str, float, float]  # rank, action text (F3@1) or phase, start seconds, end seconds
ROWS = ("compute", "send", "receive", "phases")
_ROW_OF = {"F": "compute", "B": "compute", "S": "send", "R": "receive"}
_LANES = 100  # thread ids of a row


def row_of(text: str) -> str:
    """Return the row of an action: F3@1 compute, SF3@1 send, RF3@1 receive; a phase of the clock: phases."""
    return _ROW_OF.get(text[:1], "phases") if "@" in text else "phases"


def chrome_trace(rows: Iterable[Row], facts: JsonDict | None = None) -> JsonDict:
    """Return the trace as data. facts: for its otherData."""
    events: list[JsonDict] = []
    free: dict[tuple[int, str], list[float]] = {}
    for rank, text, start, end in sorted(rows, key=lambda row: (row[0], row[2], -row[3])):
        row = row_of(text)
        lanes = free.setdefault((rank, row), [])
        lane = next((i for i, until in enumerate(lanes) if until <= start), len(lanes))
        lanes[lane : lane + 1] = [max(start, end)]
        events.append(
            {
                "name": text,
                "cat": row,
                "ph": "X",
                "pid": rank,
                "tid": ROWS.index(row) * _LANES + lane,
                "ts": start * 1e6,
                "dur": max(0.0, end - start) * 1e6,
            }
        )
    return {"traceEvents": [*_names(free), *events], "displayTimeUnit": "ms", "otherData": facts or {}}


def _names(free: dict[tuple[int, str], list[float]]) -> Iterable[JsonDict]:
    """Yield the metadata events with the names and the order of ranks and rows."""
    for rank in sorted({rank for rank, _ in free}):
        yield _meta("process_name", rank, 0, {"name": f"rank {rank}"})
        yield _meta("process_sort_index", rank, 0, {"sort_index": rank})
    for (rank, row), lanes in sorted(free.items()):
        for lane in range(len(lanes)):
            tid = ROWS.index(row) * _LANES + lane
            yield _meta("thread_name", rank, tid, {"name": row + (f" {lane + 1}" if lane else "")})
            yield _meta("thread_sort_index", rank, tid, {"sort_index": tid})


def _meta(name: str, rank: int, tid: int, args: JsonDict) -> JsonDict:
    return {"name": name, "ph": "M", "pid": rank, "tid": tid, "args": args}


def save_trace(file: Path, rows: Iterable[Row], facts: JsonDict | None = None) -> None:
    write_json_atomic(file, chrome_trace(rows, facts), indent=None)
