"""`gnnpar status FOLDER ...`: list done, failed and missing jobs of a sweep."""

from __future__ import annotations

import json
import os
import sys
from argparse import ArgumentParser
from collections.abc import Sequence
from pathlib import Path

from gnnpar.config.jobs import Job, count, in_words, jobs_below, titles
from gnnpar.settings import ConfigError
from gnnpar.track.console import say
from gnnpar.track.text import one_line


def run(argv: list[str]) -> int:
    """Return 0 if every planned job is done, else 1."""
    parser = ArgumentParser("gnnpar status", description="List done, failed and missing jobs of a sweep, with reasons.")
    parser.add_argument("folders", nargs="+", type=Path, metavar="FOLDER")
    parser.add_argument("--json", action="store_true", help="every job with its state, as JSON")
    options = parser.parse_args(argv)
    told, done = [], True
    for sweep, jobs in find(options.folders).items():
        names, states = titles(jobs), {job.folder: job.state() for job in jobs}
        counts = count([state for state, _ in states.values()])
        done = done and counts.keys() == {"done"}
        rows = [
            {"folder": job.folder, "overrides": list(job.overrides), "key": job.key, "state": state, "why": why or None}
            for job, (state, why) in zip(jobs, states.values(), strict=True)
        ]
        told.append({"folder": one_line(sweep), "counts": counts, "jobs": rows})
        if not options.json:
            say(f"{one_line(sweep)}: {in_words(counts)}")
            for folder, (state, why) in states.items():
                if state != "done":
                    say(f"  {one_line(folder):>4} {state}{why and ': ' + why}  ({names[folder]})")
    if options.json:
        sys.stdout.write(json.dumps(told, indent=1) + "\n")
    return 0 if done else 1


def find(folders: Sequence[Path]) -> dict[Path, list[Job]]:
    """Return the sweeps in and below the folders with their jobs."""
    sweeps: dict[Path, list[Job]] = {}
    for folder in folders:
        if not folder.is_dir():
            raise ConfigError(f"{folder} is no folder; give the folder of a sweep")
        for job in jobs_below(folder):
            jobs = sweeps.setdefault(Path(os.path.relpath(job.sweep)), [])
            jobs += [job] if job not in jobs else []
    if not sweeps:
        where = ", ".join(map(str, folders))
        raise ConfigError(f"no jobs of a sweep below {where}; give the folder of a sweep (gnnpar train -m ...)")
    return sweeps
