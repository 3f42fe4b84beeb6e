"""What reports of studies share: groups of lines, Markdown tables, intervals, figures of one look."""

import csv
import math
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from contextlib import chdir
from pathlib import Path
from typing import Any, TypeVar

from gnnpar.config.study import Study
from gnnpar.report.columns import Cell, Runs, Samples
from gnnpar.report.statistics import Estimate

Row = TypeVar("Row")
Measured = Mapping[str, tuple[Study, Runs]]  # name of lines -> their study file, what they hold


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


def read_csv(file: Path) -> list[dict[str, str]]:
    with file.open(encoding="utf-8") as lines:
        return list(csv.DictReader(lines))


def write_csv(file: Path, rows: Sequence[Mapping[str, object]]) -> None:
    with file.open("w", encoding="utf-8", newline="") as out:
        writer = csv.DictWriter(out, list(rows[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)


def show(title: str, shown: str) -> None:
    """Print a table below a heading."""
    print("", f"### {title}", "", shown, sep="\n")


def interval(found: Estimate, form: str = ".2f") -> str:
    """Return value (low to high)."""
    return f"{found.value:{form}} ({found.low:{form}} to {found.high:{form}})"


def measured(study: Study, runs: Runs, expression: str, *place: str) -> float:
    """Return the value of a column's expression for the job at this place; NaN without one."""
    value = Cell(study, runs, study.named(place)).value(expression)
    found = value.estimate() if isinstance(value, Samples) else value
    return found.value if isinstance(found, Estimate) else found if isinstance(found, float) else math.nan


def pyplot(size: float = 9) -> Any:
    """Return matplotlib's pyplot without a display. `size`: of letters, in points."""
    with chdir(Path(__file__).parent):  # matplotlib obeys a matplotlibrc of the working directory
        import matplotlib

        matplotlib.use("Agg")
        import matplotlib.pyplot as plt

    plt.rcParams.update(
        {
            "svg.fonttype": "none",
            "svg.hashsalt": "gnnpar",  # the same bytes from the same numbers
            "axes.spines.top": False,
            "axes.spines.right": False,
            "font.size": size,
        }
    )
    return plt


def save(figure: Any, file: Path) -> None:
    """Write a figure without the date, which would change with every drawing."""
    figure.savefig(file, metadata={"Date": None})
