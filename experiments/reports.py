"""What reports of studies share: their command line, groups of lines, Markdown tables, intervals."""

import argparse
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from gnnpar.report.statistics import Estimate

Row = TypeVar("Row")


class Asked(NamedTuple):
    """Raw lines to read and the figure to draw."""

    file: Path
    figure: Path


def asked(folder: Path, *, file: str | None = None) -> Asked:
    """What the command line says. `file`: name of the raw lines where others can be named; None: they cannot."""
    parser = argparse.ArgumentParser()
    if file is not None:
        parser.add_argument("file", nargs="?", type=Path, default=folder / file)
    parser.add_argument("--figure", type=Path, default=folder / "figure.svg")
    options = parser.parse_args()
    return Asked(getattr(options, "file", folder / "results.jsonl"), options.figure)


def by(rows: Iterable[Row], key: Callable[[Row], Hashable]) -> dict[Any, list[Row]]:
    """Return key -> rows, keys and rows in their order."""
    groups: dict[Any, list[Row]] = {}
    for row in rows:
        groups.setdefault(key(row), []).append(row)
    return groups


def table(headings: Sequence[str], lines: Iterable[Sequence[object]], rule: str = "---|") -> str:
    """Return a Markdown table."""
    head, *body = [f"| {' | '.join(map(str, line))} |" for line in (headings, *lines)]
    return "\n".join([head, "|" + rule * len(headings), *body])


def columns(of: Mapping[str, Callable[[Row], object]], rows: Iterable[Row], rule: str = "---|") -> str:
    """Return a Markdown table of heading -> cell of a row."""
    return table(list(of), [[cell(row) for cell in of.values()] for row in rows], rule)


def show(title: str, shown: str) -> None:
    """Print a table below a heading."""
    print("", f"### {title}", "", shown, sep="\n")


def interval(found: Estimate, form: str = ".2f") -> str:
    """Return value (low to high)."""
    return f"{found.value:{form}} ({found.low:{form}} to {found.high:{form}})"
