"""Rows, groups, warnings and notes of some runs, computed once for all outputs. A row has the cells of one run.

`answers` states the verdict of each task in one or two sentences, with the evidence.
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from gnnpar.config.jobs import Job
from gnnpar.files import JsonDict
from gnnpar.report import curves
from gnnpar.report import formatting as words
from gnnpar.report import runs as reading
from gnnpar.report.fairness import base_of, baselines, differences, ranked_baselines, ratio_of, remarks, warnings
from gnnpar.report.groups import MARGIN, Group, grouped
from gnnpar.report.runs import Result, by, collect, configuration_of, is_busy, title
from gnnpar.report.statistics import FEWEST_BLOCKS, FEWEST_SEEDS
from gnnpar.settings import ConfigError
from gnnpar.track.console import num_bytes, seconds
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


_SURE = 0.2  # relative error above which a prediction counts as misleading


def answers(groups: Sequence[Group], baseline: str) -> list[str]:
    """Return one line per task, and another if `tag` did not choose the fastest."""
    names = curves.tasks(groups)
    lines = []
    for arena, name in names.items():
        rivals = [group for group in groups if group.arena == arena and not group.control and group.completed]
        if len(rivals) > 1:
            lines.append(f"{name}: {_answer(rivals, baseline)}")
            lines += [f"{name}: {line}" for line in _tag(rivals)]
    return lines


def _answer(rivals: Sequence[Group], baseline: str) -> str:
    meaningful = [group for group in rivals if group.epoch_seconds is not None and not group.timeless]
    if not meaningful:
        return (
            "no strategy is faster or slower by these runs: their ranks are threads, or have more threads than cores. "
            f"Bytes and accuracy stand: {_least_sent(rivals)}"
        )
    timed = [group for group in meaningful if group.speedup is not None and group.is_fair]
    if len(timed) < 2:
        return f"not settled, as no ratio is fair: {_reason(meaningful, baseline)}. {_least_sent(rivals)}"
    doubtful = [g for g in timed if g.speedup and g.ratio_busy and not (g.speedup.low > 1 or g.speedup.high < 1)]
    if any(group.first["world_size"] > 1 for group in doubtful):
        return f"not settled, as {_busy(timed)[0]}: train again on a quiet machine. {_least_sent(rivals)}"
    usable = [group for group in timed if group.verdict != "inferior"]
    best = max(usable or timed, key=_speedup)
    if best.first["world_size"] == 1 and all(group.first["world_size"] == 1 for group in timed):
        first = f"{_name(best)} is the fastest on one device ({_evidence(best, baseline)})"
    elif best.first["world_size"] == 1:
        several = [group for group in timed if group.first["world_size"] > 1]
        second = max([group for group in several if group in usable] or several, key=_speedup)
        share = f"{_speedup(second) / _speedup(best):.2f}"
        alone = f"one device holds this graph: use {best.first['strategy']}. The fastest of several ranks"
        first = f"{alone}, {_name(second)}, has {share} times its speed ({_evidence(second, baseline)})"
    else:
        first = f"use {_name(best)} ({_evidence(best, baseline)})"
    race = words.race(best, timed)
    return f"{first}{race and f'. {best.title} is {race}'}. {_open(best, timed, baseline)}"


def _open(best: Group, timed: Sequence[Group], baseline: str) -> str:
    """Return open questions, and the next step for them."""
    blocks = min(len(group.ratios) + group.left_out for group in timed)  # the line on load names blocks left out
    seeds = min((g.difference.n for g in timed if g.difference is not None), default=len(best.accuracies))
    wanted, doubts = [], _busy(timed)
    if blocks < FEWEST_BLOCKS:
        doubts.append(f"{counted(blocks, 'block')} of {FEWEST_BLOCKS}: block=0,1,2")
    elif not doubts and "speedup" not in best.best:
        doubts.append(f"{counted(blocks, 'block')} do not tell it from the next")
    if doubts:
        wanted.append(f"speed ({'; '.join(doubts)})")
    if best.verdict == "baseline":
        pass  # its accuracy supports no claim
    elif best.verdict in ("not enough runs", "inconclusive") or (not best.verdict and seeds < FEWEST_SEEDS):
        few = f"{counted(seeds, 'seed')} of {FEWEST_SEEDS}: seed=0,1,2,3,4" if seeds < FEWEST_SEEDS else best.verdict
        wanted.append(f"accuracy ({few})")
    elif best.control_verdict == "not inferior":
        wanted.append("accuracy (the negative control, codec=drop, passes too)")
    elif best.control_verdict != "inferior":
        wanted.append("accuracy (no verdict on the negative control, codec=drop)")
    settled = f"Not settled: {' and '.join(wanted)}" if wanted else f"The comparison with {baseline} is settled"
    return f"{settled}. Other machines and links: gnnpar plan topology=NAME"


def _busy(timed: Sequence[Group]) -> list[str]:
    """Return how many of the runs with a known load began on a busy machine."""
    runs = [run for group in timed for run in group.completed if run.get("load")]
    busy = sum(map(is_busy, runs))
    return [f"the machine was busy when {busy} of {counted(len(runs), 'run')} began"] if busy else []


def _tag(rivals: Sequence[Group]) -> list[str]:
    """Return the planner's choice and its reason, if another strategy is at least 5 % faster."""
    timed = [group for group in rivals if group.speedup is not None and not group.timeless and group.is_fair]
    tags = [group for group in timed if group.first["strategy"] == "tag"]
    if not tags:
        return []
    tag, best = tags[0], max(timed, key=_speedup)
    predicted = next((r["predicted"] for r in tag.completed if r.get("predicted")), None)
    if best is tag or predicted is None or _speedup(best) < 1.05 * _speedup(tag):
        return []
    chose = f"tag chose {predicted['label']}, and {_name(best)} is {_speedup(best) / _speedup(tag):.2f} times as fast"
    exactness = set(best.results[0]["exactness"])
    quality = (tag.results[0].get("settings", {}).get("strategy") or {}).get("quality")
    allowed = {"exact", *(map(str, quality) if isinstance(quality, list) else ())}
    if not exactness <= allowed:
        return [f"{chose}: it was not allowed what is {', '.join(sorted(exactness - allowed))} (strategy.quality)"]
    error, took = predicted.get("epoch_error"), seconds(predicted["epoch_seconds"])
    if error is not None and abs(error) > _SURE:
        measure = "topology=measured topology.refresh=true measures the machine again"
        return [f"{chose}: it expected {took} an epoch and was off by {error:+.0%}; {measure}"]
    return [f"{chose}: it expected {took} an epoch of its choice, and more of the others"]


def _reason(meaningful: Sequence[Group], baseline: str) -> str:
    why = next((group.why_no_speedup for group in meaningful if group.why_no_speedup), f"{baseline} alone has a time")
    return f"{why}; train strategy={baseline} in the same sweep" if why.startswith("no completed run") else why


def _evidence(group: Group, baseline: str) -> str:
    blocks = counted(len(group.ratios), "block")
    ratio = f"{words.speedup_of(group)} x {baseline} over {blocks}"
    return ratio if group.verdict in ("", "baseline") else f"{ratio}; accuracy {group.verdict}"


def _least_sent(rivals: Sequence[Group]) -> str:
    several = [group for group in rivals if group.first["world_size"] > 1]
    sent = [(value, group) for group in several if (value := group.mean("bytes_per_epoch")) is not None]
    if not sent:
        return "nothing is sent by one rank"
    value, least = min(sent, key=lambda pair: pair[0])
    return f"{_name(least)} sends least, {num_bytes(value)} an epoch"


def _speedup(group: Group) -> float:
    assert group.speedup is not None
    return group.speedup.value


def _name(group: Group) -> str:
    return f"{group.title} on {counted(group.first['world_size'], 'rank')}"
