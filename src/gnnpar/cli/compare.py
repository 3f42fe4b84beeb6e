"""`gnnpar compare FOLDER ...`: a table of runs, with ratios only between comparable runs (docs: protocol, rule 1). On a
terminal it has one row per run, or one per group.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.markup import escape
from rich.table import Table as RichTable

from gnnpar.files import JsonObject
from gnnpar.report import exports
from gnnpar.report import formatting as words
from gnnpar.report.comparison import Comparison, compare
from gnnpar.report.exports import Table, group_table, row_table
from gnnpar.report.groups import MARGIN, Group
from gnnpar.report.latex import as_latex
from gnnpar.report.runs import collect, no_speed
from gnnpar.settings import ConfigError
from gnnpar.track.console import say, stdout
from gnnpar.track.text import printable


def run(argv: list[str]) -> int:
    options = parse(argv)
    comparison = compare(
        collect(options.folders),
        baseline=options.baseline,
        allow_unfair=options.allow_unfair,
        margin=options.margin,
        target=options.target,
    )
    group = comparison.repeated if options.group is None else options.group
    if options.format:
        columns = [name.strip() for name in options.columns.split(";") if name.strip()]
        sys.stdout.write(export(comparison, options.format, options.group, group, columns))
    else:
        show(comparison, group)
    if options.html:
        from gnnpar.report.page import write_page

        _say(options, f"page -> {os.path.relpath(write_page(comparison, options.html))}")
    if options.figures:
        from gnnpar.report.figures import write_figures

        files = write_figures(comparison, options.figures)
        _say(options, f"{len(files)} figures -> {os.path.relpath(options.figures)}")
    return 0


def parse(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser("gnnpar compare", description="Compare runs; folders may hold whole sweeps.")
    parser.add_argument("folders", nargs="+", type=Path, metavar="FOLDER")
    parser.add_argument("--baseline", default="single", help="strategy that epoch times are divided by (single)")
    parser.add_argument("--allow-unfair", action="store_true", help="print ratios between unequal runs, and say so")
    parser.add_argument(
        "--group", action=argparse.BooleanOptionalAction, help="one row a configuration, over seeds and blocks"
    )
    parser.add_argument("--margin", type=float, default=MARGIN, help="of non-inferiority, in points of accuracy (0.3)")
    parser.add_argument("--target", type=float, help="validation metric to reach, 0 to 1, instead of the baseline's")
    parser.add_argument("--html", type=Path, metavar="FILE", help="write one page that needs no network")
    parser.add_argument("--figures", type=Path, metavar="FOLDER", help="svg, pdf, png, and the data of each as csv")
    output = parser.add_mutually_exclusive_group()
    for name, what in (
        ("json", "runs and groups as JSON"),
        ("csv", "one line a run as CSV, with --group one a group"),
        ("markdown", "the table in Markdown"),
        ("latex", "the table in LaTeX (booktabs, siunitx), by model, as wide as an article's text"),
    ):
        output.add_argument(f"--{name}", dest="format", action="store_const", const=name, help=what)
    parser.add_argument("--columns", default="", help="of --markdown, --latex: headings with ; between them, in order")
    options = parser.parse_intermixed_args(argv)
    if options.columns and options.format not in ("markdown", "latex"):
        raise ConfigError("--columns is of the tables that --markdown and --latex write; CSV and JSON have all")
    if not options.margin > 0:
        raise ConfigError(f"--margin {options.margin:g} must be positive: points of accuracy, such as 0.3")
    if options.target is not None and not 0 < options.target < 1:
        raise ConfigError(f"--target {options.target:g} must lie between 0 and 1: 72 % is 0.72")
    return options


def export(comparison: Comparison, form: str, asked: bool | None, group: bool, columns: Sequence[str] = ()) -> str:
    """Return the comparison in one of the formats. CSV has a line per run unless groups were requested. columns:
    headings of a table in Markdown or LaTeX."""
    if form == "json":
        return exports.as_json(
            comparison.rows,
            comparison.groups,
            baseline=comparison.baseline,
            unfair=comparison.allow_unfair,
            margin=comparison.margin,
            warnings=comparison.warnings,
            remarks=comparison.remarks,
            notes=comparison.notes,
        )
    if form == "csv":
        return exports.as_csv(comparison.rows, comparison.groups if asked else None)
    rows, baseline = comparison.rows, comparison.baseline
    table = group_table(comparison.groups, baseline) if group else row_table(rows, baseline)
    table = exports.chosen_columns(table, columns) if columns else table
    notes = exports.notes_of(comparison)
    if form == "markdown":
        return exports.as_markdown(table, notes)
    return as_latex(table, notes, keep=bool(columns))


def show(comparison: Comparison, group: bool) -> None:
    for line in comparison.answers:
        _print(f"{line}\n")
    asked = {"baseline": comparison.baseline, "allow_unfair": comparison.allow_unfair}
    if group:
        show_groups(comparison.groups, comparison.rows, **asked)
    else:
        show_rows(comparison.rows, **asked)
    for line in [
        *row_notes(comparison.rows, comparison.groups if group else ()),
        *(f"no fair comparison: {line}" for line in comparison.warnings),
        *(f"differs besides: {line}" for line in comparison.remarks),
        *comparison.commands,
        *(comparison.notes if group else ()),
    ]:
        _print(line)


def _say(options: argparse.Namespace, line: str) -> None:
    """Print a line, on stderr if stdout has the comparison in a format for other programs."""
    if options.format:
        sys.stderr.write(line + "\n")
    else:
        say(line)


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
        _print(f"too narrow for {', '.join(left_out)}")
    if constant:
        _print("everywhere: " + ", ".join(f"{name} {value}" for name, value in constant.items()))
    if targets := {f"{g.first['dataset']}/{g.first['model']}": g.target for g in groups if g.target is not None}:
        _print("target on validation: " + ", ".join(f"{task} {100 * target:.2f} %" for task, target in targets.items()))


# columns to drop on a narrow terminal, in this order; a verdict never appears without its control
_DISPENSABLE = ("error", "exactness", "cosine", "sent to target", "peak/rank", "to target", "runs", "sent/epoch")


def _width(table: Table) -> int:
    columns = zip(table.headings, *table.lines, strict=True)
    return sum(max(len(part) for cell in cells for part in cell.split("\n")) + 2 for cells in columns)


def _print(line: str) -> None:
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
