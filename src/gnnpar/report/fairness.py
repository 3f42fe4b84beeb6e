"""Conditions for a fair comparison of two runs, and the remarks that a reader needs (protocol, rules 1, 5, 7)."""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Hashable, Mapping, Sequence

from gnnpar.report import runs as reading
from gnnpar.report.runs import Result, by, configuration_of, is_busy, value_at
from gnnpar.track.text import counted
from gnnpar.training.result.result import epoch_time

# must be equal before two epoch times may form a ratio: name -> path in result.json
FAIR: Mapping[str, tuple[str, ...]] = {
    "graph": ("hashes", "graph"),
    "split": ("hashes", "split"),
    "model": ("model",),
    "model settings": ("settings", "model"),
    "features": ("settings", "features"),
    "features_dim": ("settings", "features_dim"),
    "task": ("settings", "task"),
    "optimizer": ("settings", "optim"),
    "precision": ("settings", "precision"),
    "tf32": ("settings", "tf32"),
    "first_layer": ("settings", "first_layer"),
    "row_order": ("settings", "row_order"),
    "cuda_graph": ("settings", "launch", "cuda_graph"),
    "kernels": ("settings", "kernels"),
    "epochs": ("epochs",),
    "early stopping": ("settings", "early_stopping"),
    "eval_every": ("settings", "eval_every"),
    "seed": ("seed",),
    "what it went on from": ("begun_otherwise",),
    "block": ("block",),
    "session": ("session",),
    "device": ("device",),
    "hardware": ("hardware",),
    "provenance": ("provenance",),
    "link rates": ("paced", "rates"),
}
# these do not change accuracies
TIME_ONLY = frozenset(
    {"row_order", "cuda_graph", "kernels", "block", "session", "device", "hardware", "provenance", "link rates"}
)
# differences that are reported, but do not refuse a ratio: name -> path
WATCHED = {"commits": ("commit",), "torch versions": ("versions", "torch"), "machines": ("hardware",)}


def differences(a: Result, b: Result) -> list[str]:
    """Return the differences that make a ratio unfair. A measured run of one rank without links is fair with any."""
    provenances, transports = ({r[name] for r in (a, b)} for name in ("provenance", "transport"))
    skipped = ("provenance", "link rates") if "none" in transports and provenances == {"measured", "paced"} else ()
    return [name for name in FAIR if name not in skipped and _fact(a, name) != _fact(b, name)]


def _fact(result: Result, name: str) -> object:
    return reading.resumed_from(result) if name == "what it went on from" else value_at(result, FAIR[name])


def unequal_accuracy(a: Result, b: Result) -> list[str]:
    """Return the names of the differences that make a paired difference of accuracies unfair."""
    return [name for name in differences(a, b) if name not in TIME_ONLY]


Ranked = Sequence[Sequence[Result]]


def ranked_baselines(strategy: str, results: Sequence[Result]) -> Ranked:
    """Return the completed runs of the strategy to compare with, by configuration: by exactness (rounding to bf16
    counts as exact, rule 2), then a core per thread, then speed."""
    completed = [run for run in baselines(strategy, results) if run["status"] == "completed"]
    return sorted(by(completed, configuration_of).values(), key=_rank)


def _rank(runs: Sequence[Result]) -> tuple[bool, bool, float]:
    times = [seconds for run in runs if (seconds := epoch_time(run))]
    close = set(runs[0]["exactness"]) <= {"exact", "rounded"}
    return not close, runs[0]["oversubscribed"], statistics.geometric_mean(times) if times else math.inf


def base_of(runs: Sequence[Result], ranked: Ranked) -> Sequence[Result]:
    """Return the baseline's runs to compare one configuration with, in ratios and verdicts: runs with fair times, else
    with fair accuracies, else with the fewest differences."""
    for unequal in (differences, unequal_accuracy):
        for bases in ranked:
            if any(not unequal(run, base) for run in runs for base in bases):
                return bases
    return min(ranked, key=lambda bases: min(len(differences(r, b)) for r in runs for b in bases), default=())


def ratio_of(
    result: Result, bases: Sequence[Result], baseline: str, allow_unfair: bool = False
) -> tuple[float | None, str, bool]:
    """Return the ratio to the fastest undisturbed baseline of its block, why it is missing, whether it is disturbed."""
    mine = epoch_time(result)
    if mine is None or result["status"] != "completed":
        return None, f"run {result['status']}", False
    timed = [base for base in bases if epoch_time(base) is not None]
    if not timed:
        return None, f"no completed run of {baseline}", False
    fair = [base for base in timed if not differences(result, base)]
    if not fair and not allow_unfair:
        return None, why_unequal(min((differences(result, base) for base in timed), key=len), baseline), False
    held = fair or timed
    quiet = [base for base in held if not is_busy(base)]
    ratio = min(seconds for base in quiet or held if (seconds := epoch_time(base))) / mine
    return ratio, "" if fair else "unfair", is_busy(result) or not quiet


def why_unequal(names: Sequence[str], baseline: str) -> str:
    """Return the reason for a blank cell."""
    if list(names) == ["session"]:
        return f"{baseline} was timed in another session"
    return f"{baseline} differs in {', '.join(name for name in names if name != 'session')}"


def baselines(strategy: str, results: Sequence[Result]) -> list[Result]:
    """Return the runs of a strategy to compare others with, without the negative control if possible."""
    runs = [r for r in results if r["strategy"] == strategy]
    return [r for r in runs if not reading.is_control(r)] or runs


def exact_runs_of(strategy: str, results: Sequence[Result]) -> list[Result]:
    """Return the completed baselines to compare accuracies with; the exact ones, if there are any."""
    runs = [r for r in baselines(strategy, results) if r["status"] == "completed"]
    return [r for r in runs if reading.is_exact(r)] or runs


def warnings(results: Sequence[Result], baseline: str) -> list[str]:
    """Return one line for each difference that makes the comparison unfair."""
    bases = [run for runs in ranked_baselines(baseline, results) for run in runs if epoch_time(run) is not None]
    unequal: dict[tuple[str, str], list[str]] = {}
    apart: list[str] = []
    for result in results:
        if result["status"] != "completed" or not bases:
            continue
        name = reading.title(result)
        nearest = min(bases, key=lambda base: len(differences(result, base)))
        names = differences(result, nearest)
        if names == ["session"]:
            apart.append(name)
            continue
        for what in (each for each in names if each != "session"):
            ours, theirs = (_short(value_at(r, FAIR[what])) for r in (result, nearest))
            values = f" ({ours}; {baseline} {theirs})" if ours and theirs else ""
            unequal.setdefault((what, values), []).append(name)
    alone = f"no run of {baseline} with equal"
    lines = [f"{_names(runs)}: {alone} {what}{values}" for (what, values), runs in unequal.items()]
    if apart:
        lines.append(f"{_names(apart)}: timed in another session than {baseline}, not side by side with it")
    return lines


def exchanged(results: Sequence[Result]) -> list[str]:
    """Return a line per configuration with runs of one seed on several graphs or splits: its data has changed."""
    data: dict[tuple[Hashable, str, int | None], set[str]] = {}
    names: dict[Hashable, str] = {}
    for result in results:
        mine = configuration_of(result)
        names[mine] = reading.title(result)
        for what, seed in _data_seeds(result).items():
            data.setdefault((mine, what, seed), set()).add(str(value_at(result, FAIR[what])))
    several = dict.fromkeys((names[mine], what) for (mine, what, _), found in data.items() if len(found) > 1)
    return [f"{name}: runs of one configuration are of several {what}s; the data has changed" for name, what in several]


def _data_seeds(result: Result) -> dict[str, int | None]:
    """Return the run's seed if the graph (with its standardised features), the split (masks or pairs) depend on it,
    else None."""
    seed, dataset = result["seed"], value_at(result, ("settings", "dataset"))
    if not isinstance(dataset, Mapping):
        return {"graph": seed, "split": seed}
    graph_seed, task = dataset.get("graph_seed", 0), value_at(result, ("settings", "task")) or {}
    drawn = (graph_seed, dataset.get("split_seed"), dataset.get("split_index"), task.get("split_seed", 0))
    follows = graph_seed is None or dataset.get("normalize") == "standard"
    return {"graph": seed if follows else None, "split": seed if None in drawn else None}


def remarks(results: Sequence[Result]) -> list[str]:
    """Return a line for each difference between runs that leaves their ratios fair."""
    lines = exchanged(results)
    for name, path in WATCHED.items():
        counts = Counter(str(value_at(result, path) or "unknown") for result in results)
        if len(counts) > 1:
            shown = ", ".join(f"{value} ({counted(n, 'run')})" for value, n in counts.most_common())
            lines.append(f"{len(counts)} {name}: {shown}")
    return lines


def _names(runs: Sequence[str]) -> str:
    """Return strategy/model, or the strategies with the models that they share, and the number of runs."""
    pairs = by((name.partition("/") for name in dict.fromkeys(runs)), lambda pair: pair[0])
    models = {strategy: ", ".join(model for *_, model in same) for strategy, same in pairs.items()}
    shared = by(models, lambda strategy: models[strategy])
    groups = [f"{', '.join(strategies)} with {names}" for names, strategies in shared.items()]
    named = runs[0] if len(set(runs)) == 1 else "; ".join(groups)
    return named if len(runs) == 1 else f"{named} ({counted(len(runs), 'run')})"


def _short(value: object) -> str:
    """Return a value for a line: '' for nested settings, eight digits of a hash."""
    text = "" if value is None or isinstance(value, (Mapping, list)) else str(value)
    return text[:8] if len(text) == 64 else text
