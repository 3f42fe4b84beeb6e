"""Epochs of each method beside two bases, and the plans."""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any  # of JSON

import reports
from records import Files
from reports import Measured

from gnnpar.config.study import Variant
from gnnpar.report.statistics import geometric_mean

BASES = ("graph_parallel", "planned, speeds unknown")
Job = Mapping[int, Mapping[str, Any]]  # block -> its line


def seconds(job: Job, block: int) -> float:
    return float(job[block]["result"]["epoch_seconds"]["mean"])


def times(job: Job, base: Job) -> str:
    """How many times as fast as the base in the same block, with the 95 % interval."""
    found = geometric_mean([seconds(base, block) / seconds(job, block) for block in sorted(job.keys() & base.keys())])
    return "1" if job is base else f"{found.value:.2f} ({found.low:.2f} to {found.high:.2f})"


def chosen(plans: Sequence[Mapping[str, Any]]) -> str:
    """What the plans were, and the shares of nodes on the fast and the slow machines."""
    labels = Counter(plan["predicted"]["label"] for plan in plans)
    texts = [label if times == len(plans) else f"{label} ({times} of {len(plans)})" for label, times in labels.items()]
    nodes = plans[0]["statistics"].get("nodes", []) if plans else []
    shares = [f"{100 * n / sum(nodes):.0f}" for n in nodes] if len(nodes) > 1 else []
    return "; ".join(texts) + (f"; {', '.join(shares)} % of the nodes" if shares else "")


def cells(rows: Mapping[str, Job], variant: Variant) -> list[str]:
    cell, name = variant.place
    job = rows[variant.name]
    plans = [row["plan"] for row in job.values() if "plan" in row]
    said = [plan["predicted"]["epoch_seconds"] for plan in plans]
    means = [
        f"{1000 * geometric_mean(each).value:.0f}" if each else "-" for each in ([seconds(job, b) for b in job], said)
    ]
    over = [times(job, rows[f"{cell}; {base}"]) for base in BASES]
    return [name if plans else f"`{name}`", means[0], *over, means[1], chosen(plans) or "-"]


def before(files: Files, measured: Measured) -> str:
    jobs: dict[str, dict[int, Mapping[str, Any]]] = {}
    for row in files.read():
        jobs.setdefault(row["job"], {})[row["block"]] = row
    study, shown = measured["results"][0], ""
    heads = ["strategy", "ms an epoch", *(f"times {base}" for base in BASES), "predicted, ms", "the plan"]
    for cell in study.axes["cell"]:
        here = [v for v in study.variants() if v.place[0] == cell and v.name in jobs]
        lines = [cells(jobs, variant) for variant in here if all(f"{cell}; {base}" in jobs for base in BASES)]
        shown += f"### {cell}\n\n{reports.table(heads, lines)}\n\n"
    return shown
