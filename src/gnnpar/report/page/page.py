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

from gnnpar.files import JsonDict, require_writable, write_text_atomic
from gnnpar.report import colours, curves, plots
from gnnpar.report import formatting as words
from gnnpar.report.comparison import Comparison
from gnnpar.report.emphasis import strategies_in_colour
from gnnpar.report.groups import Group, timed_groups
from gnnpar.report.page import tables
from gnnpar.report.rows import table_rows
from gnnpar.report.runs import no_speed
from gnnpar.settings import ConfigError

SCHEDULE = "schedule.svg"  # file name of a run's picture of its schedule


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
    template = environment.from_string(_file("report.html.j2"))
    said = [_headline(headline, r"(?<=\.) ")] if headline else []
    said += [_headline(line, r" (?=\()|(?<=\.) ") for line in comparison.answers]
    return template.render(**context(comparison), said=said, style=_file("report.css"), script=_file("report.js"))


def _headline(line: str, end: str) -> tuple[str, str]:
    """Split a line into its statement and its evidence. end: pattern of the split."""
    first, *rest = re.split(end, line, maxsplit=1)
    return first, " ".join(rest)


def _file(name: str) -> str:
    return resources.files("gnnpar.report.page").joinpath(name).read_text(encoding="utf-8")


class Figure(NamedTuple):
    """The picture of a task, or one for each baseline. place: index of the task."""

    task: str
    place: int
    group: Group
    pictures: Mapping[str, plots.Picture | plots.Curves]


def context(comparison: Comparison) -> JsonDict:
    """Return the variables of the template."""
    chosen = strategies_in_colour(comparison.groups, comparison.baseline)
    tint = colours.of_strategies(chosen, [row["strategy"] for row in comparison.rows])
    names = curves.tasks(comparison.groups)
    by_arena = {arena: [group for group in comparison.groups if group.arena == arena] for arena in names}
    keys, values = curves.varying(comparison.groups)
    headings, group_rows = tables.group_rows(comparison.groups, comparison.baseline, tint)
    columns = tables.run_columns(comparison.rows)
    return {
        "title": "gnnpar: " + ", ".join(dict.fromkeys(names.values())) if len(names) < 4 else "gnnpar comparison",
        "comparison": comparison,
        "facts": facts(comparison),
        "provenances": list(dict.fromkeys(f"{row['provenance']} {row['links']}".strip() for row in comparison.rows)),
        "grey": any(no_speed(row) for row in comparison.rows),
        "busy": words.BUSY if any(row["busy"] or row["ratio_busy"] for row in comparison.rows) else "",
        "headings": headings,
        "group_rows": [
            (names[arena], [r for r in group_rows if r.group in every]) for arena, every in by_arena.items()
        ],
        "targets": {names[group.arena]: group.target for group in comparison.groups if group.target is not None},
        "columns": columns,
        "runs": [tables.run_row(row, columns, tint) for row in comparison.rows],
        "choices": {
            name: sorted({str(row[name]) for row in comparison.rows}) for name in ("strategy", "model", "dataset")
        },
        "keys": list(zip(keys, zip(*values, strict=True), strict=True)),
        "sections": sections(comparison, names, by_arena, tint),
        "strategies": list(dict.fromkeys(row["strategy"] for row in comparison.rows if row["epoch_seconds"])),
        "schedules": schedules(comparison),
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


def sections(
    comparison: Comparison,
    names: Mapping[str, str],
    by_arena: Mapping[str, Sequence[Group]],
    tint: Mapping[str, str],
) -> dict[str, list[Figure]]:
    """Return the pictures of each section, one per task that has data."""
    found: dict[str, list[Figure]] = {}
    over = overall(comparison)
    for place, (arena, groups) in enumerate(by_arena.items()):
        here = {name: [g for g in every if g.arena == arena] for name, every in over.items()}
        drawn = {name: {"": picture} for name, picture in plots.pictures(groups, tint, comparison.baseline).items()}
        drawn["speed-up"] = {name: plots.speedups(groups, tint, name) for name, groups in here.items()}
        for name, pictures in drawn.items():
            if known := {base: picture for base, picture in pictures.items() if picture is not None}:
                found.setdefault(name, []).append(Figure(names[arena], place, groups[0], known))
    return found


_MOST_BASELINES = 24  # each has a picture of all others


def overall(comparison: Comparison) -> dict[str, list[Group]]:
    """Return baseline -> groups with speed-ups over it. Only the requested baseline may be unfair."""
    names = dict.fromkeys([comparison.baseline, *(row["strategy"] for row in comparison.rows)])
    return {
        name: comparison.groups
        if name == comparison.baseline
        else timed_groups(comparison.results, table_rows(comparison.results, baseline=name))
        for name in islice(names, _MOST_BASELINES)
    }


def schedules(comparison: Comparison) -> list[tuple[str, str]]:
    """Return the pictures of schedules, one per group: (caption, data address)."""
    pictured = []
    for group in comparison.groups:
        for row in group.rows:
            file = Path(row["folder"]) / SCHEDULE
            if file.is_file():
                data = base64.b64encode(file.read_bytes()).decode("ascii")
                pictured.append((f"{group.name}, {row['model']}", f"data:image/svg+xml;base64,{data}"))
                break
    return pictured
