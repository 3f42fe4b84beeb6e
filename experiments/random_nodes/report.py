"""Tables of README.md: `python experiments/random_nodes/report.py`.

Differences are paired by seed with full-graph training; "late gain": the points by which the last fifth of the epochs
raises the best validation.
"""

import statistics
import sys
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import Any  # of JSON

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent))

import records

from gnnpar.report.formatting import interval
from gnnpar.report.statistics import FEWEST_SEEDS, mean, non_inferiority

MARGIN = 1.0  # points
LAST = 0.8  # of a run: what validation gains after it
FULL = "full"
HEADINGS = (
    "model",
    "variant",
    "test, %",
    "over full, points",
    "verdict",
    "epochs",
    "steps an epoch",
    "in-edges of a step's nodes kept",
    "late gain",
    "seeds",
)
Runs = dict[int, Mapping[str, Any]]  # by seed


def main() -> None:
    cells: dict[str, dict[tuple[str, str], Runs]] = defaultdict(lambda: defaultdict(dict))
    for row in records.read(HERE / "results.jsonl"):
        cells[row["graph"]][row["model"], row["variant"]][row["seed"]] = row
    for graph, found in cells.items():
        print("", f"### {graph}", "", f"| {' | '.join(HEADINGS)} |", "|---" * len(HEADINGS) + "|", sep="\n")
        for (model, variant), runs in found.items():
            print(f"| {' | '.join((model, variant, *columns(variant, runs, found[model, FULL])))} |")


def columns(variant: str, runs: Runs, full: Runs) -> list[str]:
    first = next(iter(runs.values()))
    differences = [points(runs[seed]) - points(full[seed]) for seed in sorted(runs.keys() & full.keys())]
    gain = statistics.fmean(late_gain(run) for run in runs.values())
    verdict = "not converged" if gain > MARGIN else non_inferiority(differences, MARGIN)
    return [
        f"{statistics.fmean(points(run) for run in runs.values()):.1f}",
        "" if variant == FULL else gap_of(differences),
        "" if variant == FULL else verdict,
        str(first["result"]["epochs"]),
        str(first["steps"] or 1),
        kept(variant, first),
        f"{gain:+.1f}",
        str(len(runs)),
    ]


def points(run: Mapping[str, Any]) -> float:
    """Test accuracy at the best validation, in percent."""
    return 100 * run["result"]["metric"]["test_at_best_val"]


def gap_of(differences: list[float]) -> str:
    """With the interval where there are seeds enough for one, else with the difference of each."""
    if len(differences) >= FEWEST_SEEDS:
        return interval(mean(differences), signed=True)
    return f"{statistics.fmean(differences):+.2f} ({', '.join(f'{each:+.2f}' for each in differences)})"


def kept(variant: str, run: Mapping[str, Any]) -> str:
    """Share of the edges that the steps of an epoch have together, without self loops."""
    if run["edges"] is None:
        return {"control": "0"}.get(variant, "1")
    return f"{(run['edges'] - run['nodes']) / (run['whole'] - run['nodes']):.3f}"


def late_gain(run: Mapping[str, Any]) -> float:
    end = LAST * run["result"]["epochs"]
    before = max(value for epoch, value in run["validation"] if epoch < end)
    return 100 * (max(value for _, value in run["validation"]) - before)


if __name__ == "__main__":
    main()
