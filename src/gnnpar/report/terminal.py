"""The comparison in the terminal: one row per run, or one per group."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.markup import escape
from rich.table import Table as RichTable

from gnnpar.files import JsonObject
from gnnpar.report import formatting as words
from gnnpar.report.exports import Table, group_table, row_table
from gnnpar.report.groups import Group
from gnnpar.report.runs import no_speed
from gnnpar.track.console import stdout
from gnnpar.track.text import printable


def show_rows(rows: Sequence[JsonObject], *, baseline: str, allow_unfair: bool) -> None:
    """Print one row per run. Grey times come from more threads than cores and do not measure speed."""
    columns = [each for each in words.RUN_COLUMNS if each[1] not in ("block", "gradient_cosine")]
    columns.insert(1, ("exactness", "exactness", True))
    table = _table(rows, allow_unfair, row_table(rows, baseline, columns))
    reasons = list(words.blanks(rows))
    for row in rows:
        table.add_row(*(_cell(row, column, reasons) for _, column, _ in columns))
    _console().print(table)


def show_groups(groups: Sequence[Group], rows: Sequence[JsonObject], *, baseline: str, allow_unfair: bool) -> None:
    """Print one row per group; the best accuracy and speed-up by a paired test in bold."""
    console, reasons = _console(), list(words.blanks(rows, groups))
    shown, constant = group_table(groups, baseline).without_constant(("model", "dataset", "runs", "times"))
    shown = shown._replace(headings=[name.replace("test at ", "test at\n") for name in shown.headings])
    shown, left_out = shown.narrowed(_DISPENSABLE, lambda table: _width(table) <= console.width)
    table = _table(rows, allow_unfair, shown)
    for i, (group, line) in enumerate(zip(groups, shown.lines, strict=True)):
        marks = {
            f"x {baseline}": _mark(("ratio", group.why_no_speedup), reasons),
            "difference": _mark(("difference", group.why_no_difference), reasons),
        }
        cells = [escape(cell + marks.get(name, "")) for name, cell in zip(shown.headings, line, strict=True)]
        cells = [f"[bold]{cell}[/bold]" if (i, j) in shown.bold else cell for j, cell in enumerate(cells)]
        table.add_row(*cells, style="dim" if group.control else None)
    console.print(table)
    if left_out:
        say(f"too narrow for {', '.join(left_out)}")
    if constant:
        say("everywhere: " + ", ".join(f"{name} {value}" for name, value in constant.items()))
    if targets := {f"{g.first['dataset']}/{g.first['model']}": g.target for g in groups if g.target is not None}:
        say("target on validation: " + ", ".join(f"{task} {100 * target:.2f} %" for task, target in targets.items()))


# columns to drop on a narrow terminal, in this order; a verdict never appears without its control
_DISPENSABLE = ("error", "exactness", "cosine", "sent to target", "peak/rank", "to target", "runs", "sent/epoch")


def _width(table: Table) -> int:
    columns = zip(table.headings, *table.lines, strict=True)
    return sum(max(len(part) for cell in cells for part in cell.split("\n")) + 2 for cells in columns)


def say(line: str) -> None:
    _console().print(escape(printable(line)))


def row_notes(rows: Sequence[JsonObject], groups: Sequence[Group] = ()) -> list[str]:
    """Return the footnotes of the table: grey and busy times, reasons of blank cells by number, failures."""
    notes = [words.GREY] if any(no_speed(row) for row in rows) else []
    notes += [words.BUSY] if any(row["busy"] or row["ratio_busy"] for row in rows) else []
    for i, ((what, why), names) in enumerate(words.blanks(rows, groups).items(), start=1):
        notes.append(f"[{i}] no {what} for {', '.join(dict.fromkeys(names))}: {why}")
    notes += [f"{row['strategy']}/{row['model']} {row['status']}: {row['error']}" for row in rows if row["error"]]
    return notes


def _mark(why: tuple[str, str], reasons: Sequence[tuple[str, str]]) -> str:
    """Return the number of the footnote with the reason of a blank cell."""
    return f" [{reasons.index(why) + 1}]" if why in reasons else ""


def _table(rows: Sequence[JsonObject], allow_unfair: bool, shown: Table) -> RichTable:
    unfair = allow_unfair and any(row["why_no_ratio"] == "unfair" for row in rows)
    title = "UNFAIR: ratios between runs that differ" if unfair else None
    table = RichTable(title=title, title_style="bold red", box=None)
    for heading, is_text in zip(shown.headings, shown.texts, strict=True):
        table.add_column(escape(heading), justify="left" if is_text else "right")
    return table


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
