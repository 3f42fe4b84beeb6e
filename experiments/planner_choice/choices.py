"""Rules, and what each chooses among measured configurations."""

import statistics
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any  # of JSON

from planner_accuracy.pairs import KEYS, Pairs, by

ALL = {"exact": {"exact"}, "all classes": {"exact", "rounded", "quantized", "stale"}}
SINGLE = "single, 2 threads"
Pair = dict[str, Any]
Rule = Callable[[Pairs], Pair]


def planner(pairs: Pairs) -> Pair:
    """The least predicted, as the planner chooses where predictions are equal."""
    return min(pairs, key=lambda p: (p["epoch_seconds"], p["label"]))


def depth_rule(pairs: Pairs) -> Pair:
    """L alpha > W: the pipeline with the most chunks there is, else graph parallelism (specification 8.1)."""
    flat, pipelines = always(pairs), [p for p in pairs if p["family"] == "gnnpipe"]
    deep = pipelines and flat["layers"] * flat["alpha"] > flat["ranks"]
    return max(pipelines, key=lambda p: p["label"]) if deep else flat


def always(pairs: Pairs) -> Pair:
    """Full precision, overlapped."""
    return next(p for p in pairs if p["label"] == "graph_parallel")


def twelve_layers(pairs: Pairs) -> Pair:
    """The rule of one line that did as well as the planner before: a pipeline of one chunk for 12 layers or more."""
    found = [p for p in pairs if p["label"] == "gnnpipe 2 stages, 1 chunk" and p["layers"] >= 12]
    return found[0] if found else always(pairs)


def one_device(pairs: Pairs) -> Pair:
    return next(p for p in pairs if p["family"] == "single")


RULES: Mapping[str, Rule] = {"planner": planner, "always graph_parallel": always, "depth rule": depth_rule}
POOL_RULES: Mapping[str, Rule] = {**RULES, "12 layers": twelve_layers, SINGLE: one_device}
POOL_KEYS = ("graph", "model", "link")
POOL_CLASSES = {"exact": {"exact"}, "all but sampled": ALL["all classes"], "all": {*ALL["all classes"], "sampled"}}


def choices(
    pairs: Pairs,
    keys: Sequence[str] = KEYS,
    classes: Mapping[str, Collection[str]] = ALL,
    rules: Mapping[str, Rule] = RULES,
) -> Iterable[dict[str, Any]]:
    """Yield for each cell, which has these keys, and each set of classes what every rule chooses, in seconds measured.
    regret: over the best one, less one."""
    for values, cell in by(pairs, *keys).items():
        for name, allowed in classes.items():
            if len(mine := [p for p in cell if set(p["quality"]) <= set(allowed)]) < 2:
                continue
            best, chosen = min(mine, key=lambda p: p["measured"]), {name: rule(mine) for name, rule in rules.items()}
            regret = {rule: p["measured"] / best["measured"] - 1 for rule, p in chosen.items()}
            regret["random"] = statistics.fmean(p["measured"] / best["measured"] - 1 for p in mine)
            yield {
                **dict(zip(keys, values, strict=True)),
                "allowed": name,
                "candidates": len(mine),
                "best": best["label"],
                "best_seconds": best["measured"],
                "chosen": {rule: p["label"] for rule, p in chosen.items()},
                "regret": regret,
                "speedup": always(mine)["measured"] / chosen["planner"]["measured"],
                "possible": always(mine)["measured"] / best["measured"],
            }
