"""Figures as people read them, the same in the terminal, the exports and the page."""

from __future__ import annotations

import math
from collections.abc import Sequence

from gnnpar.files import JsonObject
from gnnpar.report.groups import Group
from gnnpar.report.runs import no_speed
from gnnpar.report.statistics import Estimate
from gnnpar.report.targets import Median
from gnnpar.track.console import num_bytes, seconds

NOTHING = "-"
BUSY = "busy: other programs used cores that the run, or its baseline, needed when it began"
GREY = "(times in parentheses) more threads than cores, or ranks as threads: no statement on speed"


def digits_of(half: float) -> int:
    """Decimals that an interval of this half width supports: two of its figures, at most three decimals."""
    return 1 if half != half or half >= 1 else 2 if half >= 0.1 else 3 if half > 0 else 2


def interval(estimate: Estimate | None, *, decimals: int | None = None, signed: bool = False) -> str:
    """'74.31 +- 0.42' of a symmetric interval; the value alone where one sample gave none."""
    if estimate is None:
        return NOTHING
    half = (estimate.high - estimate.low) / 2
    places = digits_of(half) if decimals is None else decimals
    sign = "+" if signed else ""
    value = f"{estimate.value:{sign}.{places}f}"
    return value if half != half else f"{value} ± {half:.{places}f}"


def ratio(estimate: Estimate | None) -> str:
    """'1.52 [1.40, 1.63]': the interval of a geometric mean is not symmetric."""
    if estimate is None:
        return NOTHING
    if estimate.low != estimate.low:
        return f"{estimate.value:.2f}"
    return f"{estimate.value:.2f} [{estimate.low:.2f}, {estimate.high:.2f}]"


def to_target(value: Median | None, unit: str) -> str:
    """Seconds ('s') or bytes ('B') to a target: '3.1 s', '3.1 s to 3.3 s' where only bounds are known, '> 3.1 s' where
    half of the runs never reached it."""
    if value is None:
        return NOTHING
    text = seconds if unit == "s" else num_bytes
    if value.high == math.inf:
        return f"> {text(value.low)}"
    low, high = text(value.low), text(value.high)
    return low if low == high else f"{low} to {high}"


def marked(text: str, busy: bool) -> str:
    """With the mark of a number behind which there are disturbed runs alone."""
    return f"{text} busy" if busy and text != NOTHING else text


def time_of(group: Group) -> str:
    return NOTHING if group.epoch_seconds is None else marked(seconds(group.epoch_seconds.value), group.time_busy)


def speedup_of(group: Group) -> str:
    return marked(ratio(group.speedup), group.ratio_busy)


def race(group: Group, rivals: Sequence[Group]) -> str:
    """'2 of 3 to target, 3.1 s; graph_parallel 1.2 s' where another group reaches the target before; else nothing."""
    known = [(g.seconds_to_target, g) for g in rivals if g.seconds_to_target is not None and not g.timeless]
    mine = next((ends.low for ends, g in known if g is group), 0.0)
    before = [(ends.high, g) for ends, g in known if ends.high < mine]
    if not before:
        return ""
    first = min(before, key=lambda pair: pair[0])[1]
    own, best = (marked(to_target(g.seconds_to_target, "s"), g.time_busy) for g in (group, first))
    return f"{len(before) + 1} of {len(known)} to target, {own}; {first.title} {best}"


def greyed(text: str, group: Group) -> str:
    return bracketed(text, group.timeless)


def bracketed(text: str, grey: bool) -> str:
    return f"({text})" if grey and text != NOTHING else text


def row_name(row: JsonObject) -> str:
    return " ".join(filter(None, (row["strategy"], row["variant"], row["settings"])))


def row_time(row: JsonObject) -> str:
    text = NOTHING if row["epoch_seconds"] is None else seconds(row["epoch_seconds"])
    return bracketed(marked(text, row["busy"]), no_speed(row))


def row_ratio(row: JsonObject) -> str:
    text = NOTHING if row["ratio"] is None else f"{row['ratio']:.2f}" + "?" * (row["why_no_ratio"] == "unfair")
    return bracketed(marked(text, row["ratio_busy"]), no_speed(row))


def size(value: float | None) -> str:
    return NOTHING if value is None else num_bytes(value)


def runs_of(group: Group) -> str:
    """'5', or '3 of 5' where some did not complete."""
    done, total = len(group.completed), len(group.rows)
    return str(total) if done == total else f"{done} of {total}"


def verdict_of(group: Group) -> str:
    """The verdict on the group, with that on the negative control where it takes the claim away."""
    if group.control:
        return f"control: {group.verdict or 'unpaired'}"
    if group.verdict == "not inferior" and group.control_verdict == "not inferior":
        return "not inferior, nor is the control"
    return group.verdict or NOTHING


def fidelity_of(group: Group) -> tuple[str, str]:
    """Mean cosine and relative error of the gradient."""
    cells = []
    for name, form in (("gradient_cosine", ".4f"), ("gradient_error", ".2g")):
        values = [row[name] for row in group.rows if row["status"] == "completed" and row[name] is not None]
        cells.append(format(sum(values) / len(values), form) if values else NOTHING)
    return cells[0], cells[1]


def blanks(rows: Sequence[JsonObject], groups: Sequence[Group] = ()) -> dict[tuple[str, str], list[str]]:
    """("ratio" or "difference", why there is none) -> whose cells are blank. Footnotes are numbered in this order."""
    found: dict[tuple[str, str], list[str]] = {}
    for row in rows:
        if row["ratio"] is None and row["status"] == "completed":
            found.setdefault(("ratio", row["why_no_ratio"]), []).append(f"{row['strategy']}/{row['model']}")
    for group in groups:
        if group.why_no_difference and group.completed:
            name = f"{group.first['strategy']}/{group.first['model']}"
            found.setdefault(("difference", group.why_no_difference), []).append(name)
    return found


# columns of a table of runs: heading, column of rows.COLUMNS, is it text?
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


def times_of(row: JsonObject) -> str:
    return f"{row['provenance']} {row['links']}".strip()


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
        return row_time(row)
    if column == "ratio":
        return row_ratio(row)
    if column in ("bytes_per_epoch", "memory_peak_bytes"):
        return num_bytes(value)
    return f"{value:.4f}" if isinstance(value, float) else str(value)


# columns of a grouped table: heading -> is it text?
HEADINGS = {
    "strategy": True,
    "exactness": True,
    "model": True,
    "dataset": True,
    "ranks": False,
    "runs": False,
    "epoch": False,
    "speed-up": False,
    "sent/epoch": False,
    "peak/rank": False,
    "test at best val, %": False,
    "difference": False,
    "verdict": True,
    "control": True,
    "to target": False,
    "sent to target": False,
    "cosine": False,
    "error": False,
    "times": True,
}


def group_cells(group: Group) -> list[str]:
    """The texts below HEADINGS."""
    first = group.first
    memory = [row["memory_peak_bytes"] for row in group.rows if row["memory_peak_bytes"] is not None]
    sent = [row["bytes_per_epoch"] for row in group.rows if row["status"] == "completed"]
    return [
        group.title,
        first["exactness"],
        first["model"],
        first["dataset"],
        f"{first['world_size']}x{first['threads_per_rank']}",
        runs_of(group),
        greyed(time_of(group), group),
        greyed(speedup_of(group), group),
        size(sum(sent) / len(sent) if sent else None),
        size(max(memory) if memory else None),
        interval(group.accuracy),
        interval(group.difference, signed=True),
        verdict_of(group),
        NOTHING if group.control or group.verdict == "baseline" else group.control_verdict,
        greyed(marked(to_target(group.seconds_to_target, "s"), group.time_busy), group),
        to_target(group.bytes_to_target, "B"),
        *fidelity_of(group),
        times_of(first),
    ]


def constant_columns(groups: Sequence[Group]) -> dict[str, str]:
    """Columns of names that say the same in every one of several rows: one line beside the table is enough."""
    if len(groups) < 2:
        return {}
    columns = zip(HEADINGS, zip(*map(group_cells, groups), strict=True), strict=True)
    names = ("model", "dataset", "runs", "times")
    return {name: values[0] for name, values in columns if name in names and len(set(values)) == 1}


def used_columns(groups: Sequence[Group]) -> list[int]:
    """Positions of HEADINGS in which any group has something to say."""
    table = [group_cells(group) for group in groups]
    return [i for i, _ in enumerate(HEADINGS) if any(cells[i] not in (NOTHING, "") for cells in table)]
