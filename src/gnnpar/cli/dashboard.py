"""`gnnpar dashboard FOLDER ...`: a wandb workspace and a report that compare the runs below the folders."""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from gnnpar.files import JsonObject, read_json, require_writable, write_text_atomic
from gnnpar.report import dashboard
from gnnpar.report.comparison import table_rows
from gnnpar.report.exports import Table
from gnnpar.report.runs import collect
from gnnpar.settings import ConfigError, config_errors
from gnnpar.track.console import complain, num_bytes, say, seconds
from gnnpar.track.jsonl import read_rows
from gnnpar.track.wandb import LINK, curves_over_cost, flat, load, reason

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
    sections = dashboard.panels_for(logged)
    where = {"entity": entity, "project": project, "study": study}
    with config_errors():
        things = {
            "workspace": dashboard.workspace(sections, **where),
            "report": dashboard.report(sections, table_of(results), **where),
        }
    if options.save:
        return save(things)
    text = json.dumps({name: dashboard.specification(thing) for name, thing in things.items()}, indent=1) + "\n"
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


def save(things: Mapping[str, dashboard.Built]) -> int:
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
