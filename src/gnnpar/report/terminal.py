"""The comparison in the terminal: one row a run, or one a group."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from gnnpar.files import JsonObject
from gnnpar.report import formatting as words
from gnnpar.report.groups import Group
from gnnpar.report.runs import no_speed
from gnnpar.track.console import stdout
from gnnpar.track.text import printable

_UNFAIR = "UNFAIR: ratios between runs that differ"


def show_rows(rows: Sequence[JsonObject], *, baseline: str, allow_unfair: bool) -> None:
    """One row a run. Grey times come from more threads than cores and are no speed."""
    table = _table(rows, allow_unfair)
    columns = [each for each in words.RUN_COLUMNS if each[1] not in ("block", "gradient_cosine")]
    columns.insert(1, ("exactness", "exactness", True))
    for name, _, text in columns:
        table.add_column(f"x {escape(baseline)}" if name == "speed-up" else name, justify="left" if text else "right")
    reasons = list(words.blanks(rows))
    for row in rows:
        table.add_row(*(_cell(row, column, reasons) for _, column, _ in columns))
    _console().print(table)


def show_groups(groups: Sequence[Group], rows: Sequence[JsonObject], *, baseline: str, allow_unfair: bool) -> None:
    """One row a group; speed-ups in bold only where a paired test puts them before all others."""
    table = _table(rows, allow_unfair)
    headings = [*words.HEADINGS.items()]
    constant = words.constant_columns(groups)
    used = [i for i in words.used_columns(groups) if headings[i][0] not in constant]
    console = _console()
    above = [name.replace("test at ", "test at\n") for name in words.HEADINGS]  # in two lines
    used, left_out = _fitting(used, [above, *map(words.group_cells, groups)], console.width)
    for i in used:
        name, text = above[i], headings[i][1]
        table.add_column(f"x {escape(baseline)}" if name == "speed-up" else name, justify="left" if text else "right")
    reasons = list(words.blanks(rows, groups))
    for group in groups:
        texts = words.group_cells(group)
        for name, why in (
            ("speed-up", ("ratio", group.why_no_speedup)),
            ("difference", ("difference", group.why_no_difference)),
        ):
            texts[[*words.HEADINGS].index(name)] += _mark(why, reasons)
        cells = [escape(text) for text in texts]
        for name, column in (("accuracy", "test at best val, %"), ("speedup", "speed-up")):
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
    widths = [max(len(part) for line in lines for part in line[i].split("\n")) + 2 for i in range(len(lines[0]))]
    for name in _DISPENSABLE:
        i = list(lines[0]).index(name)
        if sum(widths[k] for k in kept) > width and i in kept:
            kept.remove(i)
            left_out.append(name)
    return kept, left_out


def say(line: str) -> None:
    _console().print(escape(printable(line)))


def row_notes(rows: Sequence[JsonObject], groups: Sequence[Group] = ()) -> list[str]:
    """What the cells cannot say; why blank ones are blank, by number."""
    notes = [words.GREY] if any(no_speed(row) for row in rows) else []
    notes += [words.BUSY] if any(row["busy"] or row["ratio_busy"] for row in rows) else []
    for i, ((what, why), names) in enumerate(words.blanks(rows, groups).items(), start=1):
        notes.append(f"[{i}] no {what} for {', '.join(dict.fromkeys(names))}: {why}")
    notes += [f"{row['strategy']}/{row['model']} {row['status']}: {row['error']}" for row in rows if row["error"]]
    return notes


def _mark(why: tuple[str, str], reasons: Sequence[tuple[str, str]]) -> str:
    """The number of the footnote that says why a cell is blank."""
    return f" [{reasons.index(why) + 1}]" if why in reasons else ""


def _table(rows: Sequence[JsonObject], allow_unfair: bool) -> Table:
    unfair = allow_unfair and any(row["why_no_ratio"] == "unfair" for row in rows)
    return Table(title=_UNFAIR if unfair else None, title_style="bold red", box=None)


def _console() -> Console:
    console = stdout()
    if not console.is_terminal:
        console.width = 260
    return console


def _cell(row: JsonObject, column: str, reasons: Sequence[tuple[str, str]]) -> str:
    text = words.run_text(row, column)
    if column == "ratio" and row["ratio"] is None:
        text += _mark(("ratio", row["why_no_ratio"]), reasons)
    text = escape(text)
    if column in ("epoch_seconds", "ratio") and no_speed(row):
        text = f"[dim]{text}[/dim]"
    unfair = column == "ratio" and row["why_no_ratio"] == "unfair"
    failed = column == "status" and row["status"] != "completed"
    return f"[red]{text}[/red]" if unfair or failed else text
