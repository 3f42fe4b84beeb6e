"""Predicted and measured epoch time and peak memory of the configurations in cells.yaml.

The machine is calibrated, every configuration is planned, and what is predicted of it is written to predictions.jsonl,
all before the first measurement. Then each plan is run as it is, in blocks of random order. Needs root and iproute2 for
the shaped links.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any  # of JSON and YAML

import records
import yaml
from blocks import Jobs
from blocks import run as run_blocks
from records import Files

from gnnpar.config.compose import compose
from gnnpar.placement import QUALITIES
from gnnpar.planner.planned import plan_of, planned

CELLS = Path(__file__).with_name("cells.yaml")
WARMUP, SECONDS = 6, 3.0  # five epochs are not timed and one records memory; then about so many seconds


@dataclass(frozen=True)
class Cell:
    """A graph, a model, ranks and links, with its candidates. problem: overrides of graph and model."""

    graph: str
    model: str
    link: str
    candidates: Sequence[str]
    ranks: int = 2
    threads: int = 1
    problem: Sequence[str] = ()

    @property
    def jobs(self) -> list[str]:
        return [f"{self.graph}; {self.model}; {self.ranks} ranks; {self.link}; {label}" for label in self.candidates]

    @property
    def places(self) -> list[str]:
        """Return the overrides of ranks and links."""
        shaped = self.link != "loopback" and self.ranks > 1
        paced = ["launch=paced", f"launch.rate_gbps={self.link.split()[0]}"] if shaped else []
        return [f"world_size={self.ranks}", f"threads_per_rank={self.threads}", *paced]


def cells(which: str, *files: Path) -> list[Cell]:
    """Return the `cells` or `smoke` of the last file; graphs and models are in any."""
    told: list[dict[str, Any]] = [yaml.safe_load(file.read_text(encoding="utf-8")) for file in files]
    known = {name: overrides for each in told for key in ("graphs", "models") for name, overrides in each[key].items()}
    return [Cell(*each, problem=[*known[each[0]], *known[each[1]]]) for each in told[-1][which]]


def predict(cell: Cell, plans: Path) -> Iterable[dict[str, Any]]:
    """Yield a line a candidate of a cell; its plan is left in a folder of `plans`."""
    overrides = [*cell.problem, *cell.places, "seed=0", "topology=measured", f"cache_dir={plans / 'cache'}"]
    settings = compose(overrides)
    found = planned(settings, ranks=cell.ranks, allowed=frozenset(QUALITIES), search="enumerate", say=print)
    evaluated = {e.candidate.label: e for e in found.evaluated}
    for label, job in zip(cell.candidates, cell.jobs, strict=True):
        chosen = replace(found, evaluated=(evaluated[label],))
        plan = plan_of(chosen, lambda name: compose([*overrides, f"strategy={name}"]).resolved["strategy"], settings)
        plan.save(plans / folder_of(job))
        price, candidate = evaluated[label].price, evaluated[label].candidate
        row = {"job": job, "graph": cell.graph, "model": cell.model, "ranks": cell.ranks, "link": cell.link}
        row |= {"label": label, "family": candidate.family, "quality": sorted(candidate.quality)}
        row |= {"layers": found.request.ir.num_layers, "alpha": found.request.partition(cell.ranks).alpha}
        row |= {"epoch_seconds": price.seconds, "phases": dict(price.phases)}
        row |= {"peak_bytes": [round(m.total) for m in price.memory], "refused": evaluated[label].refused}
        row["epochs"] = WARMUP + min(40, max(10, round(SECONDS / price.seconds)))
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

    def job(cell: Cell, name: str) -> list[str]:
        epochs = epochs_of(known[name])
        ends = [f"epochs={epochs}", f"eval_every={epochs}", "checkpoint.keep=0"]
        return [f"plan={plans / folder_of(name) / 'plan.json'}", *cell.places, *ends]

    return [{name: job(cell, name) for name in cell.jobs} for cell in cells]


def run(files: Files, *, blocks: int = 1, predict: bool = False) -> None:
    """Predict, then launch every configuration `blocks` times. predict: predictions alone."""
    jobs = launches(files("predictions"), cells("smoke" if files.smoke else "cells", CELLS))
    if not predict:
        every = {job: overrides for each in jobs for job, overrides in each.items()}
        run_blocks(every, blocks=range(1 if files.smoke else blocks), out=files())
