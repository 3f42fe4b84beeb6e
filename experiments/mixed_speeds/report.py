"""Tables of README.md from results.jsonl: `python experiments/mixed_speeds/report.py`."""

import sys
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent))

import blocks
from paired import Cells, milliseconds, times_text
from run import FIXED, PLANNED

from gnnpar.report.statistics import geometric_mean

BASES = ("graph_parallel", "planned, speeds unknown")


def chosen(job: Mapping[int, Mapping[str, Any]]) -> str:
    """What the plans were, and the shares of nodes on the fast and the slow machines."""
    plans = [row["plan"] for row in job.values() if "plan" in row]
    labels = Counter(plan["predicted"]["label"] for plan in plans)
    texts = [label if times == len(plans) else f"{label} ({times} of {len(plans)})" for label, times in labels.items()]
    nodes = plans[0]["statistics"].get("nodes", []) if plans else []
    shares = [f"{100 * n / sum(nodes):.0f}" for n in nodes] if len(nodes) > 1 else []
    return "; ".join(texts) + (f"; {', '.join(shares)} % of the nodes" if shares else "")


def table(rows: Cells, cell: str) -> list[str]:
    heads = ["strategy", "ms an epoch", *(f"times {base}" for base in BASES), "predicted, ms", "the plan"]
    lines = ["| " + " | ".join(heads) + " |", "|---" * len(heads) + "|"]
    for name in [*FIXED, *PLANNED]:
        job = f"{cell}; {name}"
        if job not in rows:
            continue
        lines_of = list(rows[job].values())
        said = [row["plan"]["predicted"]["epoch_seconds"] for row in lines_of if "plan" in row]
        cells = [f"`{name}`" if name in FIXED else name]
        cells.append(milliseconds(rows, job))
        cells += [times_text(rows, job, f"{cell}; {base}") for base in BASES]
        cells.append(f"{1000 * geometric_mean(said).value:.0f}" if said else "-")
        cells.append(chosen(rows[job]) or "-")
        lines.append("| " + " | ".join(cells) + " |")
    return lines


if __name__ == "__main__":
    found = blocks.by_job(HERE / "results.jsonl")
    for cell in dict.fromkeys(job.partition(";")[0] for job in sorted(found)):
        print(f"### {cell}", "", *table(found, cell), "", sep="\n")
