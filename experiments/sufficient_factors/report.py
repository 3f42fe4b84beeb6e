"""The tables of README.md from results.jsonl: `python experiments/sufficient_factors/report.py`."""

import sys
from pathlib import Path

HERE = Path(__file__).parent.resolve()
sys.path.insert(0, str(HERE.parent))

import blocks
from paired import Cells, milliseconds, times_text
from run import METHODS, RATES

BASE = "sum over ranks"


def table(cells: Cells, cell: str) -> list[str]:
    heads = [
        "gradients of weights",
        "ms an epoch",
        f"times {BASE}",
        "MiB for them",
        "MiB in all",
        "last loss",
    ]
    lines = ["| " + " | ".join(heads) + " |", "|---" * len(heads) + "|"]
    for name in METHODS:
        job = f"{cell}; {name}"
        one = next(iter(cells[job].values()))["result"]
        line = [name, milliseconds(cells, job), times_text(cells, job, f"{cell}; {BASE}")]
        line += [f"{one['bytes_per_epoch'][kind] / 2**20:.1f}" for kind in ("reduce", "total")]
        lines.append("| " + " | ".join([*line, f"{one['loss']['last']:.5f}"]) + " |")
    return lines


if __name__ == "__main__":
    found = blocks.by_job(HERE / "results.jsonl")
    for model, rates in RATES.items():
        for rate in rates:
            print(f"### {model}, {rate} Gbit/s", "", *table(found, f"{model}, {rate} Gbit/s"), "", sep="\n")
