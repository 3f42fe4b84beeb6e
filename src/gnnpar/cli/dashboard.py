"""`gnnpar dashboard FOLDER ...`: a wandb workspace and a report that compare the runs below the folders.

They are specifications made offline, built by the `wandb-workspaces` package (extra [dashboard]). A panel shows
only metrics that the runs have logged.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, Literal

from gnnpar.files import JsonDict, JsonObject, read_json, require_writable, write_text_atomic
from gnnpar.report.comparison import table_rows
from gnnpar.report.exports import Table, as_markdown
from gnnpar.report.runs import collect
from gnnpar.settings import ConfigError, config_errors
from gnnpar.track.console import complain, num_bytes, say, seconds
from gnnpar.track.jsonl import read_rows
from gnnpar.track.keys import BYTE_PHASES, PHASES
from gnnpar.track.text import one_line
from gnnpar.track.wandb import AXES, GIGABYTES, LINK, curves_over_cost, flat, load, reason


@dataclass(frozen=True)
class Panel:
    """One plot. `kind`: a line against `x`, or bars of the last values."""

    title: str
    y: tuple[str, ...]
    x: str = "epoch"
    kind: Literal["line", "bars"] = "line"


Built = Any  # Any: of wandb-workspaces, an optional extra

AGAINST = {"training seconds": "against_seconds", "gigabytes sent": "against_gigabytes"}
SECTIONS: dict[str, tuple[Panel, ...]] = {
    "Convergence": (
        Panel("training loss, by epoch", ("loss/train",)),
        Panel("validation, by epoch", ("metric/val",)),
        Panel("test, by epoch", ("metric/test",)),
        *(Panel(f"training loss, by {what}", (f"{name}/loss/train",), AXES[name]) for what, name in AGAINST.items()),
        *(Panel(f"validation, by {what}", (f"{name}/metric/val",), AXES[name]) for what, name in AGAINST.items()),
    ),
    "Time": (
        Panel("seconds an epoch", ("time/epoch_seconds",)),
        *(Panel(f"{phase} seconds an epoch", (f"time/{phase}_seconds",), kind="bars") for phase in PHASES),
        Panel("seconds with a transfer in flight", ("time/comm_total_seconds",), kind="bars"),
    ),
    "Communication": (
        Panel("gigabytes sent so far", (GIGABYTES,)),
        Panel("bytes an epoch", ("comm/total_bytes",), kind="bars"),
        *(Panel(f"{phase} bytes an epoch", (f"comm/{phase}_bytes",), kind="bars") for phase in BYTE_PHASES),
        Panel("messages an epoch", ("comm/messages",), kind="bars"),
    ),
    "Memory": (
        Panel("peak bytes by rank", ("memory/peak_bytes/*",), kind="bars"),
        Panel("live bytes by category", ("memory/live_bytes/*",), kind="bars"),
    ),
    "Fidelity": (
        Panel("cosine with the exact gradient", ("fidelity/cosine",)),
        Panel("relative error of the gradient", ("fidelity/relative_error",)),
    ),
}


def panels_for(logged: Iterable[str]) -> dict[str, list[Panel]]:
    """Return the sections without panels that no run has logged; `name/*` stands for every metric below it."""
    known = sorted(set(logged))
    sections: dict[str, list[Panel]] = {}
    for name, panels in SECTIONS.items():
        for panel in panels:
            y = tuple(m for wanted in panel.y for m in known if fnmatchcase(m, wanted))
            if y and (panel.kind == "bars" or panel.x in known):
                sections.setdefault(name, []).append(Panel(panel.title, y, panel.x, panel.kind))
    return sections


def workspace(sections: dict[str, list[Panel]], *, entity: str, project: str, study: str) -> Built:
    """Return a saved view of the study's runs, grouped by strategy."""
    import wandb_workspaces.workspaces as ws

    return ws.Workspace(
        entity=entity,
        project=project,
        name=f"gnnpar {study}",
        sections=[ws.Section(name=key, panels=[*map(plot, panels)], is_open=True) for key, panels in sections.items()],
        runset_settings=ws.RunsetSettings(filters=of_study(study), groupby=[ws.Metric("JobType")]),
    )


def report(sections: dict[str, list[Panel]], table: Table, *, entity: str, project: str, study: str) -> Built:
    """Return a report of the table and the same panels."""
    import wandb_workspaces.reports.v2 as wr

    blocks: list[Built] = [wr.MarkdownBlock(as_markdown(table).rstrip("\n"))]
    for name, panels in sections.items():
        # without entity and project, a run set belongs to the report's project
        runs = wr.Runset(name=study, filters=of_study(study), groupby=["JobType"])  # pyright: ignore[reportPrivateImportUsage]
        blocks += [wr.H2(name), wr.PanelGrid(runsets=[runs], panels=list(map(plot, panels)))]
    return wr.Report(  # pyright: ignore[reportPrivateImportUsage]
        project=project,
        entity=entity,
        title=f"gnnpar {study}",
        description="Strategies of a study, side by side",
        blocks=blocks,
    )


def of_study(study: str) -> Built:
    """Return a filter by study. Raises ValueError for characters that wandb's expressions do not allow."""
    from wandb_workspaces import expr

    if odd := "".join(sorted({c for c in study if c in "'\"\\=<>" or not c.isprintable()})):
        raise ValueError(f"study {one_line(study)}: {odd!a} cannot be in the name of a group that wandb filters by")

    return expr.And(expr.Metric("Group") == study)


def plot(panel: Panel) -> Built:
    import wandb_workspaces.reports.v2 as wr

    if panel.kind == "bars":
        return wr.BarPlot(title=panel.title, metrics=list(panel.y))
    return wr.LinePlot(title=panel.title, x=panel.x, y=list(panel.y), title_x=panel.x)


def specification(thing: Built) -> JsonDict:
    """Return a workspace or a report as the data for the server."""
    return thing._to_model().model_dump(mode="json", by_alias=True)


TABLE = ("strategy", "model", "dataset", "seed", "ranks", "time an epoch", "sent an epoch", "test at best validation")


def run(argv: list[str]) -> int:
    options = parse(argv)
    if importlib.util.find_spec("wandb_workspaces") is None:
        raise ConfigError("gnnpar dashboard needs wandb-workspaces; call pip install 'gnnpar[dashboard]'")
    with config_errors():
        load()
    if options.out is not None:
        require_writable(options.out)
    results = collect(options.folders)
    entity, project, study = place_of([folder for folder, _ in results], options.entity)
    if options.save and not (options.entity or os.environ.get("WANDB_ENTITY")):
        said = f" ({entity}, as the runs say)" if entity else ""
        raise ConfigError(f"--save: needs the owner of the project; give --entity NAME{said}")
    logged = {name for folder, _ in results for row in read_rows(folder) for name in flat(row) | curves_over_cost(row)}
    sections = panels_for(logged)
    where = {"entity": entity, "project": project, "study": study}
    with config_errors():
        things = {
            "workspace": workspace(sections, **where),
            "report": report(sections, table_of(results), **where),
        }
    if options.save:
        return save(things)
    text = json.dumps({name: specification(thing) for name, thing in things.items()}, indent=1) + "\n"
    if options.out is None:
        sys.stdout.write(text)
    else:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        write_text_atomic(options.out, text)
        count = sum(map(len, sections.values()))
        say(
            f"{count} panels for {study} in {project} -> {os.path.relpath(options.out)}; --save puts them on the server"
        )
    return 0


def save(things: Mapping[str, Built]) -> int:
    """Save on the server. Return 1 if it refuses one."""
    for name, thing in things.items():
        try:
            thing.save()
        except Exception as error:  # of the network, of the server, of wandb
            complain(f"{name} cannot be saved ({reason(error)})")
            return 1
        say(f"{name}: {thing.url}")
    return 0


def parse(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser("gnnpar dashboard", description="Make a wandb workspace and report of a study.")
    parser.add_argument("folders", nargs="+", type=Path, help="runs of one study, trained with tracker=wandb")
    parser.add_argument("--entity", default="", help="owner of the project, if the runs do not name it")
    parser.add_argument("--out", type=Path, help="write both specifications, as JSON, here instead of stdout")
    parser.add_argument("--save", action="store_true", help="create both on the server")
    return parser.parse_args(argv)


def place_of(folders: Sequence[Path], entity: str) -> tuple[str, str, str]:
    """Return the entity, project and study of the runs. Raise ConfigError if they differ."""
    files = [folder / LINK for folder in folders]
    if missing := [file.parent for file in files if not file.exists()]:
        raise ConfigError(f"{missing[0]} has no wandb run; train with tracker=wandb")
    try:
        links = [read_json(file) for file in files]
        said = [[str(link[name] or "") for name in ("entity", "project", "group")] for link in links]
        places = sorted({(entity or owner, project, study) for owner, project, study in said})
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{LINK} of a run cannot be read ({error}); train again with tracker=wandb") from error
    if len(places) > 1:
        raise ConfigError(f"the runs are of {len(places)} studies, {places[0]} and {places[1]}; give folders of one")
    if not places[0][2]:
        raise ConfigError("the runs have no group; train a sweep (-m), or set tracker.group")
    return places[0]


def table_of(results: Sequence[tuple[Path, JsonObject]]) -> Table:
    """Return a line for each completed run."""
    rows = [row for row in table_rows(results, baseline="single") if row["status"] == "completed"]
    cells = [
        [
            *(str(row[name]) for name in ("strategy", "model", "dataset", "seed", "world_size")),
            seconds(row["epoch_seconds"]) + (" (no statement on speed)" if row["oversubscribed"] else ""),
            num_bytes(row["bytes_per_epoch"]),
            "" if row["test_at_best_val"] is None else f"{row['test_at_best_val']:.4f}",
        ]
        for row in rows
    ]
    return Table(list(TABLE), [True] * len(TABLE), cells, set())
