"""Plans of a cell's candidates, and what is predicted of each before anything is measured."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any  # of JSON

import records
from blocks import Jobs
from planner_accuracy.cells import Cell

from gnnpar.config.compose import compose
from gnnpar.placement import QUALITIES
from gnnpar.planner.planned import plan_of, planned

WARMUP, SECONDS = 6, 3.0  # five epochs are not timed and one records memory; then about so many seconds


def predict(cell: Cell, plans: Path) -> Iterable[dict[str, Any]]:
    """Yield a line a candidate of a cell; its plan is left in a folder of `plans`."""
    overrides = [*cell.overrides, f"cache_dir={plans / 'cache'}"]
    settings = compose(overrides)
    found = planned(settings, ranks=cell.ranks, allowed=frozenset(QUALITIES), search="enumerate", say=print)
    evaluated = {e.candidate.label: e for e in found.evaluated}
    for label, job in zip(cell.candidates, cell.jobs, strict=True):
        chosen = replace(found, evaluated=(evaluated[label],))
        plan = plan_of(chosen, lambda name: compose([*overrides, f"strategy={name}"]).resolved["strategy"], settings)
        plan.save(plans / folder_of(job))
        price, candidate = evaluated[label].price, evaluated[label].candidate
        seconds = price.seconds
        row = {"job": job, "graph": cell.graph, "model": cell.model, "ranks": cell.ranks, "link": cell.link}
        row |= {"label": label, "family": candidate.family, "quality": sorted(candidate.quality)}
        row |= {"layers": found.request.ir.num_layers, "alpha": found.request.partition(cell.ranks).alpha}
        row |= {"epoch_seconds": seconds, "phases": dict(price.phases)}
        row |= {"peak_bytes": [round(m.total) for m in price.memory]}
        row |= {"epochs": WARMUP + min(40, max(10, round(SECONDS / seconds))), "refused": evaluated[label].refused}
        yield {**row, "calibration": {"residuals": dict(found.request.machine.rates[0].residuals)}}


def folder_of(job: str) -> str:
    return "".join(c if c.isalnum() else "_" for c in job)


def launches(
    file: Path, cells: Sequence[Cell], epochs_of: Callable[[dict[str, Any]], int] = lambda row: row["epochs"]
) -> list[Jobs]:
    """Return the jobs of each cell, which run its plans. Predictions of all cells are made once: the file's stand."""
    plans = file.with_name("smoke_plans")  # not committed
    known = {row["job"]: row for row in records.read(file)}
    for cell in (cell for cell in cells if not known.keys() >= set(cell.jobs)):
        for row in predict(cell, plans):
            known[row["job"]] = row
            records.append(file, [row])
            print(f"{row['job']}: {1e3 * row['epoch_seconds']:.1f} ms predicted", flush=True)
    found: list[Jobs] = []
    for cell in cells:
        links = [o for o in cell.overrides if o.startswith(("launch", "world_size", "threads_per_rank"))]
        jobs = {}
        for job in cell.jobs:
            plan, epochs = plans / folder_of(job) / "plan.json", epochs_of(known[job])
            jobs[job] = [f"plan={plan}", *links, f"epochs={epochs}", f"eval_every={epochs}", "checkpoint.keep=0"]
        found.append(jobs)
    return found
