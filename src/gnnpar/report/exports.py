"""The comparison as text for other programs: CSV, JSON, Markdown; as the cells of a table, also for latex.py."""

from __future__ import annotations

import csv
import io
import json
import re
from collections.abc import Sequence

from gnnpar.files import Json, JsonObject
from gnnpar.report import formatting as words
from gnnpar.report.comparison import Comparison
from gnnpar.report.groups import Group, cells
from gnnpar.report.rows import COLUMNS
from gnnpar.settings import ConfigError, closest


def as_csv(rows: Sequence[JsonObject], groups: Sequence[Group] | None = None) -> str:
    """Return exact values, one line a run, or one a group if groups are given."""
    lines = list(rows) if groups is None else [cells(group) for group in groups]
    text = io.StringIO()
    writer = csv.DictWriter(text, COLUMNS if groups is None else list(lines[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(lines)
    return text.getvalue()


def as_json(rows: Sequence[JsonObject], groups: Sequence[Group], **stamps: Json) -> str:
    """Exact values of runs and groups, with what was asked for and what is unfair."""
    return json.dumps({**stamps, "rows": rows, "groups": [cells(group) for group in groups]}, indent=1) + "\n"


def as_markdown(table: Table, notes: Sequence[str] = ()) -> str:
    """A pipe table; what a paired test puts first is bold, and notes follow as a list."""
    headings, texts, lines, bold = table
    shown = [
        [f"**{markdown_cell(cell)}**" if (i, j) in bold else markdown_cell(cell) for j, cell in enumerate(line)]
        for i, line in enumerate(lines)
    ]
    rule = ["---" if text else "---:" for text in texts]
    body = "\n".join(f"| {' | '.join(line)} |" for line in (headings, rule, *shown))
    return body + "\n" + ("\n" + "\n".join(f"- {markdown_cell(note)}" for note in notes) + "\n" if notes else "")


def with_columns(table: Table, kept: Sequence[int]) -> Table:
    """These columns, in this order."""
    headings, texts, lines, bold = table
    place = {old: new for new, old in enumerate(kept)}
    cells = [[line[i] for i in kept] for line in lines]
    marked = {(i, place[j]) for i, j in bold if j in place}
    return [headings[i] for i in kept], [texts[i] for i in kept], cells, marked


def chosen_columns(table: Table, names: Sequence[str]) -> Table:
    """Of `--columns`: by their headings, the speed-up by that name too."""
    known = ["speed-up" if heading.startswith("x ") else heading for heading in table[0]]
    for name in names:
        if name not in known:
            raise ConfigError(f"--columns {name} is no column here{closest(name, known)}; there are {', '.join(known)}")
    return with_columns(table, [known.index(name) for name in names])


def notes_of(comparison: Comparison) -> list[str]:
    """What the cells do not show: what is unfair, what differs besides, what the accuracies do not show."""
    unfair, besides = (f"UNFAIR: {line}" for line in comparison.warnings), (f"differs: {x}" for x in comparison.remarks)
    return [*unfair, *besides, *comparison.notes]


# headings, whether each is text, lines of cells, and the (line, column) of what is best by a paired test
Table = tuple[list[str], list[bool], list[list[str]], set[tuple[int, int]]]


def group_table(groups: Sequence[Group], baseline: str) -> Table:
    used = words.used_columns(groups)
    names = [*words.HEADINGS]
    headings = [f"x {baseline}" if names[i] == "speed-up" else names[i] for i in used]
    lines = [[words.group_cells(group)[i] for i in used] for group in groups]
    columns = {"accuracy": "test at best val, %", "speedup": "speed-up"}
    bold = {
        (i, j)
        for i, group in enumerate(groups)
        for j, position in enumerate(used)
        if names[position] in (columns[best] for best in group.best)
    }
    return headings, [words.HEADINGS[names[i]] for i in used], lines, bold


def row_table(rows: Sequence[JsonObject], baseline: str) -> Table:
    """One line a run; nothing is bold, as one run proves nothing."""
    shown = (
        "strategy",
        "model",
        "dataset",
        "seed",
        "ranks",
        "epoch",
        "speed-up",
        "sent/epoch",
        "test at best val",
        "status",
    )
    known = {heading: (column, text) for heading, column, text in words.RUN_COLUMNS}
    lines = [[words.run_text(row, known[name][0]) for name in shown] for row in rows]
    for row, line in zip(rows, lines, strict=True):
        test = row["test_at_best_val"]
        line[shown.index("ranks")] = f"{row['world_size']}x{row['threads_per_rank']}"
        line[shown.index("test at best val")] = words.NOTHING if test is None else f"{100 * test:.2f}"
    renamed = {"speed-up": f"x {baseline}", "test at best val": "test at best val, %"}
    return [renamed.get(name, name) for name in shown], [known[name][1] for name in shown], lines, set()


def markdown_cell(text: str) -> str:
    """Escape what a cell of a pipe table reads as its end, as HTML, or as an escape."""
    return re.sub(r"\\|<(?=[a-zA-Z/!?])|\|", r"\\\g<0>", text)
