"""One row per group: runs that differ only in seed and block, with intervals (protocol, rules 5, 11, 12, 13). Speed-ups
are formed inside blocks, accuracies paired by seed. Incomplete runs are counted, never dropped."""

from __future__ import annotations

import json
import math
import statistics as plain
from collections import Counter
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

from gnnpar.files import JsonDict, JsonObject
from gnnpar.report import statistics
from gnnpar.report.fairness import Baseline, exact_runs_of, unequal_accuracy, why_unequal
from gnnpar.report.runs import Result, configuration_of, is_control, no_speed, resumed_from
from gnnpar.report.statistics import Estimate
from gnnpar.report.targets import Median, Reached, median, reached, target_of
from gnnpar.track.keys import goodness
from gnnpar.track.text import counted

K = TypeVar("K", bound=Hashable)  # a seed, or a seed and a block
MARGIN = 0.3  # points of accuracy
_ARENA = ("dataset", "task", "model", "optim", "precision", "first_layer", "epochs", "eval_every")


@dataclass(eq=False)
class Group:
    """Runs of one configuration. times: (seed, block) -> epoch seconds. accuracies: seed -> percent."""

    rows: list[JsonDict]
    results: list[Result]
    arena: str  # must be equal for any comparison: data, model, optimizer, budget
    changed: str = ""  # settings outside the strategy that distinguish groups of the same name
    times: dict[Hashable, float] = field(default_factory=dict)
    accuracies: dict[int, float] = field(default_factory=dict)
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
        """Name of the metric."""
        return self.results[0]["metric"]["name"]

    @property
    def completed(self) -> list[Result]:
        return [r for r in self.results if r["status"] == "completed"]

    @property
    def peak_bytes(self) -> float | None:
        """Largest peak of memory of a rank, over all runs."""
        return max(
            (row["memory_peak_bytes"] for row in self.rows if row["memory_peak_bytes"] is not None), default=None
        )

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
    reference = Baseline.of(baseline, everything)
    by_arena: dict[str, list[Result]] = {}
    for base in exact_runs_of(baseline, everything):
        by_arena.setdefault(arena_of(base), []).append(base)
    for group in ordered:
        _accuracy(group, reference.runs_for(group.results), baseline, margin)
        fixed = target if target is not None else target_of(by_arena.get(group.arena, ()))
        _to_target(group, fixed)
    _controls(ordered)
    for arena in dict.fromkeys(group.arena for group in ordered):
        _bold([group for group in ordered if group.arena == arena and not group.control])
    return ordered


def timed_groups(results: Sequence[tuple[Path, Result]], rows: Sequence[JsonDict]) -> list[Group]:
    """Return groups by task, in the order of their first runs, with times and speed-ups only."""
    groups: dict[Hashable, Group] = {}
    for (_, result), row in zip(results, rows, strict=True):
        group = groups.setdefault(configuration_of(result), Group([], [], arena_of(result)))
        group.rows.append(row)
        group.results.append(result)
    order = {arena: i for i, arena in enumerate(dict.fromkeys(group.arena for group in groups.values()))}
    ordered = sorted(groups.values(), key=lambda group: order[group.arena])
    _distinguish(ordered)
    for group in ordered:
        _times(group)
    return ordered


def repeated(groups: Iterable[Group]) -> bool:
    """Return True if any configuration has several seeds or blocks."""
    return any(len({(row["seed"], row["block"]) for row in group.rows}) > 1 for group in groups)


def arena_of(result: Result) -> str:
    settings = result.get("settings", {})
    named = (result["dataset"], result["model"], result["epochs"])
    return json.dumps([named, {key: settings.get(key) for key in _ARENA}], sort_keys=True, default=str)


def _distinguish(groups: Sequence[Group]) -> None:
    """Name the settings in which groups of the same name differ."""
    same_name: dict[Hashable, list[Group]] = {}
    for group in groups:
        group.changed = group.first["settings"]
        same_name.setdefault((group.name, group.first["model"], group.first["dataset"]), []).append(group)
    for same in same_name.values():
        facts = [(g.results[0]["hardware"], f"{g.first['provenance']} {g.first['links']}".strip()) for g in same]
        differ = [len(set(column)) > 1 for column in zip(*facts, strict=True)]
        for group, known in zip(same, facts, strict=True):
            words = [group.changed, *(fact for fact, differs in zip(known, differ, strict=True) if differs)]
            words += ["begun otherwise"] if resumed_from(group.results[0]) else []
            group.changed = " ".join(filter(None, words))


def _times(group: Group) -> None:
    """Compute the epoch time over blocks, and the geometric mean of the ratios inside them."""
    seconds: dict[Hashable, list[float]] = {}
    ratios: dict[Hashable, list[float]] = {}
    timed = [row for row in group.rows if row["status"] == "completed" and row["epoch_seconds"]]
    compared = [row for row in timed if row["ratio"] is not None]
    times_of, group.time_busy = quiet(timed, "busy")
    ratios_of, group.ratio_busy = quiet(compared, "ratio_busy")
    for row in times_of:
        seconds.setdefault((row["seed"], row["block"]), []).append(row["epoch_seconds"])
    for row in ratios_of:
        ratios.setdefault((row["seed"], row["block"]), []).append(row["ratio"])
    group.left_out = len({(row["seed"], row["block"]) for row in compared} - ratios.keys())
    group.times = {block: _middle(values) for block, values in seconds.items()}
    group.ratios = {block: _middle(values) for block, values in ratios.items()}
    group.epoch_seconds = statistics.geometric_mean(list(group.times.values())) if group.times else None
    group.speedup = statistics.geometric_mean(list(group.ratios.values())) if group.ratios else None
    reasons = Counter(row["why_no_ratio"] for row in group.rows)
    group.why_no_speedup = "" if group.speedup else reasons.most_common(1)[0][0]


def quiet(rows: Sequence[JsonDict], column: str) -> tuple[Sequence[JsonDict], bool]:
    """Return the rows without a mark in `column` (busy machine), or all rows and True if every one is marked."""
    undisturbed = [row for row in rows if not row[column]]
    return undisturbed or rows, bool(rows) and not undisturbed


def _middle(values: Sequence[float]) -> float:
    """Return the geometric mean of the runs of a block; a single value unchanged."""
    return values[0] if len(values) == 1 else plain.geometric_mean(values)


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
    by_seed: dict[int, list[Result]] = {}
    for result in results:
        if result["metric"]["test_at_best_val"] is not None:
            by_seed.setdefault(result["seed"], []).append(result)
    return by_seed


def _to_target(group: Group, target: float | None) -> None:
    group.target = target
    if target is None:
        return
    ends = [reached(Path(row["folder"]), r, target) for row, r in zip(group.rows, group.results, strict=True)]
    known: list[Reached] = [end for end in ends if end is not None]
    rows = quiet(group.rows, "busy")[0]
    timed = [end for end, row in zip(ends, group.rows, strict=True) if end is not None and row in rows]
    group.seconds_to_target = median([end.seconds for end in timed], [end.censored for end in timed])
    group.bytes_to_target = median([end.bytes for end in known], [end.censored for end in known])


def _controls(groups: Sequence[Group]) -> None:
    """Set the verdict of the negative control on the same task, if possible with as many ranks."""
    for group in groups:
        controls = [c for c in groups if c.control and c.arena == group.arena]
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
    unfair = any(row["why_no_ratio"] == "unfair" for group in timed for row in group.rows)
    unfair = unfair or any(group.ratio_busy for group in timed)
    if not unfair and len({group.first["provenance"] for group in timed if group.first["world_size"] > 1}) < 2:
        _mark(
            timed,
            "speedup",
            [{k: math.log(v) for k, v in group.ratios.items()} for group in timed],
            fewest=statistics.FEWEST_BLOCKS,
        )


def _mark(groups: Sequence[Group], column: str, values: Sequence[Mapping[K, float]], *, fewest: int) -> None:
    if len(groups) < 2:
        return
    level = 1 - 0.05 / (len(groups) - 1)
    best = max(range(len(groups)), key=lambda i: plain.fmean(values[i].values()))
    for i, other in enumerate(values):
        pairs = [values[best][key] - other[key] for key in values[best] if key in other]
        if i != best and not (pairs and statistics.mean(pairs, level=level, fewest=fewest).low > 0):
            return
    groups[best].best.add(column)


def notes(groups: Sequence[Group]) -> list[str]:
    """Return a line for each task with epochs of many steps in some rows only, with too few runs, or with a negative
    control that is absent or passes."""
    lines = []
    for arena in dict.fromkeys(group.arena for group in groups):
        here = [group for group in groups if group.arena == arena]
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


CLAIMS = ("not inferior", "inferior", "inconclusive")  # verdicts supported by enough runs


def too_few(groups: Sequence[Group]) -> str:
    """Return a line on a verdict or interval that needs more runs, or ''."""
    seeds = [g.difference.n for g in groups if g.difference and g.verdict == "not enough runs"]
    blocks = [g.speedup.n for g in groups if g.speedup and g.speedup.n < statistics.FEWEST_BLOCKS]
    lines = []
    if seeds:
        lines.append(f"{counted(max(seeds), 'seed')}; a verdict on accuracy needs {statistics.FEWEST_SEEDS}")
    if blocks:
        block = "undisturbed block" if any(g.time_busy for g in groups) else "block"
        lines.append(f"{counted(max(blocks), block)}; an interval of a speed-up needs {statistics.FEWEST_BLOCKS}")
    return "not enough runs: " + ", and ".join(lines) if lines else ""


def _takes_many_steps(group: Group) -> bool:
    """Return True if a step sees a batch, not all training nodes."""
    return bool((group.results[0].get("settings", {}).get("strategy") or {}).get("batch_size"))


def cells(group: Group) -> JsonDict:
    """Return the group as plain data, None for unknown values; accuracies in percent, differences in points."""
    first, done = group.first, group.completed
    copied = (
        "strategy",
        "variant",
        "exactness",
        "model",
        "dataset",
        "world_size",
        "threads_per_rank",
        "provenance",
        "links",
        "oversubscribed",
        "metric",
    )
    cells: JsonDict = {name: first[name] for name in copied}
    cells |= {"settings": group.changed, "control": group.control, "runs": len(group.rows), "completed": len(done)}
    cells |= _estimate("epoch_seconds", group.epoch_seconds) | _estimate("speedup", group.speedup, "blocks")
    cells |= {"busy": group.time_busy, "speedup_busy": group.ratio_busy}
    means = ("bytes_per_epoch", "memory_peak_bytes", "gradient_cosine", "gradient_error")
    cells |= {name: group.mean(name) for name in means}
    cells |= {"why_no_speedup": group.why_no_speedup, "why_no_difference": group.why_no_difference}
    cells |= _estimate("accuracy", group.accuracy, "seeds") | _estimate("difference", group.difference, "pairs")
    cells |= {"verdict": group.verdict, "control_verdict": group.control_verdict, "target": group.target}
    for name, value in (("seconds_to_target", group.seconds_to_target), ("bytes_to_target", group.bytes_to_target)):
        low, high = value or (None, math.inf)
        cells |= {name: low, f"{name}_high": high if high < math.inf else None}
    return cells | {"best": " ".join(sorted(group.best))}


def _estimate(name: str, estimate: Estimate | None, count: str = "") -> JsonDict:
    low, high = (estimate.low, estimate.high) if estimate else (math.nan, math.nan)
    cells: JsonDict = {name: estimate and estimate.value}
    cells |= {f"{name}_{end}": value if math.isfinite(value) else None for end, value in (("low", low), ("high", high))}
    return cells | ({count: estimate.n if estimate else 0} if count else {})
