"""Tables of README.md from results.jsonl: `python experiments/adaqp_rivals/report.py`."""

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent))

import blocks
from run import METHODS, MODELS

from gnnpar.report.statistics import geometric_mean, mean

BASES = ("vanilla", "pipegcn", "sancus")
Cells = Mapping[str, Mapping[int, Any]]  # job -> block -> result


def load() -> Cells:
    lines = blocks.by_job(HERE / "results.jsonl")
    return {job: {block: row["result"] for block, row in of_job.items()} for job, of_job in lines.items()}


def seconds(result: Mapping[str, Any]) -> float:
    return float(result["epoch_seconds"]["mean"])


def times(cells: Cells, job: str, base: str) -> str:
    """How many times as fast as the base in the same block."""
    common = sorted(cells[job].keys() & cells[base].keys())
    found = geometric_mean([seconds(cells[base][block]) / seconds(cells[job][block]) for block in common])
    return "1" if job == base else f"{found.value:.2f} ({found.low:.2f} to {found.high:.2f})"


def table(cells: Cells, model: str) -> list[str]:
    """A line a method."""
    heads = ["strategy", "ms an epoch", *(f"times {base}" for base in BASES), "MiB sent an epoch", "MiB of a rank"]
    lines = ["| " + " | ".join(heads) + " |", "|---" * len(heads) + "|"]
    for name in METHODS:
        results = list(cells[f"{model}; {name}"].values())
        line = [f"`{name}`", f"{1000 * geometric_mean([seconds(r) for r in results]).value:.0f}"]
        line += [times(cells, f"{model}; {name}", f"{model}; {base}") for base in BASES]
        line.append(f"{mean([r['bytes_per_epoch']['total'] / 2**20 for r in results], fewest=3).value:.1f}")
        line.append(f"{max(max(r['memory_bytes']['peak']) for r in results) / 2**20:.0f}")
        lines.append("| " + " | ".join(line) + " |")
    return lines


if __name__ == "__main__":
    found = load()
    for model in MODELS:
        print(f"### {model}", "", *table(found, model), "", sep="\n")
