"""The comparison as a table of texts, and as text for other programs: CSV, JSON, Markdown."""

from __future__ import annotations

import csv
import io
import json
import math
import re
from collections.abc import Callable, Container, Sequence
from dataclasses import astuple
from typing import NamedTuple

from gnnpar.files import Json, JsonDict, JsonObject
from gnnpar.report import formatting as words
from gnnpar.report.comparison import Comparison
from gnnpar.report.groups import Group
from gnnpar.report.statistics import Estimate
from gnnpar.settings import ConfigError, closest

_LEFT_OUT = ("block", "memory_peak_bytes", "val", "test", "gradient_cosine", "provenance")
_OF_RUNS = [each for each in words.RUN_COLUMNS if each[1] not in _LEFT_OUT]
_BEST = {"accuracy": "test at best val, %", "speedup": "speed-up"}


class Table(NamedTuple):
    """Headings, which columns are text, lines of cells, and the (line, column) of the best by a paired test."""

    headings: list[str]
    texts: list[bool]
    lines: list[list[str]]
    bold: set[tuple[int, int]]

    def only(self, kept: Sequence[int]) -> Table:
        """Return these columns, in this order."""
        place = {old: new for new, old in enumerate(kept)}
        return Table(
            [self.headings[i] for i in kept],
            [self.texts[i] for i in kept],
            [[line[i] for i in kept] for line in self.lines],
            {(i, place[j]) for i, j in self.bold if j in place},
        )

    def without_constant(self, names: Sequence[str] | None = None) -> tuple[Table, dict[str, str]]:
        """Drop columns of `names` (None: all but the first) that are equal in all of several lines; return both."""
        same: dict[str, str] = {}
        for name, cells in zip(self.headings[1:], list(zip(*self.lines, strict=True))[1:], strict=True):
            if len(cells) > 1 and len(set(cells)) == 1 and (names is None or name in names):
                same[name] = cells[0]
        return self.without(same), same

    def without(self, names: Container[str]) -> Table:
        return self.only([i for i, name in enumerate(self.headings) if name not in names])

    def narrowed(self, dispensable: Sequence[str], fits: Callable[[Table], bool]) -> tuple[Table, list[str]]:
        """Drop columns in this order until the table fits, 'A and B' together; return their names, too."""
        table, left_out = self, list[str]()
        for names in dispensable:
            if not fits(table):
                left_out += [name for name in names.split(" and ") if name in table.headings]
                table = table.without(left_out)
        return table, left_out


def group_table(groups: Sequence[Group], baseline: str) -> Table:
    """Return one line per group, without the columns that are empty in every line."""
    cells = [words.group_cells(group) for group in groups]
    used = [name for name in words.GROUP_COLUMNS if any(line[name] not in (words.NOTHING, "") for line in cells)]
    bold = {
        (i, used.index(name)) for i, group in enumerate(groups) for best in group.best if (name := _BEST[best]) in used
    }
    headings = [f"x {baseline}" if name == "speed-up" else name for name in used]
    texts = [words.GROUP_COLUMNS[name][0] for name in used]
    return Table(headings, texts, [[line[name] for name in used] for line in cells], bold)


def row_table(rows: Sequence[JsonObject], baseline: str, columns: Sequence[tuple[str, str, bool]] = _OF_RUNS) -> Table:
    """Return one line per run, without bold, since one run proves nothing."""
    headings = [f"x {baseline}" if name == "speed-up" else name for name, _, _ in columns]
    lines = [[words.run_text(row, column) for _, column, _ in columns] for row in rows]
    return Table(headings, [text for *_, text in columns], lines, set())


def as_csv(rows: Sequence[JsonObject], groups: Sequence[Group] | None = None) -> str:
    """Return exact values, a line per row, or a line per group if groups are given."""
    lines = rows if groups is None else [cells(group) for group in groups]
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


_OF_GROUPS = ("strategy", "variant", "exactness", "model", "dataset", "world_size", "threads_per_rank", "provenance")
_OF_GROUPS += ("links", "oversubscribed", "metric")


def cells(group: Group) -> JsonDict:
    """Return the group as plain data, None for unknown values; accuracies in percent, differences in points."""
    found: JsonDict = {name: group.first[name] for name in _OF_GROUPS}
    done = len(group.completed)
    found |= {"settings": group.changed, "control": group.control, "runs": len(group.rows), "completed": done}
    found |= _estimate("epoch_seconds", group.epoch_seconds) | _estimate("speedup", group.speedup, "blocks")
    found |= {"busy": group.time_busy, "speedup_busy": group.ratio_busy}
    means = ("bytes_per_epoch", "memory_peak_bytes", "gradient_cosine", "gradient_error")
    found |= {name: group.mean(name) for name in means}
    found |= {"why_no_speedup": group.why_no_speedup, "why_no_difference": group.why_no_difference}
    found |= _estimate("accuracy", group.accuracy, "seeds") | _estimate("difference", group.difference, "pairs")
    found |= {"verdict": group.verdict, "control_verdict": group.control_verdict, "target": group.target}
    for name, value in (("seconds_to_target", group.seconds_to_target), ("bytes_to_target", group.bytes_to_target)):
        low, high = value or (None, math.inf)
        found |= {name: low, f"{name}_high": high if high < math.inf else None}
    return found | {"best": " ".join(sorted(group.best))}


def _estimate(name: str, estimate: Estimate | None, count: str = "") -> JsonDict:
    value, low, high, n = astuple(estimate) if estimate else (None, None, None, 0)
    low, high = (end if end is not None and math.isfinite(end) else None for end in (low, high))
    return {name: value, f"{name}_low": low, f"{name}_high": high} | ({count: n} if count else {})
