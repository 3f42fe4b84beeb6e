"""Rows, groups, warnings and notes of some runs, computed once for all outputs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from gnnpar.files import JsonDict
from gnnpar.report import groups as grouping
from gnnpar.report.answer import answers
from gnnpar.report.fairness import remarks, warnings
from gnnpar.report.groups import MARGIN, Group
from gnnpar.report.rows import table_rows
from gnnpar.report.runs import Result
from gnnpar.report.sessions import time_again


@dataclass(frozen=True, eq=False)
class Comparison:
    """Runs, one row each; groups of them; what is unfair about it; what differs besides; what the
    accuracies do not show."""

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
        """What to use, why, and what is not settled: a line or two a task."""
        return answers(self.groups, self.baseline)

    @property
    def commands(self) -> list[str]:
        """How to time again what was timed in another session than its baseline."""
        return time_again(self.results, self.baseline)

    @property
    def repeated(self) -> bool:
        return grouping.repeated(self.groups)

    @property
    def stamped(self) -> bool:
        """Do ratios between unequal runs stand in it?"""
        return any(row["why_no_ratio"] == "unfair" for row in self.rows)


def compare(
    results: Sequence[tuple[Path, Result]],
    *,
    baseline: str = "single",
    allow_unfair: bool = False,
    margin: float = MARGIN,
    target: float | None = None,
) -> Comparison:
    """Rows, groups and warnings. margin: points of accuracy; target: validation metric, by default rule 13's."""
    rows = table_rows(results, baseline=baseline, allow_unfair=allow_unfair)
    groups = grouping.grouped(results, rows, baseline=baseline, margin=margin, target=target)
    everything = [result for _, result in results]
    unfair, besides = warnings(everything, baseline), remarks(everything)
    return Comparison(results, rows, groups, unfair, besides, grouping.notes(groups), baseline, allow_unfair, margin)
