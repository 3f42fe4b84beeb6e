"""`gnnpar status FOLDER ...`: list done, failed and missing jobs of a sweep."""

from __future__ import annotations

import json
import os
import sys
from argparse import ArgumentParser
from collections.abc import Sequence
from pathlib import Path

from gnnpar.config.jobs import Job, count, in_words, jobs_below, record_of, titles
from gnnpar.settings import ConfigError
from gnnpar.track.console import say
from gnnpar.track.text import one_line


def run(argv: list[str]) -> int:
    """Return 0 if every planned job is done, else 1."""
    parser = ArgumentParser("gnnpar status", description="List done, failed and missing jobs of a sweep, with reasons.")
    parser.add_argument("folders", nargs="+", type=Path, metavar="FOLDER")
    parser.add_argument("--json", action="store_true", help="every job with its state, as JSON")
    options = parser.parse_args(argv)
    sweeps = find(options.folders)
    states = {sweep: {job.folder: job.state() for job in jobs} for sweep, jobs in sweeps.items()}
    counts = {sweep: count([how for how, _ in state.values()]) for sweep, state in states.items()}
    if options.json:
        told = [
            {"folder": one_line(sweep), "counts": counts[sweep], "jobs": [record_of(job) for job in jobs]}
            for sweep, jobs in sweeps.items()
        ]
        sys.stdout.write(json.dumps(told, indent=1) + "\n")
    else:
        for sweep, jobs in sweeps.items():
            names = titles(jobs)
            say(f"{one_line(sweep)}: {in_words(counts[sweep])}")
            for folder, (how, why) in states[sweep].items():
                if how != "done":
                    say(f"  {one_line(folder):>4} {how}{why and ': ' + why}  ({names[folder]})")
    return 0 if all(how == "done" for state in states.values() for how, _ in state.values()) else 1


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
