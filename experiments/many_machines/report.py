"""Tables of README.md from the lines of both parts: `python experiments/many_machines/report.py`."""

import sys
from pathlib import Path

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent))

import blocks
from paired import Cells, milliseconds, peak_mib, share_percent, times_text
from run import PARTS

BASES = {"rounds": ("graph_parallel", "sar, rounds of a peer"), "pipelines": ("vanilla", "graph_parallel bf16")}


def table(cells: Cells, cell: str, names: list[str], bases: tuple[str, ...]) -> list[str]:
    """A line a strategy."""
    heads = ["strategy", "ms an epoch", *(f"times {base}" for base in bases), "share", "MiB of a rank"]
    lines = ["| " + " | ".join(heads) + " |", "|---" * len(heads) + "|"]
    for name in names:
        job = f"{cell}; {name}"
        line = [f"`{name}`", milliseconds(cells, job)]
        line += [times_text(cells, job, f"{cell}; {base}") for base in bases]
        line += [f"{share_percent(cells, job):.0f}%", f"{peak_mib(cells, job):.0f}"]
        lines.append("| " + " | ".join(line) + " |")
    return lines


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
