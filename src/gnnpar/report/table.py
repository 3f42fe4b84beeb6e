"""A comparison as a table of texts, for the terminal, Markdown and LaTeX."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from gnnpar.files import JsonObject
from gnnpar.report import formatting as words
from gnnpar.report.groups import Group


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
        return self.only([i for i, name in enumerate(self.headings) if name not in same]), same


_LEFT_OUT = ("block", "memory_peak_bytes", "val", "test", "gradient_cosine", "provenance")
_BEST = {"accuracy": "test at best val, %", "speedup": "speed-up"}


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


def row_table(rows: Sequence[JsonObject], baseline: str) -> Table:
    """Return one line per run, without bold, since one run proves nothing."""
    columns = [each for each in words.RUN_COLUMNS if each[1] not in _LEFT_OUT]
    headings = [f"x {baseline}" if name == "speed-up" else name for name, _, _ in columns]
    lines = [[words.run_text(row, column) for _, column, _ in columns] for row in rows]
    return Table(headings, [text for *_, text in columns], lines, set())
