"""The comparison as text for other programs: CSV, JSON, Markdown."""

from __future__ import annotations

import csv
import io
import json
import re
from collections.abc import Sequence

from gnnpar.files import Json, JsonObject
from gnnpar.report.comparison import Comparison
from gnnpar.report.groups import Group, cells
from gnnpar.report.table import Table
from gnnpar.settings import ConfigError, closest


def as_csv(rows: Sequence[JsonObject], groups: Sequence[Group] | None = None) -> str:
    """Return exact values, a line per row, or a line per group if groups are given."""
    lines = list(rows) if groups is None else [cells(group) for group in groups]
    text = io.StringIO()
    writer = csv.DictWriter(text, list(lines[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(lines)
    return text.getvalue()


def as_json(rows: Sequence[JsonObject], groups: Sequence[Group], **stamps: Json) -> str:
    """Return exact values of runs and groups, with the options and the warnings."""
    return json.dumps({**stamps, "rows": rows, "groups": [cells(group) for group in groups]}, indent=1) + "\n"


def as_markdown(table: Table, notes: Sequence[str] = ()) -> str:
    """Return a pipe table, the best by a paired test in bold, and the notes as a list."""
    shown = [
        [f"**{markdown_cell(cell)}**" if (i, j) in table.bold else markdown_cell(cell) for j, cell in enumerate(line)]
        for i, line in enumerate(table.lines)
    ]
    rule = ["---" if text else "---:" for text in table.texts]
    body = "\n".join(f"| {' | '.join(line)} |" for line in (table.headings, rule, *shown))
    return body + "\n" + ("\n" + "\n".join(f"- {markdown_cell(note)}" for note in notes) + "\n" if notes else "")


def chosen_columns(table: Table, names: Sequence[str]) -> Table:
    """Select the columns of `--columns` by their headings; 'speed-up' is also the heading 'x BASELINE'."""
    known = ["speed-up" if heading.startswith("x ") else heading for heading in table.headings]
    for name in names:
        if name not in known:
            raise ConfigError(f"--columns {name} is no column here{closest(name, known)}; there are {', '.join(known)}")
    return table.only([known.index(name) for name in names])


def notes_of(comparison: Comparison) -> list[str]:
    """Return a line for each unfair ratio, other difference and limit of the accuracies."""
    unfair, besides = (f"UNFAIR: {line}" for line in comparison.warnings), (f"differs: {x}" for x in comparison.remarks)
    return [*unfair, *besides, *comparison.notes]


def markdown_cell(text: str) -> str:
    """Escape backslashes, HTML tags and pipes in a cell of a pipe table."""
    return re.sub(r"\\|<(?=[a-zA-Z/!?])|\|", r"\\\g<0>", text)
