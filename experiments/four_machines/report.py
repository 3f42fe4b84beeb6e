"""Tables of README.md from results.jsonl: `python experiments/four_machines/report.py`."""

import sys
from pathlib import Path

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent))

import blocks
from paired import Cells, milliseconds, peak_mib, share_percent, times_text
from run import METHODS

BASES = ("vanilla", "graph_parallel", "single")


def table(cells: Cells, layers: str) -> list[str]:
    """A line a method."""
    heads = [f"times {base}" for base in BASES]
    lines = ["| strategy | ms an epoch | " + " | ".join(heads) + " | share | MiB of a rank |", "|---" * 7 + "|"]
    for name in METHODS[layers]:
        job = f"{layers}; {name}"
        line = [f"`{name}`", milliseconds(cells, job)]
        line += [times_text(cells, job, f"{layers}; {base}") for base in BASES]
        line += [f"{share_percent(cells, job):.0f}%", f"{peak_mib(cells, job):.0f}"]
        lines.append("| " + " | ".join(line) + " |")
    return lines


if __name__ == "__main__":
    found = blocks.by_job(HERE / "results.jsonl")
    for layers in METHODS:
        print(f"### {layers} layers", "", *table(found, layers), "", sep="\n")
