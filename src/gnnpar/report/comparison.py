"""Rows, groups, warnings and notes of some runs, computed once for all outputs."""

from __future__ import annotations

import os
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from gnnpar.config.jobs import Job
from gnnpar.files import JsonDict
from gnnpar.report import groups as grouping
from gnnpar.report.answer import answers
from gnnpar.report.fairness import baselines, differences, remarks, warnings
from gnnpar.report.groups import MARGIN, Group
from gnnpar.report.rows import table_rows
from gnnpar.report.runs import Result, title


@dataclass(frozen=True, eq=False)
class Comparison:
    """Runs, one row each, and their groups; lines on unfair ratios, other differences, limits of the accuracies."""

    results: Sequence[tuple[Path, Result]]
    rows: list[JsonDict]
    groups: list[Group]
    warnings: list[str]
    remarks: list[str]
    notes: list[str]
    baseline: str
    allow_unfair: bool
    margin: float

    @property
    def answers(self) -> list[str]:
        """One or two lines per task: the best strategy, why, and open questions."""
        return answers(self.groups, self.baseline)

    @property
    def commands(self) -> list[str]:
        """Commands to time runs in the same session as their baseline."""
        return _time_again(self.results, self.baseline)

    @property
    def repeated(self) -> bool:
        return grouping.repeated(self.groups)

    @property
    def stamped(self) -> bool:
        """Whether there are ratios between unequal runs."""
        return any(row["why_no_ratio"] == "unfair" for row in self.rows)


def compare(
    results: Sequence[tuple[Path, Result]],
    *,
    baseline: str = "single",
    allow_unfair: bool = False,
    margin: float = MARGIN,
    target: float | None = None,
) -> Comparison:
    """Return rows, groups and warnings. margin: points of accuracy; target: validation metric, by default rule 13's."""
    rows = table_rows(results, baseline=baseline, allow_unfair=allow_unfair)
    groups = grouping.grouped(results, rows, baseline=baseline, margin=margin, target=target)
    everything = [result for _, result in results]
    unfair, besides = warnings(everything, baseline), remarks(everything)
    return Comparison(results, rows, groups, unfair, besides, grouping.notes(groups), baseline, allow_unfair, margin)


def _time_again(results: Sequence[tuple[Path, Result]], baseline: str) -> list[str]:
    """Return lines on how to time runs in the same session as their baseline."""
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
        sweep, *others = {job and job.sweep for job in map(Job.read, pair)}
        if sweep is None or others:
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
