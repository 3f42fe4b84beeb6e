"""Plans made inside the blocks, and the tables."""

import json
import sys
import tempfile
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any  # of JSON

import blocks
import declared
import records
import reports

from gnnpar.config.inputs import key_of
from gnnpar.config.study import Variant, merged
from gnnpar.report.statistics import geometric_mean

HERE = Path(__file__).parent
UNGUIDED = HERE.parent / "planner_search" / "searches.py"  # gnnpar plan with search=mcts
SPEEDS = (1, 1, 0.5, 0.5)
TINY = {"sbm": ["dataset.num_nodes=2000"], "sbm_reddit": ["dataset.scale=0.003", "dataset.avg_degree=12"]}
ABOUT = ("epochs", "eval_every", "seed", "block")
BASES = ("graph_parallel", "planned, speeds unknown")
PLAN = ("devices", "strategy", "predicted", "statistics", "setup")
Job = Mapping[int, Mapping[str, Any]]  # block -> its line


@cache
def machine() -> tempfile.TemporaryDirectory[str]:
    """The cache of this study: the machine is measured once, before its first plan."""
    return tempfile.TemporaryDirectory()


def launch(overrides: Sequence[str], *, failures: bool) -> dict[str, Any]:
    """Train; first search the plan that `plan=searched` asks for, in a process of its own."""
    at = {key_of(override): override for override in overrides}
    model = [each for key, each in at.items() if key.startswith(("model", "dataset"))]
    model = merged(model, TINY[at["dataset"].partition("=")[2]] if "--smoke" in sys.argv else [])
    strategy = [each for key, each in at.items() if key.startswith("strategy")]
    about, gbps = [at[key] for key in ABOUT], float(at["launch.rate_gbps"].partition("=")[2])
    alone = [*model, "threads_per_rank=1", "world_size=1"]  # one machine of full speed, undilated
    cell, speeds = [*model, *blocks.slow_motion(len(SPEEDS), gbps=gbps)], at["launch.speeds"]
    if "plan" not in at:
        chosen = alone if "strategy=single" in strategy else [*cell, speeds]
        return blocks.train([*chosen, *strategy, *about], failures=failures)
    search = [at[key] for key in ("search", "budget") if key in at]
    words = [*cell, *([speeds] if "null" not in speeds else []), *search]
    words += [f"seed={at['block'].partition('=')[2]}"] if search else []
    program = [sys.executable, str(UNGUIDED)] if "search=mcts" in search else [*blocks.GNNPAR, "plan"]
    with tempfile.TemporaryDirectory() as folder:
        blocks.output_of([*program, *words, f"cache_dir={machine().name}", "--out", folder, "--json"])
        plan = json.loads((Path(folder) / "plan.json").read_text(encoding="utf-8"))
        own = [SPEEDS[int(str(device).rpartition("/")[2])] for device in plan["devices"]]  # h0/0 is that of rank 0
        told = f"launch.speeds=[{','.join(f'{speed:g}' for speed in own)}]"
        chosen = [*model, *blocks.slow_motion(len(own), gbps=gbps), told] if len(own) > 1 else alone
        found = blocks.train([*chosen, f"plan={folder}/plan.json", *about], failures=failures)
    return {"plan": {key: plan[key] for key in PLAN}} | found


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


def before() -> str:
    jobs: dict[str, dict[int, Mapping[str, Any]]] = {}
    for row in records.read(HERE / "results.jsonl"):
        jobs.setdefault(row["job"], {})[row["block"]] = row
    study, shown = declared.parts(HERE)["results"], ""
    heads = ["strategy", "ms an epoch", *(f"times {base}" for base in BASES), "predicted, ms", "the plan"]
    for cell in study.axes["cell"]:
        here = [v for v in study.variants() if v.place[0] == cell and v.name in jobs]
        lines = [cells(jobs, variant) for variant in here if all(f"{cell}; {base}" in jobs for base in BASES)]
        shown += f"### {cell}\n\n{reports.table(heads, lines)}\n\n"
    return shown
