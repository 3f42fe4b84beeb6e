"""What must be equal before two runs are compared, and what a reader has to know (protocol, rules 1, 5, 7)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from gnnpar.report.runs import Result, is_control, is_exact, value_at

# what must be equal before two epoch times may form a ratio: name -> path in result.json
FAIR: Mapping[str, tuple[str, ...]] = {
    "graph": ("hashes", "graph"),
    "split": ("hashes", "split"),
    "model": ("model",),
    "model settings": ("settings", "model"),
    "optimizer": ("settings", "optim"),
    "precision": ("settings", "precision"),
    "first_layer": ("settings", "first_layer"),
    "epochs": ("epochs",),
    "eval_every": ("settings", "eval_every"),
    "seed": ("seed",),
    "block": ("block",),
    "device": ("device",),
    "hardware": ("hardware",),
    "provenance": ("provenance",),
    "link rates": ("paced", "rates"),
}
# where and how fast a run was says nothing about its accuracy
TIME_ONLY = frozenset({"block", "device", "hardware", "provenance", "link rates"})
# no ratio is refused for these, but a line names them: name -> path
WATCHED = {"commits": ("commit",), "torch versions": ("versions", "torch"), "machines": ("hardware",)}


def differences(a: Result, b: Result) -> list[str]:
    """Names of what makes a ratio between two runs unfair. One rank has no link: measured, it is fair beside any."""
    provenances, transports = ({r[name] for r in (a, b)} for name in ("provenance", "transport"))
    skipped = ("provenance", "link rates") if "none" in transports and provenances == {"measured", "paced"} else ()
    return [name for name, path in FAIR.items() if name not in skipped and value_at(a, path) != value_at(b, path)]


def unequal_accuracy(a: Result, b: Result) -> list[str]:
    """Names of what makes a paired difference of accuracies unfair."""
    return [name for name in differences(a, b) if name not in TIME_ONLY]


def ratio_of(
    result: Result, bases: Sequence[Result], baseline: str, allow_unfair: bool = False
) -> tuple[float | None, str]:
    """How many times faster than the baseline, or why there is no ratio. Among fair baselines the fastest counts, of
    those that ran in the same session where there are any."""
    mine = result["epoch_seconds"]["median"]
    if mine is None or result["status"] != "completed":
        return None, f"run {result['status']}"
    bases = [base for base in bases if base["status"] == "completed"]
    if not bases:
        return None, f"no completed run of {baseline}"
    fair = [base for base in bases if not differences(result, base)]
    if not fair and not allow_unfair:
        nearest = min((differences(result, base) for base in bases), key=len)
        return None, f"{baseline} differs in {', '.join(nearest)}"
    fastest = min(base["epoch_seconds"]["median"] for base in beside(result, fair) or fair or bases)
    return fastest / mine, "" if fair else "unfair"


def beside(result: Result, bases: Sequence[Result]) -> list[Result]:
    """Those that ran side by side with a run: in its session, which one start of a sweep is; alone, none has one."""
    return [base for base in bases if base.get("session") == result.get("session")]


def baselines(strategy: str, results: Sequence[Result]) -> list[Result]:
    """The runs of a strategy that others may be held against: never the negative control, where there is another."""
    runs = [r for r in results if r["strategy"] == strategy]
    return [r for r in runs if not is_control(r)] or runs


def timed_runs_of(strategy: str, results: Sequence[Result]) -> list[Result]:
    """Those baselines that have an epoch time."""
    return [r for r in baselines(strategy, results) if r["epoch_seconds"]["median"] is not None]


def exact_runs_of(strategy: str, results: Sequence[Result]) -> list[Result]:
    """Those baselines that completed, the exact ones where there are any: what accuracies are held against."""
    runs = [r for r in baselines(strategy, results) if r["status"] == "completed"]
    return [r for r in runs if is_exact(r)] or runs


def warnings(results: Sequence[Result], baseline: str) -> list[str]:
    """One line for each way in which these runs are no fair comparison; none: all is equal that must be."""
    bases = [base for base in timed_runs_of(baseline, results) if base["status"] == "completed"]
    unequal: dict[str, list[str]] = {}
    for result in results:
        if result["status"] != "completed" or not bases:
            continue
        nearest = min(bases, key=lambda base: len(differences(result, base)))
        for name in differences(result, nearest):
            ours, theirs = (_short(value_at(r, FAIR[name])) for r in (result, nearest))
            values = f" ({ours}; {baseline} {theirs})" if ours and theirs else ""
            unequal.setdefault(f"{name}{values}", []).append(f"{result['strategy']}/{result['model']}")
    lines = [
        f"{_names(runs)}: no run of {baseline} with equal {what.partition(' (')[0]}{_tail(what)}"
        for what, runs in unequal.items()
    ]
    lines += _other_sessions(results, bases, baseline)
    for name, path in WATCHED.items():
        counts = Counter(str(value_at(result, path) or "unknown") for result in results)
        if len(counts) > 1:
            lines.append(f"{len(counts)} {name}: " + ", ".join(f"{v} ({_runs(n)})" for v, n in counts.most_common()))
    return lines


def _other_sessions(results: Sequence[Result], bases: Sequence[Result], baseline: str) -> list[str]:
    """A line where a ratio holds times of different hours against each other (protocol, rule 5)."""
    apart = []
    for result in (r for r in results if r["status"] == "completed"):
        fair = [base for base in bases if not differences(result, base)]
        if fair and not beside(result, fair):
            apart.append(f"{result['strategy']}/{result['model']}")
    if not apart:
        return []
    return [f"{_names(apart)}: timed in another session than {baseline}, not side by side with it"]


def _tail(what: str) -> str:
    return f" ({what.partition(' (')[2]}" if " (" in what else ""


def _names(runs: Sequence[str]) -> str:
    """strategy/model, or the strategies with the models that they share, and how many runs these are."""
    models: dict[str, list[str]] = {}
    for strategy, _, model in (name.partition("/") for name in dict.fromkeys(runs)):
        models.setdefault(strategy, []).append(model)
    alike: dict[tuple[str, ...], list[str]] = {}
    for strategy, names in models.items():
        alike.setdefault(tuple(names), []).append(strategy)
    groups = [f"{', '.join(strategies)} with {', '.join(names)}" for names, strategies in alike.items()]
    named = runs[0] if len(set(runs)) == 1 else "; ".join(groups)
    return named if len(runs) == 1 else f"{named} ({_runs(len(runs))})"


def _runs(count: int) -> str:
    return f"{count} run" + ("s" if count > 1 else "")


def _short(value: object) -> str:
    """A value that fits a line; nothing for nested settings, eight digits of a hash."""
    if value is None or isinstance(value, (Mapping, list)):
        return ""
    text = str(value)
    return text[:8] if len(text) == 64 else text
