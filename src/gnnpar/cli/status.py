"""`gnnpar status FOLDER ...`: which jobs of a sweep are done, which failed and why, which are missing."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from gnnpar.cli.arguments import Arguments
from gnnpar.config.jobs import MANIFEST, Manifest, count, in_words
from gnnpar.report.runs import below
from gnnpar.settings import ConfigError
from gnnpar.track.console import say
from gnnpar.track.text import one_line


def run(argv: list[str]) -> int:
    """0: every planned job is done; 1: some are not."""
    parser = Arguments("gnnpar status", description="What is done of a sweep, and what not, and why.")
    parser.add_argument("folders", nargs="+", type=Path, metavar="FOLDER")
    parser.add_argument("--json", action="store_true", help="every job with its state, as JSON")
    options = parser.parse_args(argv)
    sweeps = find(options.folders)
    states = [sweep.states() for sweep in sweeps]
    if options.json:
        sweeps_and_jobs = [
            {
                "folder": str(sweep.folder),
                "counts": count(state),
                "jobs": [
                    {"folder": sweep.jobs[k].folder, "overrides": list(sweep.jobs[k].overrides), "key": k}
                    | {"state": how, "why": why or None}
                    for k, (how, why) in state.items()
                ],
            }
            for sweep, state in zip(sweeps, states, strict=True)
        ]
        sys.stdout.write(json.dumps(sweeps_and_jobs, indent=1) + "\n")
    else:
        for sweep, state in zip(sweeps, states, strict=True):
            say(f"{one_line(sweep.folder)}: {in_words(count(state))}")
            for key, (how, why) in state.items():
                if how != "done":
                    say(f"  {sweep.jobs[key].folder:>4} {how}{why and ': ' + why}  ({sweep.title(key)})")
    return 0 if all(how == "done" for state in states for how, _ in state.values()) else 1


def find(folders: Sequence[Path]) -> list[Manifest]:
    """The sweeps in and below the folders."""
    files: dict[Path, Path] = {}
    for folder in folders:
        if not folder.is_dir():
            raise ConfigError(f"{folder} is no folder; give the folder of a sweep")
        for file in below(folder, MANIFEST):
            files.setdefault(Path(os.path.realpath(file)), file)
    if not files:
        where = ", ".join(map(str, folders))
        raise ConfigError(f"no {MANIFEST} below {where}; give the folder of a sweep (gnnpar train -m ...)")
    return [Manifest.read(file.parent) for file in files.values()]
