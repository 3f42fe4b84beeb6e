"""Tables of README.md from results.jsonl: `python experiments/four_machines/report.py`."""

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent))

import blocks
from paired import Cells, milliseconds, peak_mib, seconds, times_text
from run import METHODS

from gnnpar.report.statistics import mean

EXPOSED = ("exposed_wire", "exposed_skew", "reduce")
BASES = ("vanilla", "graph_parallel", "single")


def share(line: Mapping[str, Any]) -> float:
    """Of an epoch that passes in communication: what no work hides."""
    return sum(line["result"]["breakdown_seconds"][part] for part in EXPOSED) / seconds(line)


def table(cells: Cells, layers: str) -> list[str]:
    """A line a method."""
    heads = [f"times {base}" for base in BASES]
    lines = ["| strategy | ms an epoch | " + " | ".join(heads) + " | share | MiB of a rank |", "|---" * 7 + "|"]
    for name in METHODS[layers]:
        job = f"{layers}; {name}"
        line = [f"`{name}`", milliseconds(cells, job)]
        line += [times_text(cells, job, f"{layers}; {base}") for base in BASES]
        line.append(f"{100 * mean([share(row) for row in cells[job].values()], fewest=3).value:.0f}%")
        line.append(f"{peak_mib(cells, job):.0f}")
        lines.append("| " + " | ".join(line) + " |")
    return lines


if __name__ == "__main__":
    found = blocks.by_job(HERE / "results.jsonl")
    for layers in METHODS:
        print(f"### {layers} layers", "", *table(found, layers), "", sep="\n")
