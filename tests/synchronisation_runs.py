"""Whole epochs of every strategy on a device, as far as the host has to wait for it: tests and first_hour.py."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch

from composing import configured, names
from gnnpar.data.tasks import make_task
from gnnpar.parallel.objective import objective_of
from gnnpar.partition.shard import Shard
from gnnpar.training.evaluate import evaluate
from gnnpar.verify.conformance import Job, make_job, on_device, small_graph
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


def job_of(strategy: str, model: str) -> tuple[Job, int]:
    """(job, ranks)."""
    overrides, world = STRATEGIES[strategy]
    chosen = configured("strategy", strategy, *overrides.split())
    data = small_graph()
    job = make_job(chosen, configured("model", model), data, world=world, epochs=EPOCHS, dtype=torch.float32)
    return job, world


def train(job: Job, comm: Any, *, before_last: Callable[[], object]) -> list[float]:
    """Losses of all epochs. The first ones, and an evaluation, may set up what later ones find done."""
    task = make_task(job.dataset.task, job.dataset.num_classes)
    model = copy.deepcopy(job.model)
    model = move(model) if comm.device == DEVICE else on_device(model, comm.device)
    shard = Shard.open(
        job.dataset if comm.rank == 0 else None,
        job.plan.part_of,
        comm,
        edge_ids=job.model.needs_edge_ids,
        placement=job.plan.placement,
    ).to(comm.device, job.dtype)
    engine = job.strategy.build(job.plan, shard, model, task, comm, seed=job.seed)
    optimizer = job.optim.build(engine.named_parameters(), epochs=EPOCHS, layer_of=job.model.layer_of)
    losses = [engine.train_epoch(epoch, optimizer).loss for epoch in range(EPOCHS - 1)]
    evaluate(engine, objective_of(task, shard, model, comm, job.seed))
    before_last()
    losses.append(engine.train_epoch(EPOCHS - 1, optimizer).loss)
    return losses


def losses_and_events(job: Job, world: int) -> tuple[list[float], list[Event]]:
    """On a simulated GPU: the losses of rank 0, and the waits of all ranks in the last epoch."""
    gpu = SimulatedGpu()
    results = gpu.world(world).run(lambda comm: train(job, comm, before_last=gpu.record))
    return results[0], gpu.events
