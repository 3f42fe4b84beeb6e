"""Formatted figures, the same in the terminal, the exports and the page."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

from gnnpar.files import JsonObject
from gnnpar.report.groups import Group, Median
from gnnpar.report.runs import by, no_speed, times_of
from gnnpar.report.statistics import Estimate
from gnnpar.track.console import num_bytes, seconds

NOTHING = "-"
BUSY = "busy: other programs used cores that the run, or its baseline, needed when it began"
GREY = "(times in parentheses) more threads than cores, or ranks as threads: no statement on speed"


def interval(estimate: Estimate | None, *, signed: bool = False) -> str:
    """Return '74.31 ± 0.42' for a symmetric interval, else only the value."""
    if estimate is None:
        return NOTHING
    half = (estimate.high - estimate.low) / 2
    places = _decimals(half)
    value = f"{estimate.value:{'+' if signed else ''}.{places}f}"
    return value if half != half else f"{value} ± {half:.{places}f}"


def _decimals(half: float) -> int:
    """Return the decimals that an interval of this half width supports: two of its digits, at most three decimals."""
    return 1 if half != half or half >= 1 else 2 if half >= 0.1 else 3 if half > 0 else 2


def ratio(estimate: Estimate | None) -> str:
    """Return '1.52 [1.40, 1.63]': the interval of a geometric mean is asymmetric."""
    if estimate is None:
        return NOTHING
    if estimate.low != estimate.low:
        return f"{estimate.value:.2f}"
    return f"{estimate.value:.2f} [{estimate.low:.2f}, {estimate.high:.2f}]"


def to_target(value: Median | None, unit: str) -> str:
    """Return seconds ('s') or bytes ('B') to a target: '3.1 s', '3.1 s to 3.3 s' between bounds, '> 3.1 s' if half of
    the runs never reached it."""
    if value is None:
        return NOTHING
    text = seconds if unit == "s" else num_bytes
    if value.high == math.inf:
        return f"> {text(value.low)}"
    low, high = text(value.low), text(value.high)
    return low if low == high else f"{low} to {high}"


def marked(text: str, busy: bool) -> str:
    """Mark a number from runs on a busy machine only."""
    return f"{text} busy" if busy and text != NOTHING else text


def epoch_of(group: Group) -> str:
    text = known(group.epoch_seconds and group.epoch_seconds.value, seconds)
    return bracketed(marked(text, group.time_busy), group.timeless)


def speedup_of(group: Group) -> str:
    return marked(ratio(group.speedup), group.ratio_busy)


def speedup_parts(group: Group) -> tuple[str, str]:
    """Return the speed-up and its interval."""
    value, _, interval = ratio(group.speedup).partition(" ")
    return bracketed(marked(value, group.ratio_busy), group.timeless), interval


def seconds_to_target(group: Group) -> str:
    return marked(to_target(group.seconds_to_target, "s"), group.time_busy)


def race(group: Group, rivals: Sequence[Group]) -> str:
    """Return '2 of 3 to target, 3.1 s; graph_parallel 1.2 s' if another group reaches the target earlier, else ''."""
    ends = {g: g.seconds_to_target for g in rivals if g.seconds_to_target is not None and not g.timeless}
    before = [g for g in ends if group in ends and ends[g].high < ends[group].low]
    if not before:
        return ""
    first = min(before, key=lambda g: ends[g].high)
    place = f"{len(before) + 1} of {len(ends)} to target"
    return f"{place}, {seconds_to_target(group)}; {first.title} {seconds_to_target(first)}"


def bracketed(text: str, grey: bool) -> str:
    return f"({text})" if grey and text != NOTHING else text


def known(value: float | None, text: Callable[[float], str] = num_bytes) -> str:
    return NOTHING if value is None else text(value)


def runs_of(group: Group) -> str:
    """Return '5', or '3 of 5' if some did not complete."""
    done, total = len(group.completed), len(group.rows)
    return str(total) if done == total else f"{done} of {total}"


def verdict_of(group: Group) -> str:
    """Return the verdict on the group, with that on the negative control if it invalidates the claim."""
    if group.control:
        return f"control: {group.verdict or 'unpaired'}"
    if group.verdict == "not inferior" and group.control_verdict == "not inferior":
        return "not inferior, nor is the control"
    return group.verdict or NOTHING


def blanks(rows: Sequence[JsonObject], groups: Sequence[Group] = ()) -> dict[tuple[str, str], list[str]]:
    """Return ("ratio" or "difference", reason) -> names with blank cells, in the order of the footnotes."""
    without = [row for row in rows if row["ratio"] is None and row["status"] == "completed"]
    found = [(("ratio", row["why_no_ratio"]), row) for row in without]
    found += [(("difference", g.why_no_difference), g.first) for g in groups if g.why_no_difference and g.completed]
    same = by(found, lambda pair: pair[0])
    return {why: [f"{row['strategy']}/{row['model']}" for _, row in pairs] for why, pairs in same.items()}


# columns of a table of runs: heading, column of `table_rows`, whether it is text
RUN_COLUMNS = (
    ("strategy", "strategy", True),
    ("model", "model", True),
    ("dataset", "dataset", True),
    ("seed", "seed", False),
    ("block", "block", False),
    ("ranks", "world_size", False),
    ("threads", "threads_per_rank", False),
    ("epoch", "epoch_seconds", False),
    ("speed-up", "ratio", False),
    ("sent/epoch", "bytes_per_epoch", False),
    ("peak/rank", "memory_peak_bytes", False),
    ("last val", "val", False),
    ("last test", "test", False),
    ("test at best val", "test_at_best_val", False),
    ("gradient cosine", "gradient_cosine", False),
    ("times", "provenance", True),
    ("status", "status", True),
)


def run_text(row: JsonObject, column: str) -> str:
    """Return the cell of a run."""
    value = row[column]
    if value is None or value == "":
        return NOTHING
    if column == "strategy":
        return row_name(row)
    if column == "provenance":
        return times_of(row)
    if column == "epoch_seconds":
        return bracketed(marked(seconds(value), row["busy"]), no_speed(row))
    if column == "ratio":
        text = f"{value:.2f}" + "?" * (row["why_no_ratio"] == "unfair")
        return bracketed(marked(text, row["ratio_busy"]), no_speed(row))
    if column in ("bytes_per_epoch", "memory_peak_bytes"):
        return num_bytes(value)
    return f"{value:.4f}" if isinstance(value, float) else str(value)


def row_name(row: JsonObject) -> str:
    return " ".join(filter(None, (row["strategy"], row["variant"], row["settings"])))


# columns of a table of groups: heading -> whether it is text, the cell of a group
GROUP_COLUMNS: Mapping[str, tuple[bool, Callable[[Group], str]]] = {
    "strategy": (True, lambda group: group.title),
    **{name: (True, lambda group, name=name: group.first[name]) for name in ("exactness", "model", "dataset")},
    "ranks": (False, lambda group: group.ranks),
    "runs": (False, runs_of),
    "epoch": (False, epoch_of),
    "speed-up": (False, lambda group: bracketed(speedup_of(group), group.timeless)),
    "sent/epoch": (False, lambda group: known(group.mean("bytes_per_epoch"))),
    "peak/rank": (False, lambda group: known(group.peak_bytes)),
    "test at best val, %": (False, lambda group: interval(group.accuracy)),
    "difference": (False, lambda group: interval(group.difference, signed=True)),
    "verdict": (True, verdict_of),
    "control": (True, lambda g: NOTHING if g.control or g.verdict == "baseline" else g.control_verdict),
    "to target": (False, lambda group: bracketed(seconds_to_target(group), group.timeless)),
    "sent to target": (False, lambda group: to_target(group.bytes_to_target, "B")),
    "cosine": (False, lambda group: known(group.mean("gradient_cosine"), "{:.4f}".format)),
    "error": (False, lambda group: known(group.mean("gradient_error"), "{:.2g}".format)),
    "times": (True, lambda group: times_of(group.first)),
}


def group_cells(group: Group) -> dict[str, str]:
    return {heading: text_of(group) for heading, (_, text_of) in GROUP_COLUMNS.items()}
