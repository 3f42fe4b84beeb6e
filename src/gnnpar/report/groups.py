"""One row per group: runs that differ only in seed and block, with intervals (protocol, rules 5, 11, 12, 13). Speed-ups
are formed inside blocks, accuracies paired by seed. Incomplete runs are counted, never dropped; runs that never reach
the target on validation are censored."""

from __future__ import annotations

import json
import math
import statistics as plain
from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from gnnpar.files import JsonDict, JsonObject
from gnnpar.report import runs as reading
from gnnpar.report import statistics
from gnnpar.report.fairness import base_of, exact_runs_of, ranked_baselines, unequal_accuracy, why_unequal
from gnnpar.report.runs import Result, by, configuration_of, is_control, no_speed
from gnnpar.report.statistics import Estimate
from gnnpar.track.jsonl import read_rows
from gnnpar.track.keys import goodness

MARGIN = 0.3  # points of accuracy
_ARENA = ("dataset", "task", "model", "optim", "precision", "first_layer", "epochs", "eval_every")


class Median(NamedTuple):
    """Bounds of a median: equal if it is known, high=inf if half of the runs never reached the target."""

    low: float
    high: float


@dataclass(eq=False)
class Group:
    """Runs of one configuration. times: (seed, block) -> epoch seconds. accuracies: seed -> percent."""

    rows: list[JsonDict]
    results: list[Result]
    arena: str  # must be equal for any comparison: data, model, optimizer, budget
    changed: str = ""  # settings outside the strategy that distinguish groups of the same name
    times: dict[Hashable, float] = field(default_factory=dict)
    accuracies: dict[Hashable, float] = field(default_factory=dict)
    epoch_seconds: Estimate | None = None
    speedup: Estimate | None = None
    time_busy: bool = False  # other load disturbed all runs with times; ratio_busy: with ratios
    ratio_busy: bool = False
    left_out: int = 0  # blocks without a ratio, since other load disturbed them
    ratios: dict[Hashable, float] = field(default_factory=dict)  # (seed, block) -> times faster than the baseline
    why_no_speedup: str = ""
    why_no_difference: str = ""
    accuracy: Estimate | None = None
    difference: Estimate | None = None
    verdict: str = ""
    control_verdict: str = ""
    target: float | None = None
    seconds_to_target: Median | None = None
    bytes_to_target: Median | None = None
    best: set[str] = field(default_factory=set)  # columns in which a paired test ranks it first

    @property
    def first(self) -> JsonObject:
        return self.rows[0]

    @property
    def control(self) -> bool:
        return is_control(self.results[0])

    @property
    def timeless(self) -> bool:
        return no_speed(self.first)

    @property
    def is_fair(self) -> bool:
        return all(row["why_no_ratio"] != "unfair" for row in self.rows)

    @property
    def title(self) -> str:
        """Strategy and distinguishing settings."""
        return " ".join(filter(None, (self.first["strategy"], self.first["variant"], self.changed)))

    @property
    def name(self) -> str:
        """The title and the ranks, without model and dataset."""
        return f"{self.title} {self.ranks}"

    @property
    def ranks(self) -> str:
        """Ranks x threads."""
        return f"{self.first['world_size']}x{self.first['threads_per_rank']}"

    @property
    def metric(self) -> str:
        return self.results[0]["metric"]["name"]

    @property
    def completed(self) -> list[Result]:
        return [r for r in self.results if r["status"] == "completed"]

    @property
    def peak_bytes(self) -> float | None:
        """Largest peak of memory of a rank, over all runs."""
        peaks = (row["memory_peak_bytes"] for row in self.rows)
        return max((peak for peak in peaks if peak is not None), default=None)

    def mean(self, column: str) -> float | None:
        """Return the mean of a column of `table_rows` over the completed runs that have it, or None."""
        values = [row[column] for row in self.rows if row["status"] == "completed" and row[column] is not None]
        return plain.fmean(values) if values else None


def grouped(
    results: Sequence[tuple[Path, Result]],
    rows: Sequence[JsonDict],
    *,
    baseline: str,
    margin: float = MARGIN,
    target: float | None = None,
) -> list[Group]:
    """Return groups by task. rows: from table_rows; margin: in points; target: on validation, instead of rule 13's."""
    ordered = timed_groups(results, rows)
    everything = [result for _, result in results]
    ranked = ranked_baselines(baseline, everything)
    exact = by(exact_runs_of(baseline, everything), arena_of)
    for group in ordered:
        _accuracy(group, base_of(group.results, ranked), baseline, margin)
        _to_target(group, target_of(exact.get(group.arena, ())) if target is None else target)
    for same in by(ordered, lambda group: group.arena).values():
        _controls(same)
        _bold([group for group in same if not group.control])
    return ordered


def timed_groups(results: Sequence[tuple[Path, Result]], rows: Sequence[JsonDict]) -> list[Group]:
    """Return groups by task, in the order of their first runs, with times and speed-ups only."""
    runs = by(zip((result for _, result in results), rows, strict=True), lambda run: configuration_of(run[0]))
    groups = [Group([row for _, row in same], [r for r, _ in same], arena_of(same[0][0])) for same in runs.values()]
    ordered = [group for same in by(groups, lambda group: group.arena).values() for group in same]
    _distinguish(ordered)
    for group in ordered:
        _times(group)
    return ordered


def arena_of(result: Result) -> str:
    settings = result.get("settings", {})
    named = (result["dataset"], result["model"], result["epochs"])
    return json.dumps([named, {key: settings.get(key) for key in _ARENA}], sort_keys=True, default=str)


def _distinguish(groups: Sequence[Group]) -> None:
    """Name the settings in which groups of the same name differ."""
    for group in groups:
        group.changed = group.first["settings"]
    for same in by(groups, lambda group: (group.name, group.first["model"], group.first["dataset"])).values():
        facts = [{"hardware": g.results[0]["hardware"], "times": reading.times_of(g.first)} for g in same]
        differ = reading.differing_keys(facts)
        for group, known in zip(same, facts, strict=True):
            words = [group.changed, *(known[key] for key in differ)]
            words += ["begun otherwise"] if reading.resumed_from(group.results[0]) else []
            group.changed = " ".join(filter(None, words))


def _times(group: Group) -> None:
    """Compute the epoch time over blocks, and the geometric mean of the ratios inside them."""
    timed = [row for row in group.rows if row["status"] == "completed" and row["epoch_seconds"]]
    compared = [row for row in timed if row["ratio"] is not None]
    times, group.time_busy = quiet(timed, "busy")
    ratios, group.ratio_busy = quiet(compared, "ratio_busy")
    group.times, group.ratios = _by_block(times, "epoch_seconds"), _by_block(ratios, "ratio")
    group.left_out = len(_by_block(compared, "ratio")) - len(group.ratios)
    group.epoch_seconds = statistics.geometric_mean(list(group.times.values())) if group.times else None
    group.speedup = statistics.geometric_mean(list(group.ratios.values())) if group.ratios else None
    reasons = Counter(row["why_no_ratio"] for row in group.rows)
    group.why_no_speedup = "" if group.speedup else reasons.most_common(1)[0][0]


def quiet(rows: Sequence[JsonDict], column: str) -> tuple[Sequence[JsonDict], bool]:
    """Return the rows without a mark in `column` (busy machine), or all rows and True if every one is marked."""
    undisturbed = [row for row in rows if not row[column]]
    return undisturbed or rows, bool(rows) and not undisturbed


def _by_block(rows: Sequence[JsonDict], column: str) -> dict[Hashable, float]:
    """Return (seed, block) -> geometric mean of its runs; a single value unchanged."""
    blocks = by(rows, lambda row: (row["seed"], row["block"]))
    found = {block: [row[column] for row in same] for block, same in blocks.items()}
    return {block: xs[0] if len(xs) == 1 else plain.geometric_mean(xs) for block, xs in found.items()}


def _accuracy(group: Group, bases: Sequence[Result], baseline: str, margin: float) -> None:
    """Compute the test metric at best validation in percent, and its paired difference to the baseline's runs."""
    ours = _by_seed(group.completed)
    group.accuracies = {seed: plain.fmean(map(_percent, runs)) for seed, runs in ours.items()}
    group.accuracy = statistics.mean(list(group.accuracies.values())) if ours else None
    if bases and configuration_of(bases[0]) == configuration_of(group.results[0]):
        group.verdict = "baseline"
        return
    base_values = _by_seed(bases)
    differences = []
    for seed, runs in ours.items():
        pairs = [(run, [base for base in base_values.get(seed, ()) if not unequal_accuracy(run, base)]) for run in runs]
        paired = [_percent(run) - plain.fmean(map(_percent, fair)) for run, fair in pairs if fair]
        if paired:
            differences.append(plain.fmean(paired))
    if differences:
        group.difference = statistics.mean(differences)
        group.verdict = statistics.non_inferiority([goodness(group.metric, each) for each in differences], margin)
    elif ours and base_values:
        pairs = ((runs[0], base) for runs in ours.values() for each in base_values.values() for base in each)
        nearest = min((unequal_accuracy(*pair) for pair in pairs), key=len)
        group.why_no_difference = why_unequal(nearest, baseline)
    else:
        group.why_no_difference = f"no completed run of {baseline}" if ours else "no test metric"


def _percent(result: Result) -> float:
    return 100 * result["metric"]["test_at_best_val"]


def _by_seed(results: Sequence[Result]) -> dict[int, list[Result]]:
    tested = [result for result in results if result["metric"]["test_at_best_val"] is not None]
    return by(tested, lambda result: result["seed"])


def _to_target(group: Group, target: float | None) -> None:
    group.target = target
    if target is None:
        return
    ends = [(row, end) for row in group.rows if (end := reached(Path(row["folder"]), group.metric, target))]
    idle = quiet(group.rows, "busy")[0]
    group.seconds_to_target = median([(seconds, censored) for row, (seconds, _, censored) in ends if row in idle])
    group.bytes_to_target = median([(sent, censored) for _, (_, sent, censored) in ends])


def target_of(exact: Sequence[Result]) -> float | None:
    """Return the mean best validation of the exact baseline worse by one standard deviation over runs."""
    best = [r["metric"]["best_val"] for r in exact if r["metric"]["best_val"] is not None]
    if not best:
        return None
    slack = plain.stdev(best) if len(best) > 1 else 0.0
    return plain.fmean(best) - goodness(exact[0]["metric"]["name"], slack)


def reached(folder: Path, metric: str, target: float) -> tuple[float, float, bool] | None:
    """Return training seconds and bytes sent until a run first validates at `target`, or to its end, and whether it
    is censored, that is, never reaches the target; None without rows in metrics.jsonl."""
    known = ("time/train_seconds", "comm/total_bytes_so_far")
    rows = [row for row in read_rows(folder) if all(row.get(name) is not None for name in known)]
    if not rows:
        return None
    evaluated = (row for row in rows if row.get("metric/val") is not None)
    end = next((row for row in evaluated if goodness(metric, row["metric/val"] - target) >= 0), None)
    seconds, sent = ((end or rows[-1])[name] for name in known)
    return seconds, sent, end is None


def median(ends: Sequence[tuple[float, bool]]) -> Median | None:
    """Return bounds of the median of (value, censored): censored values may be anywhere above. None without values."""
    if not ends:
        return None
    low = plain.median(value for value, _ in ends)
    return Median(low, plain.median(math.inf if censored else value for value, censored in ends))


def _controls(groups: Sequence[Group]) -> None:
    """Set the verdict of the negative control of a task, if possible with as many ranks."""
    controls = [group for group in groups if group.control]
    for group in groups:
        equal = [c for c in controls if c.first["world_size"] == group.first["world_size"]]
        verdicts = [c.verdict or "unpaired" for c in equal or controls]
        passing = [v for v in verdicts if v == "not inferior"]
        group.control_verdict = (passing or verdicts or ["none"])[0]


def _bold(groups: Sequence[Group]) -> None:
    """Mark the best accuracy and the largest speed-up if paired tests (Bonferroni, 5 %) hold against all others.

    Speed-ups are over one baseline in the same block, and none is unfair.
    """
    accurate = [group for group in groups if group.accuracies]
    good = [{seed: goodness(group.metric, each) for seed, each in group.accuracies.items()} for group in accurate]
    _mark(accurate, "accuracy", good, fewest=statistics.FEWEST_SEEDS)
    timed = [group for group in groups if group.ratios and not group.timeless]
    logs = [{block: math.log(ratio) for block, ratio in group.ratios.items()} for group in timed]
    clear = all(group.is_fair and not group.ratio_busy for group in timed)
    if clear and len({group.first["provenance"] for group in timed if group.first["world_size"] > 1}) < 2:
        _mark(timed, "speedup", logs, fewest=statistics.FEWEST_BLOCKS)


def _mark(groups: Sequence[Group], column: str, values: Sequence[Mapping[Hashable, float]], *, fewest: int) -> None:
    if len(groups) < 2:
        return
    level = 1 - 0.05 / (len(groups) - 1)
    best = max(range(len(groups)), key=lambda i: plain.fmean(values[i].values()))
    for i, other in enumerate(values):
        pairs = [values[best][key] - other[key] for key in values[best] if key in other]
        if i != best and not (pairs and statistics.mean(pairs, level=level, fewest=fewest).low > 0):
            return
    groups[best].best.add(column)
