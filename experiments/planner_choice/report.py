"""What the planner and simple rules choose, and what that costs: tables."""

import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent

import reports
from planner_accuracy.pairs import Pair, by
from planner_choice import pool
from planner_choice.choices import choices
from records import Files

WITHIN = 0.05
KEYS = ("graph", "model", "link", "allowed")
Rows = Sequence[dict[str, Any]]


def summary(rows: Rows) -> str:
    """A line a set of classes and a rule."""
    heads = ("allowed", "rule", "cells", "within 5 % of the best", "mean regret", "worst")
    lines = [reports.table((*heads, "times graph_parallel, mean", "max"), [])]
    for allowed, mine in reports.by(rows, lambda row: row["allowed"]).items():
        rules = {rule: [row["regret"][rule] for row in mine] for rule in mine[0]["regret"]}
        for rule, regrets in rules.items():
            near = f"{sum(r <= WITHIN for r in regrets) / len(regrets):.0%}" if rule != "random" else ""
            gains = [row["possible"] / (1 + r) for row, r in zip(mine, regrets, strict=True)]
            speed = f"{statistics.geometric_mean(gains):.2f} | {max(gains):.2f}" if rule != "random" else "|"
            found = f"{near} | {statistics.fmean(regrets):.1%} | {max(regrets):.1%} | {speed}"
            lines.append(f"| {allowed} | {rule} | {len(mine)} | {found} |")
        most = [row["possible"] for row in mine]
        found = f"100% | 0.0% | 0.0% | {statistics.geometric_mean(most):.2f} | {max(most):.2f}"
        lines.append(f"| {allowed} | the best | {len(mine)} | {found} |")
    return "\n".join(lines)


def cells(rows: Rows) -> str:
    names = ("best", "planner's", "regret", "depth rule's", "regret", "graph_parallel / it")
    lines = []
    for row in rows:
        rules = [(row["chosen"][rule], f"{row['regret'][rule]:.1%}") for rule in ("planner", "depth rule")]
        lines.append([*(row[key] for key in KEYS), row["best"], *rules[0], *rules[1], f"{row['speedup']:.2f}"])
    return reports.table((*KEYS, *names), lines)


def chosen_from_pool(rows: Rows) -> str:
    of = {
        **{key: lambda row, key=key: row[key] for key in (*KEYS, "candidates", "best")},
        "its ms": lambda row: f"{1e3 * row['best_seconds']:.1f}",
        "planner's": lambda row: row["chosen"]["planner"],
        "regret": lambda row: f"{row['regret']['planner']:.1%}",
        "graph_parallel / it": lambda row: f"{row['speedup']:.2f}",
        "one device / it": lambda row: f"{(1 + row['regret'][pool.SINGLE]) / (1 + row['regret']['planner']):.2f}",
    }
    return reports.columns(of, rows)


def families(pairs: Sequence[Pair]) -> str:
    """How far predictions of each are from what was measured."""
    lines = []
    for label, mine in reports.by(pairs, lambda p: p.label).items():
        ratios = [p.predicted / p.measured for p in mine]
        found = (statistics.geometric_mean(ratios), min(ratios), max(ratios))
        lines.append([label, len(ratios), *(f"{each:.2f}" for each in found)])
    return reports.table(("candidate", "cells", "predicted over measured", "least", "most"), lines)


def measured(pairs: Sequence[Pair]) -> str:
    heads = ("candidate, fastest first", "class", "predicted ms", "measured ms", "launches differ")
    lines = []
    for key, mine in by(pairs, *pool.POOL_KEYS).items():
        for p in sorted(mine, key=lambda p: p.measured):
            times = [f"{1e3 * each:.1f}" for each in (p.predicted, p.measured)]
            spread = "" if p.spread is None else f"{p.spread:.0%}"
            lines.append([*key, p.label, ", ".join(p.said["quality"]), *times, spread])
    return reports.table((*pool.POOL_KEYS, *heads), lines)


def report(files: Files) -> None:
    if pairs := pool.measured(files):
        rows = list(choices(pairs, keys=pool.POOL_KEYS, classes=pool.POOL_CLASSES, rules=pool.POOL_RULES))
        print("### every strategy and one device\n")
        for shown in (summary(rows), chosen_from_pool(rows), families(pairs), measured(pairs)):
            print(shown, end="\n\n")
        print("### cells of planner_accuracy\n")
    rows = files.read()
    print(summary(rows), cells(rows), sep="\n\n", end="\n\n")
