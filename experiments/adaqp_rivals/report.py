"""Tables of README.md from results.jsonl: `python experiments/adaqp_rivals/report.py`."""

import sys
from pathlib import Path

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent))

import blocks
from paired import Cells, milliseconds, peak_mib, sent_mib, times_text
from run import METHODS, MODELS

from gnnpar.report.statistics import mean

BASES = ("vanilla", "pipegcn", "sancus")


def table(cells: Cells, model: str) -> list[str]:
    """A line a method."""
    heads = ["strategy", "ms an epoch", *(f"times {base}" for base in BASES), "MiB sent an epoch", "MiB of a rank"]
    lines = ["| " + " | ".join(heads) + " |", "|---" * len(heads) + "|"]
    for name in METHODS:
        job = f"{model}; {name}"
        line = [f"`{name}`", milliseconds(cells, job)]
        line += [times_text(cells, job, f"{model}; {base}") for base in BASES]
        line.append(f"{mean([sent_mib(row) for row in cells[job].values()], fewest=3).value:.1f}")
        line.append(f"{peak_mib(cells, job):.0f}")
        lines.append("| " + " | ".join(line) + " |")
    return lines


if __name__ == "__main__":
    found = blocks.by_job(HERE / "results.jsonl")
    for model in MODELS:
        print(f"### {model}", "", *table(found, model), "", sep="\n")
