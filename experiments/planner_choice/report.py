"""Tables of results.jsonl: `python experiments/planner_choice/report.py [--smoke]`."""

import argparse
import statistics
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent / "planner_accuracy"), str(HERE.parent)]

import pool
import records
from choices import choices
from pairs import Pair, by

WITHIN = 0.05
Rows = Sequence[dict[str, Any]]


def summary(rows: Rows) -> Iterable[str]:
    """A line a set of classes and a rule."""
    yield "| allowed | rule | cells | within 5 % of the best | mean regret | worst | times graph_parallel, mean | max |"
    yield "|---|---|---|---|---|---|---|---|"
    for allowed in dict.fromkeys(row["allowed"] for row in rows):
        mine = [row for row in rows if row["allowed"] == allowed]
        for rule in mine[0]["regret"]:
            regrets = [row["regret"][rule] for row in mine]
            near = f"{sum(r <= WITHIN for r in regrets) / len(regrets):.0%}" if rule != "random" else ""
            gains = [row["possible"] / (1 + r) for row, r in zip(mine, regrets, strict=True)]
            speed = f"{statistics.geometric_mean(gains):.2f} | {max(gains):.2f}" if rule != "random" else "|"
            yield (
                f"| {allowed} | {rule} | {len(mine)} | {near} | {statistics.fmean(regrets):.1%} | {max(regrets):.1%} "
                f"| {speed} |"
            )
        most = [row["possible"] for row in mine]
        yield (
            f"| {allowed} | the best | {len(mine)} | 100% | 0.0% | 0.0% "
            f"| {statistics.geometric_mean(most):.2f} | {max(most):.2f} |"
        )


def cells(rows: Rows) -> Iterable[str]:
    yield "| graph | model | link | allowed | best | planner's | regret | depth rule's | regret | graph_parallel / it |"
    yield "|---|---|---|---|---|---|---|---|---|---|"
    for row in rows:
        chosen, regret = row["chosen"], row["regret"]
        yield (
            f"| {row['graph']} | {row['model']} | {row['link']} | {row['allowed']} | {row['best']} "
            f"| {chosen['planner']} | {regret['planner']:.1%} | {chosen['depth rule']} | {regret['depth rule']:.1%} "
            f"| {row['speedup']:.2f} |"
        )


def chosen_from_pool(rows: Rows) -> Iterable[str]:
    yield (
        "| graph | model | link | allowed | candidates | best | its ms | planner's | regret | graph_parallel / it "
        "| one device / it |"
    )
    yield "|" + "---|" * 11
    for row in rows:
        regret = row["regret"]
        yield (
            f"| {row['graph']} | {row['model']} | {row['link']} | {row['allowed']} | {row['candidates']} "
            f"| {row['best']} | {1e3 * row['best_seconds']:.1f} | {row['chosen']['planner']} | {regret['planner']:.1%} "
            f"| {row['speedup']:.2f} | {(1 + regret[pool.SINGLE]) / (1 + regret['planner']):.2f} |"
        )


def families(pairs: Sequence[Pair]) -> Iterable[str]:
    """How far predictions of each are from what was measured."""
    yield "| candidate | cells | predicted over measured | least | most |"
    yield "|---|---|---|---|---|"
    labels = {p.label: [q.predicted / q.measured for q in pairs if q.label == p.label] for p in pairs}
    for label, ratios in labels.items():
        mean = statistics.geometric_mean(ratios)
        yield f"| {label} | {len(ratios)} | {mean:.2f} | {min(ratios):.2f} | {max(ratios):.2f} |"


def measured(pairs: Sequence[Pair]) -> Iterable[str]:
    yield "| graph | model | link | candidate, fastest first | class | predicted ms | measured ms | launches differ |"
    yield "|" + "---|" * 8
    for (graph, model, link), mine in by(pairs, *pool.POOL_KEYS).items():
        for p in sorted(mine, key=lambda p: p.measured):
            spread = "" if p.spread is None else f"{p.spread:.0%}"
            quality = ", ".join(p.said["quality"])
            yield (
                f"| {graph} | {model} | {link} | {p.label} | {quality} | {1e3 * p.predicted:.1f} "
                f"| {1e3 * p.measured:.1f} | {spread} |"
            )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--smoke", action="store_true")
    options = parser.parse_args()
    if not options.smoke and (pairs := pool.pairs()):
        rows = list(choices(pairs, keys=pool.POOL_KEYS, classes=pool.POOL_CLASSES, rules=pool.POOL_RULES))
        print("### every strategy and one device\n")
        for lines in (summary(rows), chosen_from_pool(rows), families(pairs), measured(pairs)):
            print("\n".join(lines), end="\n\n")
        print("### cells of planner_accuracy\n")
    rows = records.read(HERE / ("smoke.jsonl" if options.smoke else "results.jsonl"))
    for table in (summary, cells):
        print("\n".join(table(rows)), end="\n\n")


if __name__ == "__main__":
    main()
