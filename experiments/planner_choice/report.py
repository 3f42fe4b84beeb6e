"""What the planner and simple rules choose, and what that costs: tables."""

import statistics
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

import reports
from planner_accuracy.report import KEYS, Pairs, by, ratio, read, spread
from records import Files

WITHIN = 0.05
CELL = ("graph", "model", "link", "allowed")
SUMMARY = ("allowed", "rule", "cells", "within 5 % of the best", "mean regret", "worst", "times graph_parallel, mean")
CELLS = (*CELL, "best", "planner's", "regret", "depth rule's", "regret", "graph_parallel / it")
MEASURED = (*CELL[:3], "candidate, fastest first", "class", "predicted ms", "measured ms", "launches differ")
Rows = Sequence[dict[str, Any]]
ALL = {"exact": {"exact"}, "all classes": {"exact", "rounded", "quantized", "stale"}}
SINGLE = "single, 2 threads"
Pair = dict[str, Any]
Rule = Callable[[Pairs], Pair]


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


RULES: Mapping[str, Rule] = {
    "planner": lambda pairs: min(pairs, key=lambda p: (p["epoch_seconds"], p["label"])),  # as it breaks ties
    "always graph_parallel": always,
    "depth rule": depth_rule,
}
POOL_RULES: Mapping[str, Rule] = {
    **RULES,
    "12 layers": twelve_layers,
    SINGLE: lambda pairs: next(p for p in pairs if p["family"] == "single"),
}
POOL_KEYS = CELL[:3]
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
            found = {"candidates": len(mine), "best": best["label"], "best_seconds": best["measured"]}
            found |= {"chosen": {rule: p["label"] for rule, p in chosen.items()}, "regret": regret}
            found["speedup"] = always(mine)["measured"] / chosen["planner"]["measured"]
            found["possible"] = always(mine)["measured"] / best["measured"]
            yield {**dict(zip(keys, values, strict=True)), "allowed": name, **found}


def summary(rows: Rows) -> str:
    """A line a set of classes and a rule."""
    lines = [reports.table((*SUMMARY, "max"), [])]
    for allowed, mine in reports.by(rows, lambda row: row["allowed"]).items():
        for rule in (*mine[0]["regret"], "the best"):
            regrets = [row["regret"].get(rule, 0.0) for row in mine]
            near = f"{sum(r <= WITHIN for r in regrets) / len(regrets):.0%}"
            gains = [row["possible"] / (1 + r) for row, r in zip(mine, regrets, strict=True)]
            speed = f"{statistics.geometric_mean(gains):.2f} | {max(gains):.2f}"
            near, speed = ("", "|") if rule == "random" else (near, speed)
            found = f"{near} | {statistics.fmean(regrets):.1%} | {max(regrets):.1%} | {speed}"
            lines.append(f"| {allowed} | {rule} | {len(mine)} | {found} |")
    return "\n".join(lines)


def cells(rows: Rows) -> str:
    lines = []
    for row in rows:
        rules = [(row["chosen"][rule], f"{row['regret'][rule]:.1%}") for rule in ("planner", "depth rule")]
        lines.append([*(row[key] for key in CELL), row["best"], *rules[0], *rules[1], f"{row['speedup']:.2f}"])
    return reports.table(CELLS, lines)


def chosen_from_pool(rows: Rows) -> str:
    of = {
        **{key: lambda row, key=key: row[key] for key in (*CELL, "candidates", "best")},
        "its ms": lambda row: f"{1e3 * row['best_seconds']:.1f}",
        "planner's": lambda row: row["chosen"]["planner"],
        "regret": lambda row: f"{row['regret']['planner']:.1%}",
        "graph_parallel / it": lambda row: f"{row['speedup']:.2f}",
        "one device / it": lambda row: f"{(1 + row['regret'][SINGLE]) / (1 + row['regret']['planner']):.2f}",
    }
    return reports.columns(of, rows)


def families(pairs: Pairs) -> str:
    """How far predictions of each are from what was measured."""
    of = {
        "candidate": lambda mine: mine[0]["label"],
        "cells": len,
        "predicted over measured": lambda mine: f"{ratio(mine):.2f}",
        "least": lambda mine: f"{min(p['ratio'] for p in mine):.2f}",
        "most": lambda mine: f"{max(p['ratio'] for p in mine):.2f}",
    }
    return reports.columns(of, by(pairs, "label").values())


def measured(pairs: Pairs) -> str:
    lines = []
    for key, mine in by(pairs, *POOL_KEYS).items():
        for p in sorted(mine, key=lambda p: p["measured"]):
            times = [f"{1e3 * p[each]:.1f}" for each in ("epoch_seconds", "measured")]
            differ = f"{spread(p):.0%}" if len(p["launches"]) > 1 else ""
            lines.append([*key, p["label"], ", ".join(p["quality"]), *times, differ])
    return reports.table(MEASURED, lines)


def report(files: Files) -> None:
    """Print the tables. An epoch of the pool is the mean of a launch, which holds whole periods."""
    if pairs := read(files("pool_predictions"), files("pool"), epoch="mean"):
        rows = list(choices(pairs, POOL_KEYS, POOL_CLASSES, POOL_RULES))
        print("### every strategy and one device\n")
        for shown in (summary(rows), chosen_from_pool(rows), families(pairs), measured(pairs)):
            print(shown, end="\n\n")
        print("### cells of planner_accuracy\n")
    rows = files.read()
    print(summary(rows), cells(rows), sep="\n\n", end="\n\n")
