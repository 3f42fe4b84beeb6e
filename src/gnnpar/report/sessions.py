"""Runs that were timed in another session than their baseline, and the command that times them again side by side."""

from __future__ import annotations

import os
import shlex
from collections.abc import Sequence
from pathlib import Path

from gnnpar.config.jobs import Job
from gnnpar.report.fairness import baselines, differences
from gnnpar.report.runs import Result, title


def time_again(results: Sequence[tuple[Path, Result]], baseline: str) -> list[str]:
    """A line a sweep, as one where a part was resumed; what does not lie in one sweep has a line of its own."""
    bases = {id(run) for run in baselines(baseline, [result for _, result in results])}
    jobs: dict[Path, dict[str, None]] = {}
    alone: dict[str, None] = {}
    for folder, result in results:
        unequal = [(place, differences(result, base)) for place, base in results if id(base) in bases]
        if result["status"] != "completed" or any(not names for _, names in unequal):
            continue
        pair = next(([folder, place] for place, names in unequal if names == ["session"]), None)
        if pair is None:
            continue
        sweeps = {_sweep_of(place) for place in pair}
        sweep = next(iter(sweeps)) if len(sweeps) == 1 else None
        if sweep is None:
            alone[title(result)] = None
        else:
            jobs.setdefault(sweep, {}).update(dict.fromkeys(str(place.relative_to(sweep)) for place in pair))
    lines = []
    for sweep, names in jobs.items():
        folders = " ".join(shlex.quote(os.path.relpath(sweep / name)) for name in names)
        lines.append(f"to time them side by side: remove {folders}, and give the command of that sweep again")
    if alone:
        lines.append(
            f"to time {', '.join(alone)} beside {baseline}: train both in one sweep, gnnpar train -m strategy=..."
        )
    return lines


def _sweep_of(folder: Path) -> Path | None:
    job = Job.read(folder)
    return None if job is None else job.sweep
