"""Tables of results.jsonl: `python experiments/planner_choice/report.py [--smoke]`."""

import argparse
import statistics
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent))

import records

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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--smoke", action="store_true")
    options = parser.parse_args()
    rows = records.read(HERE / ("smoke.jsonl" if options.smoke else "results.jsonl"))
    for table in (summary, cells):
        print("\n".join(table(rows)), end="\n\n")


if __name__ == "__main__":
    main()
