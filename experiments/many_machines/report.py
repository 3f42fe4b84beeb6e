"""Tables of README.md from the raw lines: `python experiments/many_machines/report.py`."""

import sys
from pathlib import Path

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent))

import blocks
from paired import Cells, milliseconds, peak_mib, times_text
from run import PARTS, jobs

from gnnpar.report.statistics import mean

EXPOSED = ("exposed_wire", "exposed_skew", "reduce")
BASES = {"rounds": "graph_parallel", "pipelines": "vanilla"}


def share(line: dict) -> float:
    """Of an epoch that passes in communication or in the bubble of a pipeline: what no work hides."""
    seconds = line["result"]["breakdown_seconds"]
    return sum(seconds[part] for part in EXPOSED) / line["result"]["epoch_seconds"]["mean"]


def table(cells: Cells, part: str, cell: str) -> list[str]:
    base = f"{cell}; {BASES[part]}"
    heads = ["strategy", "ms an epoch", f"times {BASES[part]}", "share", "MiB of a rank"]
    lines = ["| " + " | ".join(heads) + " |", "|---" * len(heads) + "|"]
    for job in jobs(part, smoke=False):
        if job.partition(";")[0] != cell:
            continue
        shares = mean([share(line) for line in cells[job].values()], fewest=3)
        line = [f"`{job.partition('; ')[2]}`", milliseconds(cells, job)]
        line.append(times_text(cells, job, base) if base in cells else "-")
        line += [f"{100 * shares.value:.0f}%", f"{peak_mib(cells, job):.0f}"]
        lines.append("| " + " | ".join(line) + " |")
    return lines


if __name__ == "__main__":
    for part in PARTS:
        found = blocks.by_job(HERE / f"{part}.jsonl")
        for cell in dict.fromkeys(job.partition(";")[0] for job in jobs(part, smoke=False)):
            if found:
                print(f"### {cell}", "", *table(found, part, cell), "", sep="\n")
