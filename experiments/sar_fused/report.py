"""The table of README.md from results.jsonl: `python experiments/sar_fused/report.py`."""

import sys
from pathlib import Path

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent))

import blocks
from paired import Cells, milliseconds, peak_mib, times_text
from run import BODIES, STRATEGIES, WORLDS


def table(cells: Cells, world: str) -> list[str]:
    heads = ["strategy", "attention", "ms an epoch", "times unfused", "times graph_parallel", "MiB of a rank"]
    lines = ["| " + " | ".join(heads) + " |", "|---" * len(heads) + "|"]
    for strategy in STRATEGIES:
        for body in BODIES:
            job = f"{world}; {strategy}, {body}"
            line = [f"`{strategy}`", body, milliseconds(cells, job)]
            line.append(times_text(cells, job, f"{world}; {strategy}, unfused"))
            line.append(times_text(cells, job, f"{world}; graph_parallel, {body}"))
            line.append(f"{peak_mib(cells, job):.0f}")
            lines.append("| " + " | ".join(line) + " |")
    return lines


if __name__ == "__main__":
    found = blocks.by_job(HERE / "results.jsonl")
    for world in WORLDS:
        print(f"### {world}", "", *table(found, world), "", sep="\n")
