"""Rows, groups, warnings and notes of some runs, computed once for all outputs. A row has the cells of one run."""

from __future__ import annotations

import os
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from gnnpar.config.jobs import Job
from gnnpar.files import JsonDict
from gnnpar.report import runs as reading
from gnnpar.report.answer import answers
from gnnpar.report.fairness import base_of, baselines, differences, ranked_baselines, ratio_of, remarks, warnings
from gnnpar.report.groups import MARGIN, Group, grouped
from gnnpar.report.runs import Result, by, collect, configuration_of, title
from gnnpar.report.statistics import FEWEST_BLOCKS, FEWEST_SEEDS
from gnnpar.settings import ConfigError
from gnnpar.track.jsonl import FILE, read_rows
from gnnpar.track.text import counted
from gnnpar.training.result.result import epoch_time

if TYPE_CHECKING:
    import pandas as pd

CLAIMS = ("not inferior", "inferior", "inconclusive")  # verdicts supported by enough runs


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
    def repeated(self) -> bool:
        """Whether any configuration has several seeds or blocks."""
        return any(len({(row["seed"], row["block"]) for row in group.rows}) > 1 for group in self.groups)

    @property
    def stamped(self) -> bool:
        """Whether there are ratios between unequal runs."""
        return not all(group.is_fair for group in self.groups)

    @property
    def commands(self) -> list[str]:
        """Lines on how to time runs in the same session as their baseline."""
        bases = {id(run) for run in baselines(self.baseline, [result for _, result in self.results])}
        jobs: dict[Path, dict[str, None]] = {}
        alone: dict[str, None] = {}
        for folder, result in self.results:
            unequal = [(place, differences(result, base)) for place, base in self.results if id(base) in bases]
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
            again = f"to time {', '.join(alone)} beside {self.baseline}"
            lines.append(f"{again}: train both in one sweep, gnnpar train -m strategy=...")
        return lines


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
    groups = grouped(results, rows, baseline=baseline, margin=margin, target=target)
    everything = [result for _, result in results]
    unfair, besides = warnings(everything, baseline), remarks(everything)
    return Comparison(results, rows, groups, unfair, besides, notes(groups), baseline, allow_unfair, margin)


def table_rows(results: Sequence[tuple[Path, Result]], *, baseline: str, allow_unfair: bool = False) -> list[JsonDict]:
    """Return the cells; ratio = epoch time of the baseline / epoch time of the run, in the same block and session."""
    everything = [result for _, result in results]
    ranked = ranked_baselines(baseline, everything)
    bases = {key: base_of(runs, ranked) for key, runs in by(everything, configuration_of).items()}
    rows: list[JsonDict] = []
    for (folder, result), changed in zip(results, reading.distinguishing_settings(everything), strict=True):
        ratio, why, ratio_busy = ratio_of(result, bases[configuration_of(result)], baseline, allow_unfair)
        metric, fidelity, peak = result["metric"], result.get("fidelity"), result["memory_bytes"]["peak"]
        row = {
            "strategy": result["strategy"],
            "variant": changed[0],
            "settings": changed[1],
            "exactness": reading.exactness_of(result),
            "model": reading.model_of(result),
            "dataset": reading.dataset_of(result),
            "seed": result["seed"],
            "block": result.get("block"),
            "world_size": result["world_size"],
            "threads_per_rank": result["threads_per_rank"],
            "epoch_seconds": epoch_time(result),
            "ratio": ratio,
            "bytes_per_epoch": result["bytes_per_epoch"]["total"],
            "memory_peak_bytes": max((nbytes for nbytes in peak or () if nbytes is not None), default=None),
            "metric": metric["name"],
            "val": metric["val"],
            "test": metric["test"],
            "test_at_best_val": metric["test_at_best_val"],
            "gradient_cosine": fidelity and fidelity["cosine"]["mean"],
            "gradient_error": fidelity and fidelity["relative_error"]["mean"],
            "provenance": result["provenance"],
            "links": reading.links(result),
            "oversubscribed": result["oversubscribed"],
            "status": result["status"],
            "error": result["error"],
            "why_no_ratio": why,
            "busy": reading.is_busy(result),
            "ratio_busy": ratio_busy,
            "folder": str(folder),
        }
        rows.append(row)
    return rows


def notes(groups: Sequence[Group]) -> list[str]:
    """Return a line for each task with epochs of many steps in some rows only, with too few runs, or with a negative
    control that is absent or passes."""
    lines = []
    for here in by(groups, lambda group: group.arena).values():
        task = f"{here[0].first['dataset']}/{here[0].first['model']}"
        batches = dict.fromkeys(group.first["strategy"] for group in here if _takes_many_steps(group))
        if batches and not all(map(_takes_many_steps, here)):
            lines.append(f"{task}: an epoch of {', '.join(batches)} is many steps: compare time to target, not epochs")
        rivals = [group for group in here if not group.control]
        if few := too_few(rivals):
            lines.append(f"{task}: {few}")
        claims = [group for group in rivals if group.verdict in CLAIMS]
        if not claims:
            continue
        controls = {group.control_verdict for group in claims}
        if "not inferior" in controls:
            lines.append(
                f"{task}: dataset unfit for the claim: the negative control (codec=drop) is not inferior either"
            )
        elif "none" in controls:
            lines.append(f"{task}: no negative control, so equal accuracy proves little; train codec=drop beside it")
        elif controls & {"inconclusive", "unpaired", "not enough runs"}:
            lines.append(f"{task}: the negative control is inconclusive; train more seeds")
    return list(dict.fromkeys(lines))  # list a line once for two settings of a task


def too_few(groups: Sequence[Group]) -> str:
    """Return a line on a verdict or interval that needs more runs, or ''."""
    seeds = [g.difference.n for g in groups if g.difference and g.verdict == "not enough runs"]
    blocks = [g.speedup.n for g in groups if g.speedup and g.speedup.n < FEWEST_BLOCKS]
    lines = []
    if seeds:
        lines.append(f"{counted(max(seeds), 'seed')}; a verdict on accuracy needs {FEWEST_SEEDS}")
    if blocks:
        block = "undisturbed block" if any(g.time_busy for g in groups) else "block"
        lines.append(f"{counted(max(blocks), block)}; an interval of a speed-up needs {FEWEST_BLOCKS}")
    return "not enough runs: " + ", and ".join(lines) if lines else ""


def _takes_many_steps(group: Group) -> bool:
    """Return True if a step sees a batch, not all training nodes."""
    return bool((group.results[0].get("settings", {}).get("strategy") or {}).get("batch_size"))


def load(*folders: str | os.PathLike[str], baseline: str = "single", allow_unfair: bool = False) -> pd.DataFrame:
    """Return one row per run below the folders (also patterns, 'multirun/**'): the columns of `gnnpar compare`, then
    every setting as settings.KEY. Times in seconds, sizes in bytes; `ratio` = epoch time of the baseline / of the run.
    """
    import pandas as pd

    results = collect([folder for pattern in folders or (".",) for folder in reading.folders_of(pattern)])
    rows = table_rows(results, baseline=baseline, allow_unfair=allow_unfair)
    settings = [reading.flat(result.get("settings", {}), "settings.") for _, result in results]
    return pd.DataFrame([row | setting for row, setting in zip(rows, settings, strict=True)])


def history(run: str | os.PathLike[str]) -> pd.DataFrame:
    """Return metrics.jsonl of a run folder, one row per epoch; names and units as in gnnpar.track.keys."""
    import pandas as pd

    rows = read_rows(Path(run))
    if not rows:
        raise ConfigError(f"no epoch in {Path(run) / FILE}; give the folder of a run that trained")
    return pd.DataFrame(rows)
