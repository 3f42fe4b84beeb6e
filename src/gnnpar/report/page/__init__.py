"""report.html: all results of `compare` on one page, with scripts and styles inside."""

from __future__ import annotations

import base64
import datetime
import re
from collections.abc import Mapping, Sequence
from importlib import resources
from itertools import islice
from pathlib import Path
from typing import NamedTuple

from gnnpar.files import JsonDict, JsonObject, require_writable, write_text_atomic
from gnnpar.report import colours, curves, plots
from gnnpar.report import formatting as words
from gnnpar.report.comparison import Comparison, table_rows
from gnnpar.report.formatting import NOTHING
from gnnpar.report.groups import Group, timed_groups
from gnnpar.report.runs import no_speed, times_of
from gnnpar.settings import ConfigError

SCHEDULE = "schedule.svg"  # file name of a run's picture of its schedule
_MOST_BASELINES = 24  # each has a picture of all others
_ALWAYS = ("strategy", "model", "seed", "world_size", "epoch_seconds", "bytes_per_epoch", "status")
Tint = Mapping[str, str]  # strategy -> colour


def write_page(comparison: Comparison, file: Path, *, headline: str = "") -> Path:
    """Write the page, and its folder if missing. headline: sentences above the answers; the first is the largest."""
    if file.is_dir():
        raise ConfigError(f"--html {file} is a folder; name a file, such as {file / 'report.html'}")
    require_writable(file)
    file.parent.mkdir(parents=True, exist_ok=True)
    write_text_atomic(file, render(comparison, headline))
    return file


def render(comparison: Comparison, headline: str = "") -> str:
    """Return the page as text."""
    import jinja2

    environment = jinja2.Environment(
        autoescape=True, trim_blocks=True, lstrip_blocks=True, undefined=jinja2.StrictUndefined
    )
    folder = resources.files("gnnpar.report.page")
    template, style, script = (
        folder.joinpath(f"report.{kind}").read_text("utf-8") for kind in ("html.j2", "css", "js")
    )
    said = [_headline(headline, r"(?<=\.) ")] if headline else []
    said += [_headline(line, r" (?=\()|(?<=\.) ") for line in comparison.answers]
    return environment.from_string(template).render(**context(comparison), said=said, style=style, script=script)


def _headline(line: str, end: str) -> tuple[str, str]:
    """Split a line into its statement and its evidence. end: pattern of the split."""
    first, *rest = re.split(end, line, maxsplit=1)
    return first, " ".join(rest)


class Figure(NamedTuple):
    """The picture of a task, or one for each baseline. place: index of the task."""

    task: str
    place: int
    group: Group
    pictures: Mapping[str, plots.Picture | plots.Curves]


def context(comparison: Comparison) -> JsonDict:
    """Return the variables of the template."""
    rows, groups = comparison.rows, comparison.groups
    tint = colours.tints(groups, comparison.baseline)
    names = curves.tasks(groups)
    headings, of_groups = group_rows(groups, comparison.baseline, tint)
    columns = run_columns(rows)
    return {
        "title": "gnnpar: " + ", ".join(dict.fromkeys(names.values())) if len(names) < 4 else "gnnpar comparison",
        "comparison": comparison,
        "facts": facts(comparison),
        "provenances": list(dict.fromkeys(map(times_of, rows))),
        "grey": any(map(no_speed, rows)),
        "busy": words.BUSY if any(row["busy"] or row["ratio_busy"] for row in rows) else "",
        "headings": headings,
        "group_rows": [(name, [r for r in of_groups if r.group.arena == arena]) for arena, name in names.items()],
        "targets": {names[group.arena]: group.target for group in groups if group.target is not None},
        "columns": columns,
        "runs": [run_row(row, columns, tint) for row in rows],
        "choices": {name: sorted({str(row[name]) for row in rows}) for name in ("strategy", "model", "dataset")},
        "keys": curves.varying(groups),
        "sections": sections(comparison, names, tint),
        "strategies": list(dict.fromkeys(row["strategy"] for row in rows if row["epoch_seconds"])),
        "schedules": schedules(groups),
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
    }


def facts(comparison: Comparison) -> list[tuple[str, str]]:
    """Return names and values of facts on all runs; several values if the runs differ."""
    results = [result for _, result in comparison.results]
    named = {
        "hardware": [r["hardware"] for r in results],
        "commit": [r["commit"] or "installed package" for r in results],
        "torch": [r["versions"].get("torch") or "unknown" for r in results],
        "gnnpar": [r["versions"].get("gnnpar") or "unknown" for r in results],
        "epochs": [str(r["epochs"]) for r in results],
    }
    lines = [(name, " | ".join(dict.fromkeys(values))) for name, values in named.items()]
    return [*lines, ("baseline", comparison.baseline), ("margin", f"{comparison.margin:g} points")]


def sections(comparison: Comparison, names: Mapping[str, str], tint: Tint) -> dict[str, list[Figure]]:
    """Return the pictures of each section, one per task that has data. names: arena -> task."""
    found: dict[str, list[Figure]] = {}
    over = overall(comparison)
    for place, (arena, task) in enumerate(names.items()):
        here = {name: [g for g in every if g.arena == arena] for name, every in over.items()}
        groups = here[comparison.baseline]
        drawn = {name: {"": picture} for name, picture in plots.pictures(groups, tint, comparison.baseline).items()}
        drawn["speed-up"] = {name: plots.speedups(groups, tint, name) for name, groups in here.items()}
        for name, pictures in drawn.items():
            if known := {base: picture for base, picture in pictures.items() if picture is not None}:
                found.setdefault(name, []).append(Figure(task, place, groups[0], known))
    return found


def overall(comparison: Comparison) -> dict[str, list[Group]]:
    """Return baseline -> groups with speed-ups over it. Only the requested baseline may be unfair."""
    names = dict.fromkeys([comparison.baseline, *(row["strategy"] for row in comparison.rows)])
    return {
        name: comparison.groups
        if name == comparison.baseline
        else timed_groups(comparison.results, table_rows(comparison.results, baseline=name))
        for name in islice(names, _MOST_BASELINES)
    }


def schedules(groups: Sequence[Group]) -> list[tuple[str, str]]:
    """Return the pictures of schedules, one per group: (caption, data address)."""
    pictured = []
    for group in groups:
        files = (Path(row["folder"]) / SCHEDULE for row in group.rows)
        if file := next((file for file in files if file.is_file()), None):
            data = base64.b64encode(file.read_bytes()).decode("ascii")
            pictured.append((f"{group.name}, {group.first['model']}", f"data:image/svg+xml;base64,{data}"))
    return pictured


class Cell(NamedTuple):
    """A text, a smaller one below it, the classes of its style, and the reason if it is blank."""

    text: str
    below: str = ""
    style: str = ""
    why: str = ""


class GroupRow(NamedTuple):
    group: Group
    colour: str
    cells: dict[str, Cell]


def group_rows(groups: Sequence[Group], baseline: str, tint: Tint) -> tuple[list[str], list[GroupRow]]:
    """Return the headings of columns that are not empty, and the rows."""
    mixed = len({times_of(group.first) for group in groups}) > 1
    rows = [GroupRow(group, tint[group.first["strategy"]], _group_cells(group, baseline, mixed)) for group in groups]
    used = [name for name in rows[0].cells if any(row.cells[name].text not in (NOTHING, "") for row in rows)]
    return used, rows


def _group_cells(group: Group, baseline: str, mixed: bool) -> dict[str, Cell]:
    first, grey, table = group.first, "grey" if group.timeless else "", words.group_cells(group)
    ratio, interval = words.speedup_parts(group)
    details = [first["variant"], group.changed, first["exactness"], times_of(first) if mixed else ""]
    best = dict.fromkeys(group.best, " best")
    judged = not group.control and group.verdict not in ("", "baseline")
    style = f"text verdict-{group.verdict.replace(' ', '-')}" if judged else "text"
    return {
        "strategy": Cell(first["strategy"], " · ".join(filter(None, details)), "text"),
        "verdict": Cell(table["verdict"], f"control: {group.control_verdict}" if judged else "", style),
        **{name: Cell(table[name]) for name in ("ranks", "runs")},
        "epoch": Cell(table["epoch"], style=grey),
        f"x {baseline}": Cell(ratio, interval, grey + best.get("speedup", ""), group.why_no_speedup),
        **{name: Cell(table[name]) for name in ("sent/epoch", "peak/rank")},
        "test at best val, %": Cell(table["test at best val, %"], style=best.get("accuracy", "")),
        "difference": Cell(table["difference"], why=group.why_no_difference),
        "to target": Cell(table["to target"], "" if table["to target"] == NOTHING else table["sent to target"], grey),
        "gradient": Cell(table["cosine"], "" if table["error"] == NOTHING else f"error {table['error']}"),
    }


def run_columns(rows: Sequence[JsonObject]) -> list[tuple[str, str, bool]]:
    """Return the columns that are neither empty nor constant."""
    texts = {column: {words.run_text(row, column) for row in rows} for _, column, _ in words.RUN_COLUMNS}
    same = [name for name in ("dataset", "provenance") if len(texts[name]) == 1 and len(rows) > 1]
    return [c for c in words.RUN_COLUMNS if c[1] in _ALWAYS or (c[1] not in same and texts[c[1]] != {NOTHING})]


def run_row(row: JsonObject, columns: Sequence[tuple[str, str, bool]], tint: Tint) -> JsonDict:
    """Return the texts of the cells, and the exact values of result.json as attributes."""
    exact = {name: "" if value is None else value for name, value in row.items()}
    cells = [(column, words.run_text(row, column), is_text) for _, column, is_text in columns]
    return {"exact": exact, "cells": cells, "colour": tint[row["strategy"]], "grey": no_speed(row)}
