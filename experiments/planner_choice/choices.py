"""What each rule chooses among measured configurations, and what that costs."""

import statistics
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any  # of JSON

from planner_accuracy.pairs import Pair, by

ALLOWED = {"exact": {"exact"}, "all classes": {"exact", "rounded", "quantized", "stale"}}
ALWAYS = "graph_parallel"  # full precision, overlapped
Rule = Callable[[Sequence[Pair]], Pair]


def planner(pairs: Sequence[Pair]) -> Pair:
    """The least predicted, as the planner chooses where predictions are equal."""
    return min(pairs, key=lambda p: (p.predicted, p.label))


def depth_rule(pairs: Sequence[Pair]) -> Pair:
    """L alpha > W: the pipeline with the most chunks there is, else graph parallelism (specification 8.1)."""
    said = always(pairs).said
    pipelines = [p for p in pairs if p.family == "gnnpipe"]
    if pipelines and said["layers"] * said["alpha"] > said["ranks"]:
        return max(pipelines, key=lambda p: p.label)
    return always(pairs)


def always(pairs: Sequence[Pair]) -> Pair:
    return next(p for p in pairs if p.label == ALWAYS)


RULES: Mapping[str, Rule] = {"planner": planner, "always graph_parallel": always, "depth rule": depth_rule}


def random_mean(pairs: Sequence[Pair]) -> float:
    """Mean regret of a choice at random."""
    best = min(p.measured for p in pairs)
    return statistics.fmean(p.measured / best - 1 for p in pairs)


def choices(
    pairs: Sequence[Pair],
    *,
    keys: Sequence[str] = ("graph", "model", "ranks", "link"),
    classes: Mapping[str, Collection[str]] = ALLOWED,
    rules: Mapping[str, Rule] = RULES,
) -> Iterable[dict[str, Any]]:
    """A line a cell, which has these keys, and a set of classes."""
    for values, cell in by(pairs, *keys).items():
        for name, allowed in classes.items():
            mine = within(cell, allowed)
            if len(mine) > 1:
                yield {**dict(zip(keys, values, strict=True)), "allowed": name, **choose(mine, rules)}


def within(pairs: Sequence[Pair], allowed: Collection[str]) -> list[Pair]:
    return [p for p in pairs if set(p.said["quality"]) <= set(allowed)]


def choose(pairs: Sequence[Pair], rules: Mapping[str, Rule]) -> dict[str, Any]:
    """What each rule chooses, in seconds measured. `regret`: over the best one, less one."""
    best = min(pairs, key=lambda p: p.measured)
    chosen = {name: rule(pairs) for name, rule in rules.items()}
    return {
        "candidates": len(pairs),
        "best": best.label,
        "best_seconds": best.measured,
        "chosen": {rule: p.label for rule, p in chosen.items()},
        "regret": {rule: p.measured / best.measured - 1 for rule, p in chosen.items()} | {"random": random_mean(pairs)},
        "speedup": always(pairs).measured / chosen["planner"].measured,
        "possible": always(pairs).measured / best.measured,
    }
