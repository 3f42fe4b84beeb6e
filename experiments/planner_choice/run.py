"""The planner's choice against the measured best, cell by cell, from what planner_accuracy predicted and measured.

python experiments/planner_accuracy/run.py      # the measurements
python experiments/planner_choice/run.py        # seconds: lines of results.jsonl, one a cell and a set of classes
python experiments/planner_choice/run.py --smoke    # from planner_accuracy's smoke run
python experiments/planner_choice/report.py     # the tables
"""

import argparse
import statistics
import sys
from collections.abc import Collection, Iterable, Sequence
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
ACCURACY = HERE.parent / "planner_accuracy"
sys.path[:0] = [str(ACCURACY), str(HERE.parent)]

import records
from pairs import Pair, by, read

ALLOWED = {"exact": {"exact"}, "all classes": {"exact", "rounded", "quantized", "stale"}}
ALWAYS = "graph_parallel"  # full precision, overlapped


def depth_rule(pairs: Sequence[Pair]) -> Pair:
    """L alpha > W: the pipeline with the most chunks there is, else graph parallelism (specification 8.1)."""
    said = pairs[0].said
    pipelines = [p for p in pairs if p.family == "gnnpipe"]
    if pipelines and said["layers"] * said["alpha"] > said["ranks"]:
        return max(pipelines, key=lambda p: p.label)
    return always(pairs)


def always(pairs: Sequence[Pair]) -> Pair:
    return next(p for p in pairs if p.label == ALWAYS)


def random_mean(pairs: Sequence[Pair]) -> float:
    """Mean regret of a choice at random."""
    best = min(p.measured for p in pairs)
    return statistics.fmean(p.measured / best - 1 for p in pairs)


def choices(pairs: Sequence[Pair]) -> Iterable[dict[str, Any]]:
    for key, cell in by(pairs, "graph", "model", "ranks", "link").items():
        for name, allowed in ALLOWED.items():
            mine = within(cell, allowed)
            if len(mine) > 1:
                yield {
                    **dict(zip(("graph", "model", "ranks", "link"), key, strict=True)),
                    "allowed": name,
                    **choose(mine),
                }


def within(pairs: Sequence[Pair], allowed: Collection[str]) -> list[Pair]:
    return [p for p in pairs if set(p.said["quality"]) <= set(allowed)]


def choose(pairs: Sequence[Pair]) -> dict[str, Any]:
    """What each rule chooses, in seconds measured. `regret`: over the best one, less one."""
    best = min(pairs, key=lambda p: p.measured)
    chosen = min(pairs, key=lambda p: (p.predicted, p.label))  # as the planner does where predictions are equal
    rules = {"planner": chosen, "always graph_parallel": always(pairs), "depth rule": depth_rule(pairs)}
    return {
        "candidates": len(pairs),
        "best": best.label,
        "best_seconds": best.measured,
        "chosen": {rule: p.label for rule, p in rules.items()},
        "regret": {rule: p.measured / best.measured - 1 for rule, p in rules.items()} | {"random": random_mean(pairs)},
        "speedup": always(pairs).measured / chosen.measured,
        "possible": always(pairs).measured / best.measured,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--smoke", action="store_true")
    options = parser.parse_args()
    prefix = "smoke_" if options.smoke else ""
    pairs = read(
        ACCURACY / f"{prefix}predictions.jsonl", ACCURACY / ("smoke.jsonl" if options.smoke else "results.jsonl")
    )
    rows = list(choices(pairs))
    records.replace(HERE / ("smoke.jsonl" if options.smoke else "results.jsonl"), rows)
    print(f"{len(rows)} lines")


if __name__ == "__main__":
    main()
