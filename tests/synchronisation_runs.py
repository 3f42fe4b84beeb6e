"""Whole epochs of every strategy on a device, as far as the host has to wait for it: tests and first_hour.py."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch

from composing import REFUSED, configured, names
from engines import open_rank
from gnnpar.data.tasks import Task, make_task
from gnnpar.models.gnn import ModelSource
from gnnpar.parallel.needs import refuse
from gnnpar.parallel.objective import objective_of
from gnnpar.training.meter import evaluate
from gnnpar.verify.conformance import Job, graph_for, make_job, on_device, small_graph
from simulated_gpu import DEVICE, Event, SimulatedGpu, move

_OPTIONS = {  # overrides, ranks; others: none, two
    "single": ("", 1),
    "graph_parallel": ("codec=bf16", 2),
    "gnnpipe": ("strategy.chunks=4", 2),
    "hybrid": ("strategy.chunks=8 strategy.parts=2", 4),
    "minibatch": ("strategy.batch_size=16", 2),
}
STRATEGIES = {name: _OPTIONS.get(name, ("", 2)) for name in names("strategy") if name != "tag"}
EPOCHS = 4  # bits are chosen in the third
NETS = ("gcn", "gat", "gated", "transformer", "pna")
"""Models of PyG, by their names in pyg_nets: each fold, a message of their own, whole neighbourhoods."""


def job_of(strategy: str, model: str, *overrides: str, **options: Any) -> tuple[Job, int]:
    """(job, ranks). `model`: a name, or `pyg.NET`; edges carry what it reads. `overrides`: of both; `options`: of the
    job."""
    usual, world = STRATEGIES[strategy]
    chosen = configured("strategy", strategy, *usual.split(), *overrides)
    source = model_of(model, *(each for each in overrides if each.startswith("model.")))
    data = graph_for(chosen, source, small_graph())
    given = {"world": world, "dtype": torch.float32, **options}
    return make_job(chosen, source, data, epochs=EPOCHS, **given), given["world"]


@cache
def model_of(name: str, *overrides: str) -> ModelSource:
    """A model by its name in conf/model, or `pyg.NET`."""
    if name.startswith("pyg."):
        from gnnpar.models.pyg.model import PyG  # imports PyG

        return PyG(target=f"pyg_nets.{name.removeprefix('pyg.')}")
    return configured("model", name, *overrides)


def carries(strategy: str, model: str) -> bool:
    """Does the strategy run the model?"""
    if (strategy, model) in {*REFUSED, ("feature", "pyg.gated")}:  # a fold that is not divided by columns or heads
        return False
    try:
        refuse(configured("strategy", strategy), model_of(model), {})
    except ValueError:
        return False
    return True


def place(model: Any, device: torch.device) -> Any:
    return move(model) if device == DEVICE else on_device(model, device)


def task_of(job: Job) -> Task:
    return make_task(job.dataset.task, job.dataset.num_classes)


def train(job: Job, comm: Any, *, before_last: Callable[[], object]) -> list[float]:
    """Losses of all epochs. The first ones, and an evaluation, may set up what later ones find done."""
    engine, optimizer, model, shard = open_rank(job, comm, place=place)
    losses = [engine.train_epoch(epoch, optimizer).loss for epoch in range(EPOCHS - 1)]
    evaluate(engine, objective_of(task_of(job), shard, model, comm, job.seed))
    before_last()
    losses.append(engine.train_epoch(EPOCHS - 1, optimizer).loss)
    return losses


def losses_and_events(job: Job, world: int) -> tuple[list[float], list[Event]]:
    """On a simulated GPU: the losses of rank 0, and the waits of all ranks in the last epoch."""
    gpu = SimulatedGpu()
    results = gpu.world(world).run(lambda comm: train(job, comm, before_last=gpu.record))
    return results[0], gpu.events
