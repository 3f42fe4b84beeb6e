"""Plans of a cell's candidates, and what is predicted of each before anything is measured."""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any  # of JSON

import records
from cells import Cell

from gnnpar.config.compose import compose
from gnnpar.placement import QUALITIES
from gnnpar.planner.planned import plan_of, planned

WARMUP, SECONDS = 6, 3.0  # five epochs are not timed and one records memory; then about so many seconds
KEPT = ("epoch_seconds", "breakdown_seconds", "bytes_per_epoch", "cpu_seconds", "hardware", "load", "commit")
KEPT += ("oversubscribed", "provenance", "versions", "paced")


def predict(cell: Cell, plans: Path, cache: Path) -> Iterable[dict[str, Any]]:
    """A line a candidate of a cell; its plan is left in a folder of `plans`."""
    overrides = [*cell.overrides, f"cache_dir={cache}"]
    settings = compose(overrides)
    found = planned(settings, ranks=cell.ranks, allowed=frozenset(QUALITIES), search="enumerate", say=print)
    evaluated = {e.candidate.label: e for e in found.evaluated}
    for label in cell.candidates:
        job = f"{cell.name}; {label}"
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


def predictions(file: Path, cells: Sequence[Cell], plans: Path) -> list[dict[str, Any]]:
    """Of all cells, made once: what is in the file stands."""
    known = {row["job"]: row for row in records.read(file)}
    for cell in cells:
        if all(f"{cell.name}; {label}" in known for label in cell.candidates):
            continue
        for row in predict(cell, plans, plans / "cache"):
            known[row["job"]] = row
            records.append(file, [row])
            print(f"{row['job']}: {1e3 * row['epoch_seconds']:.1f} ms predicted", flush=True)
    return list(known.values())
