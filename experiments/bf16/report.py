"""The table of README.md from results.jsonl: `python experiments/bf16/report.py`."""

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent))

import records

from gnnpar.report.formatting import interval
from gnnpar.report.statistics import family, geometric_mean, mean

MARGIN = 0.3  # points
HEADINGS = ("dataset", "model", "seeds", "fp32, %", "bf16, %", "points over fp32", "verdict", "epoch, of fp32")
Results = Mapping[int, Any]  # seed -> result


def load() -> dict[str, dict[str, dict[int, Any]]]:
    """cell -> precision -> seed -> result"""
    found: dict[str, dict[str, dict[int, Any]]] = {}
    for row in records.read(HERE / "results.jsonl"):
        cell, _, precision = row["job"].rpartition(" ")
        found.setdefault(cell, {}).setdefault(precision, {})[row["result"]["seed"]] = row["result"]
    return found


def points(results: Results) -> list[float]:
    """Test accuracy at the best validation, in percent."""
    return [100 * results[seed]["metric"]["test_at_best_val"] for seed in sorted(results)]


def differences(found: Mapping[str, Results]) -> list[float]:
    return [ours - theirs for ours, theirs in zip(points(found["bf16"]), points(found["fp32"]), strict=True)]


def times(found: Mapping[str, Results]) -> float:
    fast, plain = found["bf16"], found["fp32"]
    return geometric_mean(
        [fast[seed]["train_wall_seconds"] / plain[seed]["train_wall_seconds"] for seed in plain]
    ).value


def main() -> None:
    cells = load()
    first = next(iter(next(iter(cells.values()))["fp32"].values()))
    print(f"{first['hardware']}, torch {first['versions']['torch']}", "", sep="\n")
    print(f"| {' | '.join(HEADINGS)} |", "|---" * len(HEADINGS) + "|", sep="\n")
    verdicts = family([differences(found) for found in cells.values()], MARGIN)
    for (cell, found), verdict in zip(cells.items(), verdicts, strict=True):
        dataset, model = cell.split()
        cells_of = [
            dataset,
            model,
            str(len(found["fp32"])),
            interval(mean(points(found["fp32"]))),
            interval(mean(points(found["bf16"]))),
            interval(mean(differences(found)), signed=True),
            verdict,
            f"{times(found):.2f}",
        ]
        print(f"| {' | '.join(cells_of)} |")


if __name__ == "__main__":
    main()
