"""Tables of README.md from the lines of both parts: `python experiments/many_machines/report.py`."""

import sys
from pathlib import Path

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent))

import blocks
from paired import table
from run import PARTS

BASES = {"rounds": ("graph_parallel", "sar, rounds of a peer"), "pipelines": ("vanilla", "graph_parallel bf16")}


def main() -> None:
    for part, (_, jobs) in PARTS.items():
        found = blocks.by_job(HERE / f"{part}.jsonl")
        if not found:  # a part that was not run
            continue
        by_cell: dict[str, list[str]] = {}
        for job in jobs():
            cell, _, name = job.partition("; ")
            by_cell.setdefault(cell, []).append(name)
        for cell, names in by_cell.items():
            bases = tuple(base for base in BASES[part] if base in names)
            print(f"### {cell}", "", *table(found, cell, names, bases), "", sep="\n")


if __name__ == "__main__":
    main()
