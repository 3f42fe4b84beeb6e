"""Tables of README.md from results.jsonl: `python experiments/mixed_speeds/report.py`."""

import sys
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent))

import records
from run import FIXED, PLANNED

from gnnpar.report.statistics import geometric_mean

BASES = ("graph_parallel", "planned, speeds unknown")
Job = Mapping[int, Mapping[str, Any]]  # block -> its line


def seconds(job: Job, block: int) -> float:
    return float(job[block]["result"]["epoch_seconds"]["mean"])


def milliseconds(job: Job) -> str:
    return f"{1000 * geometric_mean([seconds(job, block) for block in job]).value:.0f}"


def times(job: Job, base: Job) -> str:
    """How many times as fast as the base in the same block, with the 95 % interval."""
    found = geometric_mean([seconds(base, block) / seconds(job, block) for block in sorted(job.keys() & base.keys())])
    return "1" if job is base else f"{found.value:.2f} ({found.low:.2f} to {found.high:.2f})"


def chosen(job: Job) -> str:
    """What the plans were, and the shares of nodes on the fast and the slow machines."""
    plans = [row["plan"] for row in job.values() if "plan" in row]
    labels = Counter(plan["predicted"]["label"] for plan in plans)
    texts = [label if times == len(plans) else f"{label} ({times} of {len(plans)})" for label, times in labels.items()]
    nodes = plans[0]["statistics"].get("nodes", []) if plans else []
    shares = [f"{100 * n / sum(nodes):.0f}" for n in nodes] if len(nodes) > 1 else []
    return "; ".join(texts) + (f"; {', '.join(shares)} % of the nodes" if shares else "")


def table(rows: Mapping[str, Job], cell: str) -> list[str]:
    heads = ["strategy", "ms an epoch", *(f"times {base}" for base in BASES), "predicted, ms", "the plan"]
    lines = ["| " + " | ".join(heads) + " |", "|---" * len(heads) + "|"]
    for name in [*FIXED, *PLANNED]:
        job = f"{cell}; {name}"
        if job not in rows:
            continue
        lines_of = list(rows[job].values())
        said = [row["plan"]["predicted"]["epoch_seconds"] for row in lines_of if "plan" in row]
        cells = [f"`{name}`" if name in FIXED else name]
        cells.append(milliseconds(rows[job]))
        cells += [times(rows[job], rows[f"{cell}; {base}"]) for base in BASES]
        cells.append(f"{1000 * geometric_mean(said).value:.0f}" if said else "-")
        cells.append(chosen(rows[job]) or "-")
        lines.append("| " + " | ".join(cells) + " |")
    return lines


if __name__ == "__main__":
    found: dict[str, dict[int, Mapping[str, Any]]] = {}
    for row in records.read(HERE / "results.jsonl"):
        found.setdefault(row["job"], {})[row["block"]] = row
    for cell in dict.fromkeys(job.partition(";")[0] for job in sorted(found)):
        print(f"### {cell}", "", *table(found, cell), "", sep="\n")
