"""Tables and the figure of a study."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING

from gnnpar.config.study import Figure, Study, Table, applies
from gnnpar.files import Json
from gnnpar.report.columns import Cell, Runs, Samples, exact, filled, form_of, is_name
from gnnpar.report.exports import Table as Shown
from gnnpar.report.formatting import NOTHING
from gnnpar.report.statistics import FEWEST_BLOCKS, FEWEST_SEEDS, Estimate
from gnnpar.settings import ConfigError, closest

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure as Drawn

_OF_FACTORS = ["runs()", "epoch_ms", "epoch / epoch(base)", "sent_mib", "sent_mib - sent_mib(base)", "peak_mib"]
_OF_FACTORS += ["peak_mib - peak_mib(base)", "points", "points - points(base)", "cosine"]


def check(study: Study) -> None:
    """Raise ConfigError for a column, an axis or a base of the tables or the figure that the study does not have."""
    for key, table in _tables(study).items():
        with _errors_at(key):
            for cells in _sections(study, {}, table, check=True):
                _lines(cells, table)
                _title(cells, table, [variant.place for variant in study.variants()])
    with _errors_at("headline"):
        headline(study, {})
    if (about := study.figure) is not None:
        _refuse_unknown("figure: ", study, (about.x, about.lines, *about.panels))
        with _errors_at("figure.y"):
            filled(_first_cell(study, {}), f"{{{about.y}:.2f}}")


@contextmanager
def _errors_at(key: str) -> Iterator[None]:
    try:
        yield
    except (ConfigError, ValueError) as error:
        raise ConfigError(f"{key}: {error}") from error


def _first_cell(study: Study, runs: Runs) -> Cell:
    return Cell(study, runs, study.named(study.variants()[0].place))


def tables(study: Study, runs: Runs) -> list[tuple[str, Shown]]:
    """Return the title and the cells of every table with runs, without columns that are unknown in every row."""
    shown: list[tuple[str, Shown]] = []
    for table in _tables(study).values():
        columns = _columns(study, table)
        texts = [is_name(study, column) for column in columns.values()]
        for cells in _sections(study, runs, table):
            title, lines = _title(cells, table, runs), _lines(cells, table)
            known = [i for i in range(len(columns)) if any(line[i] != NOTHING for line in lines)]
            shown.append((title, Shown(list(columns), texts, lines, set()).only(known)))
    return shown


def headline(study: Study, runs: Runs) -> str:
    """Return the headline with its values, '' if one is unknown."""
    text = filled(_first_cell(study, runs), study.headline)
    return "" if text == NOTHING else text


def as_json(study: Study, runs: Runs) -> list[Json]:
    """Return the rows of all tables as heading -> estimate or text."""
    return [
        {heading: exact(cell, column) for heading, column in _columns(study, table).items()}
        for table in _tables(study).values()
        for cells in _sections(study, runs, table)
        for cell in cells
    ]


def as_markdown(shown: Sequence[tuple[str, Shown]]) -> str:
    """Return titles and pipe tables; a blank line ends a table below a heading."""
    parts: list[str] = []
    for title, table in shown:
        head, *body = [f"| {' | '.join(line)} |" for line in (table.headings, *table.lines)]
        parts.append("\n".join([*([title, ""] if title else []), head, "|---" * len(table.headings) + "|", *body]))
    return "\n\n".join(parts) + "\n" + "\n" * any(title.startswith("#") for title, _ in shown)


def _tables(study: Study) -> dict[str, Table]:
    """Return key of the file -> table. The default one has intervals if there are enough blocks and seeds."""
    given = {f"tables[{i}]": table for i, table in enumerate(study.tables)}
    if study.table:
        return {"table": Table(columns=study.table)} | given
    if given or study.factors:
        return given or {"table": Table(columns=_OF_FACTORS)}
    base, several = repr(next(iter(study.methods))), len(study.methods) > 1
    times = [f"times({base})"] * (several and study.blocks >= FEWEST_BLOCKS)
    points = ["points", *[f"over({base})"] * several] if len(study.seed_list) >= FEWEST_SEEDS else []
    return {"table": Table(columns=["epoch_ms", *times, "share", "peak_mib", "sent_mib", *points])}


def _columns(study: Study, table: Table) -> dict[str, str]:
    """Return heading -> text; columns given as a list come after the axes."""
    if isinstance(table.columns, dict):
        return table.columns
    found = {axis: f"{{{axis}}}" for axis in _axes(study, table)}
    for column in table.columns:
        found[column] = f"{{{column}:{form_of(column, study)}}}" + "%" * column.startswith("share")
    return found


def _axes(study: Study, table: Table) -> list[str]:
    """Return the axes that make rows, which are not named in the title."""
    return table.rows or [axis for axis in study.axes if f"{{{axis}}}" not in table.title]


def _sections(study: Study, runs: Runs, table: Table, *, check: bool = False) -> Iterator[list[Cell]]:
    """Return the rows of a table, or of one for each name in its title. check: also rows without runs."""
    axes = _axes(study, table)
    _refuse_unknown("rows: ", study, axes)
    for title in _places(study, [axis for axis in study.axes if f"{{{axis}}}" in table.title]):
        rows = [title | row for row in _places(study, axes, title)]
        rows = [row for row in rows if not table.where or applies(table.where, row.values())]
        begun = [study.named(place).items() for place in runs]
        if rows := [row for row in rows if check or any(row.items() <= place for place in begun)]:
            yield [Cell(study, runs, row, rows) for row in rows]


def _refuse_unknown(key: str, study: Study, axes: Sequence[str]) -> None:
    for axis in axes:
        if axis not in study.axes:
            raise ConfigError(f"{key}{axis} is no axis{closest(axis, study.axes)}; there are {', '.join(study.axes)}")


def _places(study: Study, axes: Sequence[str], fixed: Mapping[str, str] | None = None) -> list[dict[str, str]]:
    """Return the names on these axes that jobs have, in the order of the file."""
    there = [study.named(variant.place).items() for variant in study.variants()]
    rows = [dict(zip(axes, names, strict=True)) for names in itertools.product(*(study.axes[axis] for axis in axes))]
    return [row for row in rows if any((dict(fixed or {}) | row).items() <= place for place in there)]


def _lines(cells: Sequence[Cell], table: Table) -> list[list[str]]:
    """Return the cells' texts; without a completed run, the first column after the names has the reason."""
    lines: list[list[str]] = []
    for cell in cells:
        columns = list(_columns(cell.study, table).values())
        line = [filled(cell, column) for column in columns]
        if why := cell.failure():
            place = next((i for i, column in enumerate(columns) if not is_name(cell.study, column)), 0)
            line[place:] = [f"failed: {why}", *[NOTHING] * (len(line) - place - 1)]
        lines.append(line)
    return lines


def _title(cells: Sequence[Cell], table: Table, places: Iterable[Sequence[str]]) -> str:
    """Return the title of a table, with the values of its first job filled in."""
    first = next(at for at in map(cells[0].study.named, places) if cells[0].at.items() <= at.items())
    return filled(replace(cells[0], at=first), table.title)


def draw(study: Study, about: Figure, runs: Runs) -> Drawn:
    """Draw the figure of a study in the current style, with intervals as error bars."""
    import matplotlib.pyplot as plt

    panels = _places(study, about.panels)
    across = min(4, len(panels))
    down = -(-len(panels) // across)
    figure, axes = plt.subplots(down, across, figsize=about.size, squeeze=False, sharex=down > 1, layout="constrained")
    for number, (axis, panel) in enumerate(zip(axes.flat, panels, strict=False)):
        _draw_panel(axis, study, about, runs, panel)
        axis.set(title=", ".join(panel.values()), ylabel=(about.ylabel or about.y) * (number % across == 0))
        axis.set(xlabel=(about.xlabel or about.x) * (number + across >= len(panels)))
    axes[0, 0].legend(frameon=False, fontsize=7 if len(panels) > 1 else None)
    return figure


def _draw_panel(axis: Axes, study: Study, about: Figure, runs: Runs, panel: Mapping[str, str]) -> None:
    names = list(study.axes[about.x])
    numeric = all(name.replace(".", "", 1).isdigit() for name in names)
    at = {name: float(name) if numeric else float(i) for i, name in enumerate(names)}
    width = 0.8 / len(study.axes[about.lines])
    for i, line in enumerate(study.axes[about.lines]):
        found: dict[float, Estimate] = {}
        for name, x in at.items():
            value = Cell(study, runs, {**panel, about.lines: line, about.x: name}).value(about.y)
            if isinstance(value, Samples) and (estimate := value.estimate()) is not None:
                found[x + width * i * (about.kind == "bar")] = estimate
        y = [each.value for each in found.values()]
        below = [each.value - each.low for each in found.values()]
        above = [each.high - each.value for each in found.values()]
        whole = [below, above] if y and not any(map(math.isnan, below)) else None
        colour, form = about.styles.get(line, [f"C{i}", "o-"])
        if about.kind == "bar":
            axis.bar(list(found), y, width, yerr=whole, color=colour, label=line)
        elif whole:
            axis.errorbar(list(found), y, whole, fmt=form, color=colour, label=line, capsize=3)
        else:
            axis.plot(list(found), y, form, color=colour, label=line, ms=4)
    for letter in "xy":
        if about.scale in ("log", f"log {letter}"):
            axis.set(**{f"{letter}scale": "log"})
    if about.scale in ("linear", "log x") and axis.dataLim.y0 >= 0:
        axis.set(ylim=(0, None))
    axis.set_xticks(list(at.values()), names)
