"""The comparison as a table for a paper: LaTeX with booktabs and siunitx, as wide as a page of the article class."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from decimal import Decimal
from typing import NamedTuple

from gnnpar.report.exports import Table
from gnnpar.report.formatting import NOTHING

TEXT_WIDTH = 345.0  # points: \textwidth of the article class at 10 pt
_CHARACTER, _SEPARATION = 4.25, 6.0  # points: of \footnotesize, and between two columns
_LONGEST = 27  # longest text on one line, in characters
_WRAPPED = rf">{{\raggedright\arraybackslash\hangindent=1em}}p{{{_CHARACTER * _LONGEST:.0f}pt}}"
_GROUPS = ("dataset", "model")  # headings above rows
# columns to drop on a narrow page, in this order; a verdict never appears without its control
_DISPENSABLE = ["error", "cosine", "times", "exactness", "sent to target", "to target", "peak/rank", "status", "runs"]
_DISPENSABLE += ["verdict and control", "seed", "epoch", "ranks", "sent/epoch", "difference"]
_NUMBER = r"[+-]?\d+(?:\.\d+)?"
_FACTORS = {
    **{"ms": ("time", Decimal("0.001")), "s": ("time", Decimal(1))},
    **{unit: ("size", Decimal(1024) ** power) for power, unit in enumerate(("B", "KiB", "MiB", "GiB"))},
}
_ESCAPED = str.maketrans(
    {c: f"\\{c}" for c in "&%$#_{}"}
    | {"~": r"\textasciitilde{}", "^": r"\textasciicircum{}"}
    | {"\\": r"\textbackslash{}", "±": r"$\pm$", ">": "$>$", "<": "$<$"}
)


class Column(NamedTuple):
    """One column of the tabular: its specification, the lines of its heading, its cells, its width in characters."""

    spec: str
    heading: tuple[str, str]
    cells: list[str]
    width: int


def as_latex(table: Table, notes: Sequence[str] = (), *, keep: bool = False) -> str:
    r"""Return a tabular in \footnotesize; needs \usepackage{booktabs,siunitx}, siunitx of 2021 or later.

    Rows are grouped by dataset and model. Constant columns and columns beyond the width of the page are left out
    (not with `keep`), and named in comments above, like notes.
    """
    table, constant = (table, {}) if keep else table.without_constant()
    grouping = [i for i, name in enumerate(table.headings) if name in _GROUPS and len(table.headings) > len(_GROUPS)]
    keys = [", ".join(line[i] for i in grouping) for line in table.lines]
    table = table.only([i for i in range(len(table.headings)) if i not in grouping])
    table, left_out = table.narrowed([] if keep else _DISPENSABLE, _fits)
    flat = _columns(table)
    rows = [" & ".join(cells) + r" \\" for cells in zip(*(column.cells for column in flat), strict=True)]
    body: list[str] = []
    for key in dict.fromkeys(keys):
        if grouping:
            body += [r"\addlinespace"] * bool(body)
            body.append(rf"\multicolumn{{{len(flat)}}}{{@{{}}l}}{{\textit{{{_tex(key)}}}}} \\")
        body += [row for row, of in zip(rows, keys, strict=True) if of == key]
    above = [f"% everywhere: {name} {value}" for name, value in constant.items()]
    above += [f"% left out, the page is too narrow: {', '.join(left_out)}; --columns chooses"] * bool(left_out)
    above += [f"% {note}" for note in notes]
    above = [" ".join(line.split()) for line in above]  # a line break in a name must not end the comment
    headings = [" & ".join(column.heading[line] for column in flat) + r" \\" for line in (0, 1)]
    lines = [
        *above,
        r"\begingroup\footnotesize\setlength{\tabcolsep}{3pt}",
        rf"\begin{{tabular}}{{@{{}}{''.join(column.spec for column in flat)}@{{}}}}",
        r"\toprule",
        *(line for line in headings if line.strip(r" &\{}")),
        r"\midrule",
        *body,
        r"\bottomrule",
        r"\end{tabular}\endgroup",
    ]
    return "\n".join(lines) + "\n"


def _fits(table: Table) -> bool:
    widths = [column.width for column in _columns(table)]
    return _CHARACTER * sum(widths) + _SEPARATION * (len(widths) - 1) <= TEXT_WIDTH


def _columns(table: Table) -> list[Column]:
    return [column for i in range(len(table.headings)) for column in _formatted(table, i)]


def _formatted(table: Table, i: int) -> list[Column]:
    """Return the formatted column; two for values with intervals in brackets."""
    headings, texts, lines, bold = table
    cells = [line[i] for line in lines]
    marked = [(k, i) in bold for k in range(len(lines))]
    if texts[i] or not any(re.match(_NUMBER, cell) for cell in cells) or re.fullmatch(r"\d+x\d+", cells[0]):
        shown = [rf"\textbf{{{_tex(cell)}}}" if mark else _tex(cell) for cell, mark in zip(cells, marked, strict=True)]
        column = _column("l" if texts[i] else "r", headings[i], "", cells, shown)
        wide = column.width > _LONGEST  # names of strategies with their variants continue on a second line
        if not wide or not texts[i]:
            return [column]
        broken = [cell.replace(r"\_", r"\_\allowbreak{}") if len(cell) > _LONGEST else cell for cell in shown]
        return [column._replace(spec=_WRAPPED, width=_LONGEST, cells=broken)]
    if any(re.fullmatch(rf"{_NUMBER} \[.*\]", cell) for cell in cells):
        values, marks, ends = zip(*(cell.partition(" [") for cell in cells), strict=True)
        intervals = [mark.strip() + end for mark, end in zip(marks, ends, strict=True)]
        shown = [_tex(text) for text in intervals]
        column = _column("l", "95 %", "", intervals, shown)._replace(heading=(r"{95 \%}", ""))
        return [_numbers(headings[i], "", values, marked), column]
    unit = Counter(match[1] for cell in cells if (match := re.search(r"\d ([a-zA-Z]+)$", cell))).most_common(1)
    if unit and unit[0][0] in _FACTORS:
        return [_numbers(headings[i], unit[0][0], [_in_unit(cell, unit[0][0]) for cell in cells], marked)]
    return [_numbers(headings[i], "", cells, marked)]


def _column(spec: str, name: str, unit: str, cells: Sequence[str], shown: list[str]) -> Column:
    """Return a column with a heading of two lines; the second is the unit, or half of a long name."""
    words = name.split()
    half = next((k for k in range(1, len(words)) if len(" ".join(words[:k])) * 2 + 1 >= len(name)), len(words))
    first, second = (name, f"({unit})") if unit else (" ".join(words[:half]), " ".join(words[half:]))
    heading = (f"{{{_tex(first)}}}" if first else "", f"{{{_tex(second)}}}" if second else "")
    return Column(spec, heading, shown, max(len(first), len(second), *map(len, cells)))


def _numbers(name: str, unit: str, cells: Sequence[str], marked: Sequence[bool]) -> Column:
    """Return an S column of siunitx, aligned at the decimal point; other texts are put in braces."""
    found = [re.fullmatch(rf"({_NUMBER})(?: ± ({_NUMBER}))?", cell) for cell in cells]
    values = [(match[1], match[2]) for match in found if match]
    if not values:
        return _column("r", name, unit, cells, [_tex(cell) for cell in cells])
    whole = max(len(value.lstrip("+-").partition(".")[0]) for value, _ in values)
    places = max(len(value.partition(".")[2]) for value, _ in values)
    errors = [len(str(int(Decimal(error) * 10**places))) for _, error in values if error]
    signed = "+" if any(value[0] in "+-" for value, _ in values) else ""
    form = f"{signed}{whole}.{places}" + (f"({max(errors)}),separate-uncertainty" if errors else "")
    bold = ",text-series-to-math,reset-text-series=false" if any(marked) else ""
    spec = f"S[table-format={form}{bold}]"
    shown = []
    for cell, match, mark in zip(cells, found, marked, strict=True):
        text = cell.replace(" ± ", " +- ") if match else f"{{{_tex(cell)}}}" if cell != NOTHING else "{--}"
        shown.append(rf"\bfseries {text}" if mark else text)
    return _column(spec, name, unit, cells, shown)


def _in_unit(cell: str, unit: str) -> str:
    """Convert every quantity of a text to this unit with the same significant figures, and drop the unit."""

    def converted(match: re.Match[str]) -> str:
        number, given = match[1], match[2]
        if given not in _FACTORS or _FACTORS[given][0] != _FACTORS[unit][0]:
            return match[0]
        if given == unit:
            return number
        value = Decimal(number) * _FACTORS[given][1] / _FACTORS[unit][1]
        figures = len(number.replace(".", "").lstrip("0")) or 1
        places = max(0, figures - 1 - value.adjusted()) if value else 0
        return f"{value:.{min(places, 4)}f}"

    return re.sub(r"(\d+(?:\.\d+)?) ([a-zA-Z]+)", converted, cell)


def _tex(text: str) -> str:
    escaped = text.translate(_ESCAPED)
    return f"{{[}}{escaped[1:]}" if escaped.startswith("[") else escaped  # \\ and \midrule would read it as a length
