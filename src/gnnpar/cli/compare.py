"""`gnnpar compare FOLDER ...`: a table of runs, with ratios only between comparable runs (docs: protocol, rule 1)."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from gnnpar.report import exports, terminal
from gnnpar.report.comparison import Comparison, compare
from gnnpar.report.exports import group_table, row_table
from gnnpar.report.groups import MARGIN
from gnnpar.report.latex import as_latex
from gnnpar.report.runs import collect
from gnnpar.settings import ConfigError
from gnnpar.track.console import say


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
        terminal.say(f"{line}\n")
    asked = {"baseline": comparison.baseline, "allow_unfair": comparison.allow_unfair}
    if group:
        terminal.show_groups(comparison.groups, comparison.rows, **asked)
    else:
        terminal.show_rows(comparison.rows, **asked)
    for line in [
        *terminal.row_notes(comparison.rows, comparison.groups if group else ()),
        *(f"no fair comparison: {line}" for line in comparison.warnings),
        *(f"differs besides: {line}" for line in comparison.remarks),
        *comparison.commands,
        *(comparison.notes if group else ()),
    ]:
        terminal.say(line)


def _say(options: argparse.Namespace, line: str) -> None:
    """Print a line, on stderr if stdout has the comparison in a format for other programs."""
    if options.format:
        sys.stderr.write(line + "\n")
    else:
        say(line)
