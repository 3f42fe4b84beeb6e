"""The comparison in the terminal: one row a run, or one a group."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from gnnpar.durable import JsonObject
from gnnpar.printable import printable
from gnnpar.report import formatting as words
from gnnpar.report.groups import Group
from gnnpar.report.runs import no_speed
from gnnpar.track.console import num_bytes, seconds, stdout

_UNFAIR = "UNFAIR: ratios between runs that differ"


def show_rows(rows: Sequence[JsonObject], *, baseline: str, allow_unfair: bool) -> None:
    """One row a run. Grey times come from more threads than cores and are no speed."""
    texts = ("strategy", "exactness", "model", "dataset", "times", "status")
    shown = (
        "strategy",
        "exactness",
        "model",
        "dataset",
        "seed",
        "ranks",
        "threads",
        "epoch",
        f"x {baseline}",
        "sent/epoch",
        "peak/rank",
        "val",
        "test",
        "times",
        "status",
    )
    table = _table(rows, allow_unfair)
    for name in shown:
        table.add_column(name, justify="left" if name in texts else "right")
    for row in rows:
        table.add_row(*_cells(row))
    _console().print(table)


def show_groups(groups: Sequence[Group], rows: Sequence[JsonObject], *, baseline: str, allow_unfair: bool) -> None:
    """One row a group; speed-ups in bold only where a paired test puts them before all others."""
    table = _table(rows, allow_unfair)
    headings = [*words.HEADINGS.items()]
    constant = words.constant_columns(groups)
    used = [i for i in words.used_columns(groups) if headings[i][0] not in constant]
    console = _console()
    used, left_out = _fitting(used, [list(words.HEADINGS), *map(words.group_cells, groups)], console.width)
    for i in used:
        name, text = headings[i]
        table.add_column(f"x {baseline}" if name == "speed-up" else name, justify="left" if text else "right")
    for group in groups:
        cells = [escape(text) for text in words.group_cells(group)]
        for name, column in (("accuracy", "test %"), ("speedup", "speed-up")):
            if name in group.best:
                i = [*words.HEADINGS].index(column)
                cells[i] = f"[bold]{cells[i]}[/bold]"
        style = "dim" if group.control else None
        table.add_row(*(cells[i] for i in used), style=style)
    console.print(table)
    if left_out:
        say(f"too narrow for {', '.join(left_out)}")
    if constant:
        say("everywhere: " + ", ".join(f"{name} {value}" for name, value in constant.items()))
    targets = {f"{g.first['dataset']}/{g.first['model']}": g.target for g in groups if g.target is not None}
    if targets:
        texts = ", ".join(f"{task} {100 * target:.2f} %" for task, target in targets.items())
        say(f"target on validation: {texts}")


# what a narrow terminal goes without, the first first; a verdict never stands without its control
_DISPENSABLE = ("error", "exactness", "cosine", "sent to target", "peak/rank", "to target", "runs", "sent/epoch")


def _fitting(used: Sequence[int], lines: Sequence[Sequence[str]], width: int) -> tuple[list[int], list[str]]:
    """The columns that fit, and the names of those that were left out. `lines`: headings, then cells."""
    kept, left_out = list(used), []
    widths = [max(len(line[i]) for line in lines) + 2 for i in range(len(lines[0]))]
    for name in _DISPENSABLE:
        i = list(lines[0]).index(name)
        if sum(widths[k] for k in kept) > width and i in kept:
            kept.remove(i)
            left_out.append(name)
    return kept, left_out


def say(line: str) -> None:
    _console().print(escape(printable(line)))


def row_notes(rows: Sequence[JsonObject]) -> list[str]:
    """What the cells cannot say."""
    notes = [words.GREY] if any(no_speed(row) for row in rows) else []
    reasons: dict[str, list[str]] = {}
    for row in rows:
        if row["ratio"] is None and row["status"] == "completed":
            reasons.setdefault(row["why_no_ratio"], []).append(f"{row['strategy']}/{row['model']}")
    notes += [f"no ratio for {', '.join(dict.fromkeys(names))}: {why}" for why, names in reasons.items()]
    notes += [f"{row['strategy']}/{row['model']} {row['status']}: {row['error']}" for row in rows if row["error"]]
    return notes


def _table(rows: Sequence[JsonObject], allow_unfair: bool) -> Table:
    unfair = allow_unfair and any(row["why_no_ratio"] == "unfair" for row in rows)
    return Table(title=_UNFAIR if unfair else None, title_style="bold red", box=None)


def _console() -> Console:
    console = stdout()
    if not console.is_terminal:
        console.width = 260
    return console


def _cells(row: JsonObject) -> list[str]:
    time = "-" if row["epoch_seconds"] is None else seconds(row["epoch_seconds"])
    ratio = "-" if row["ratio"] is None else f"{row['ratio']:.2f}"
    if no_speed(row):
        time, ratio = f"[dim]({time})[/dim]", f"[dim]({ratio})[/dim]"
    if row["why_no_ratio"] == "unfair":
        ratio = f"[red]{ratio}?[/red]"
    failed = row["status"] != "completed"
    named = ("exactness", "model", "dataset", "seed", "world_size", "threads_per_rank")
    return [
        escape(f"{row['strategy']} {row['variant']}".strip()),
        *(escape(str(row[name])) for name in named),
        time,
        ratio,
        num_bytes(row["bytes_per_epoch"]),
        "-" if row["memory_peak_bytes"] is None else num_bytes(row["memory_peak_bytes"]),
        *("-" if row[name] is None else f"{row[name]:.4f}" for name in ("val", "test")),
        escape(f"{row['provenance']} {row['links']}".strip()),
        f"[red]{row['status']}[/red]" if failed else row["status"],
    ]
