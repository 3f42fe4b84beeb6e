"""Epochs that are captured and replayed on a simulated GPU, and those that are not: tests and first_hour.py."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, NamedTuple
from unittest import mock

from torch import Tensor

from engines import open_rank
from gnnpar.parallel.objective import objective_of
from gnnpar.training import captured
from gnnpar.training.captured import CapturedEpochs
from gnnpar.training.meter import evaluate
from gnnpar.training.optim import SGD, Adam, AdamW
from simulated_gpu import SimulatedGpu, held
from simulated_graph import Cuda, GraphWorld
from synchronisation_runs import job_of, place, task_of

EPOCHS, WARM_UP = 6, 2
OPTIM = Adam(lr=0.02, weight_decay=1e-3, schedule="cosine", clip=0.5)


@contextmanager
def simulated() -> Iterator[Cuda]:
    """Inside, epochs are captured on a simulated GPU, after WARM_UP of them."""
    fake = Cuda(SimulatedGpu())
    with mock.patch.object(captured, "cuda", fake), mock.patch.object(captured, "WARMUP_EPOCHS", WARM_UP):
        yield fake


class Trained(NamedTuple):
    """Of one rank. `metrics` of evaluations, None where there was none; `traffic` of every epoch."""

    losses: list[float]
    weights: dict[str, Tensor]
    metrics: list[dict[str, Any] | None]
    traffic: list[tuple[object, ...]]


def run(
    cuda: Cuda,
    strategy: str,
    model: str,
    *overrides: str,
    replays: bool,
    optim: Adam | AdamW | SGD = OPTIM,
    **options: Any,
) -> list[Trained]:
    """Of every rank. `replays`: epochs are captured and replayed."""
    job, world = job_of(strategy, model, *overrides, **options)
    job = replace(job, optim=optim)

    def rank(comm: Any) -> Trained:
        engine, optimizer, net, shard = open_rank(job, comm, place=place)
        objective = objective_of(task_of(job), shard, net, comm, job.seed)
        epochs = CapturedEpochs(engine, optimizer, comm, job.seed, net) if replays else None
        losses, metrics, traffic = [], [], []
        for epoch in range(EPOCHS):
            optimizer.schedule(epoch)
            comm.ledger.drain()
            report = engine.train_epoch(epoch, optimizer) if epochs is None else epochs.train_epoch(epoch)
            sent = comm.ledger.drain()
            losses.append(report.loss)
            traffic.append((sent.bytes, sent.layer_bytes, sent.metadata, sent.messages))
            assert not optimizer.refused
            metrics.append(evaluate(engine, objective) if epoch % 2 else None)
        weights = {name: held(w).clone() for name, w in engine.named_weights()}
        return Trained(losses, weights, metrics, traffic)

    return GraphWorld(cuda.gpu, world).run(rank)
