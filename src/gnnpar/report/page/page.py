"""report.html: all results of `compare` on one page, with scripts and styles inside."""

from __future__ import annotations

import base64
import datetime
import gzip
import json
from collections.abc import Mapping
from importlib import resources
from itertools import islice
from pathlib import Path

from gnnpar.files import Json, JsonDict, JsonObject, require_writable, write_text_whole
from gnnpar.report import colours, curves
from gnnpar.report import formatting as words
from gnnpar.report.answer import at_a_glance
from gnnpar.report.comparison import Comparison
from gnnpar.report.emphasis import OTHER, strategies_in_colour
from gnnpar.report.groups import Group, timed_groups
from gnnpar.report.page import plots, tables
from gnnpar.report.rows import table_rows
from gnnpar.report.runs import no_speed
from gnnpar.settings import ConfigError

SCHEDULE = "schedule.svg"  # file name of a run's picture of its schedule

STACKED = {"time": colours.TIME, "bytes": colours.BYTES, "memory": colours.MEMORY}  # sections with parts that add up


def write_page(comparison: Comparison, file: Path, *, headline: str = "") -> Path:
    """Write the page; its folder is made when missing. headline: text above the answers."""
    if file.is_dir():
        raise ConfigError(f"--html {file} is a folder; name a file, such as {file / 'report.html'}")
    require_writable(file)
    file.parent.mkdir(parents=True, exist_ok=True)
    write_text_whole(file, render(comparison, headline))
    return file


def render(comparison: Comparison, headline: str = "") -> str:
    """Return the page as text."""
    import jinja2
    from plotly.offline import get_plotlyjs

    environment = jinja2.Environment(
        autoescape=True, trim_blocks=True, lstrip_blocks=True, undefined=jinja2.StrictUndefined
    )
    template = environment.from_string(_file("report.html.j2"))
    return template.render(
        **context(comparison),
        headline=headline,
        style=_file("report.css"),
        script=_file("report.js"),
        plotly=packed(get_plotlyjs()),
    )


def packed(script: str) -> str:
    """Return a script as gzip in base64, less than half of its size; report.js unpacks it."""
    return base64.b64encode(gzip.compress(script.encode(), mtime=0)).decode("ascii")


def _file(name: str) -> str:
    return resources.files("gnnpar.report.page").joinpath(name).read_text(encoding="utf-8")


def context(comparison: Comparison) -> JsonDict:
    """Return the variables of the template."""
    chosen = strategies_in_colour(comparison.groups, comparison.baseline)
    tint = colours.of_strategies(chosen, [row["strategy"] for row in comparison.rows])
    names = curves.tasks(comparison.groups)
    by_task = {arena: [group for group in comparison.groups if group.arena == arena] for arena in names}
    specs, sections = pictures(comparison, by_task, names, tint)
    keys, values = curves.varying(comparison.groups)
    headings, group_rows = tables.group_rows(comparison.groups, comparison.baseline, tint)
    columns = tables.run_columns(comparison.rows)
    return {
        "title": "gnnpar: " + ", ".join(dict.fromkeys(names.values())) if len(names) < 4 else "gnnpar comparison",
        "comparison": comparison,
        "answers": [(names[arena], at_a_glance(groups, comparison.baseline)) for arena, groups in by_task.items()],
        "facts": facts(comparison),
        "provenances": list(dict.fromkeys(f"{row['provenance']} {row['links']}".strip() for row in comparison.rows)),
        "grey": any(no_speed(row) for row in comparison.rows),
        "busy": words.BUSY if any(row["busy"] or row["ratio_busy"] for row in comparison.rows) else "",
        "headings": headings,
        "group_rows": [(names[arena], [r for r in group_rows if r.group.arena == arena]) for arena in names],
        "targets": {names[group.arena]: group.target for group in comparison.groups if group.target is not None},
        "columns": columns,
        "runs": [tables.run_row(row, columns, tint) for row in comparison.rows],
        "choices": {
            name: sorted({str(row[name]) for row in comparison.rows}) for name in ("strategy", "model", "dataset")
        },
        "keys": keys,
        "differing": [(group, cells) for group, cells in zip(comparison.groups, values, strict=True)],
        "sections": sections,
        "keys_of": {section: legend(specs, section, tints) for section, tints in STACKED.items()},
        "strategies": list(dict.fromkeys(row["strategy"] for row in comparison.rows if row["epoch_seconds"])),
        "schedules": schedules(comparison),
        "specs": _json(specs),
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


def pictures(
    comparison: Comparison, by_task: Mapping[str, list[Group]], names: Mapping[str, str], tint: Mapping[str, str]
) -> tuple[JsonDict, dict[str, list[JsonDict]]]:
    """Return specifications by identifier, and the pictures of each section."""
    specs: JsonDict = {}
    sections: dict[str, list[JsonDict]] = {}
    speeds = speedups(comparison, tint)
    for i, (arena, groups) in enumerate(by_task.items()):
        drawn = {
            "speed-up": speeds.get(arena),
            "time": plots.stacked(groups, curves.breakdown_of, colours.TIME, "seconds", timed=True),
            "bytes": plots.stacked(groups, curves.bytes_of, colours.BYTES, "bytes"),
            "layers": plots.layers(groups),
            "memory": plots.stacked(groups, _memory, colours.MEMORY, "bytes"),
            "accuracy against time": plots.accuracy(groups, tint, "seconds"),
            "accuracy against bytes": plots.accuracy(groups, tint, "bytes"),
        }
        for section, spec in drawn.items():
            if spec:
                name = f"{section.replace(' ', '-')}-{i}"
                specs[name] = spec
                first = groups[0].first
                place = {"id": name, "task": names[arena], "model": first["model"], "dataset": first["dataset"]}
                sections.setdefault(section, []).append(place)
    return specs, sections


_MOST_BASELINES = 24  # each has a picture of all others


def speedups(comparison: Comparison, tint: Mapping[str, str]) -> dict[str, JsonDict]:
    """Return arena -> baseline -> picture, for the reader to choose from. Only the requested one may be unfair."""
    pictured: dict[str, JsonDict] = {}
    names = dict.fromkeys([comparison.baseline, *(row["strategy"] for row in comparison.rows)])
    for baseline in islice(names, _MOST_BASELINES):
        groups = comparison.groups
        if baseline != comparison.baseline:
            groups = timed_groups(comparison.results, table_rows(comparison.results, baseline=baseline))
        for arena in {group.arena for group in groups if group.speedup is not None}:
            here = [group for group in groups if group.arena == arena]
            pictured.setdefault(arena, {})[baseline] = plots.speedup(here, baseline, tint)
    return pictured


def legend(specs: JsonObject, section: str, tints: Mapping[str, str]) -> list[tuple[str, str]]:
    """Return names and colours of the parts in the pictures of a section."""
    drawn = [spec for name, spec in specs.items() if name.startswith(f"{section}-")]
    shown = {trace.get("name") for spec in drawn for trace in spec["data"]}
    named = [(plots.LABELS.get(part, part), tint) for part, tint in ({**tints} | {OTHER: colours.OTHER}).items()]
    return [(name, tint) for name, tint in named if name in shown]


def _memory(group: Group) -> dict[str, float] | None:
    return curves.live_bytes(group, list(colours.MEMORY))


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


def _json(data: Json) -> str:
    """Return JSON that cannot end its script element."""
    return json.dumps(data, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")
