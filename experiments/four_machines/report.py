"""Tables of README.md from results.jsonl: `python experiments/four_machines/report.py`."""

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent))

import blocks
from run import METHODS

from gnnpar.report.statistics import Estimate, geometric_mean, mean

EXPOSED = ("exposed_wire", "exposed_skew", "reduce")
BASES = ("vanilla", "graph_parallel", "single")
Cells = Mapping[str, Mapping[int, Any]]  # job -> block -> result


def load() -> Cells:
    lines = blocks.by_job(HERE / "results.jsonl")
    return {job: {block: row["result"] for block, row in of_job.items()} for job, of_job in lines.items()}


def seconds(result: Mapping[str, Any]) -> float:
    return float(result["epoch_seconds"]["mean"])


def times(cells: Cells, job: str, base: str) -> Estimate:
    """How many times as fast as the base in the same block."""
    common = sorted(cells[job].keys() & cells[base].keys())
    return geometric_mean([seconds(cells[base][block]) / seconds(cells[job][block]) for block in common])


def share(result: Mapping[str, Any]) -> float:
    """Of an epoch that passes in communication: what no work hides."""
    return sum(result["breakdown_seconds"][part] for part in EXPOSED) / seconds(result)


def table(cells: Cells, layers: str) -> list[str]:
    """A line a method."""
    heads = [f"times {base}" for base in BASES]
    lines = ["| strategy | ms an epoch | " + " | ".join(heads) + " | share | MiB of a rank |", "|---" * 7 + "|"]
    for name in METHODS[layers]:
        job = f"{layers}; {name}"
        results = list(cells[job].values())
        line = [f"`{name}`", f"{1000 * geometric_mean([seconds(r) for r in results]).value:.0f}"]
        for base in BASES:
            found = times(cells, job, f"{layers}; {base}")
            line.append("1" if name == base else f"{found.value:.2f} ({found.low:.2f} to {found.high:.2f})")
        line.append(f"{100 * mean([share(r) for r in results], fewest=3).value:.0f}%")
        line.append(f"{max(max(r['memory_bytes']['peak']) for r in results) / 2**20:.0f}")
        lines.append("| " + " | ".join(line) + " |")
    return lines


if __name__ == "__main__":
    found = load()
    for layers in METHODS:
        print(f"### {layers} layers", "", *table(found, layers), "", sep="\n")
