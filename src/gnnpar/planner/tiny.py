"""Epochs of small graphs by every engine, timed as a run's epochs are: for the planner's calibration."""

from __future__ import annotations

from statistics import median

from gnnpar.comm import Communicator
from gnnpar.comm.threads import ThreadWorld
from gnnpar.data.dataset import Dataset
from gnnpar.data.tasks import make_task
from gnnpar.parallel.strategy import Strategy, Workload
from gnnpar.partition.partition import Random
from gnnpar.partition.shard import Shard
from gnnpar.placement import Plan, Topology
from gnnpar.planner.candidate import Candidate
from gnnpar.planner.strategy import strategy_of
from gnnpar.planner.visits import Trial, candidates, trials
from gnnpar.training.measure import EpochMeter
from gnnpar.training.optim import Adam

_WARMUP, _EPOCHS = 4, 20


def tiny_epochs(comm: Communicator) -> dict[str, dict[str, float]]:
    """engine -> trial -> seconds an epoch of this rank. Collective."""
    found: dict[str, dict[str, float]] = {}
    alone = ThreadWorld(1).communicators()[0]
    for trial in trials(comm.size):
        data = trial.graph() if comm.rank == 0 else None
        given = comm.broadcast(data)
        assert isinstance(given, Dataset)
        for candidate in candidates(trial.layers, comm.size):
            among = comm if candidate.ranks == comm.size else alone
            here = _epoch_seconds(candidate, trial, given, among) if among is comm or comm.rank == 0 else None
            seconds = here if among is comm else comm.broadcast(here)  # the others wait for what one does alone
            assert isinstance(seconds, float)
            found.setdefault(candidate.engine, {})[trial.name] = seconds
    return found


def _epoch_seconds(candidate: Candidate, trial: Trial, data: Dataset, comm: Communicator) -> float:
    model, task = trial.model(), make_task(data.task, data.num_classes)
    strategy: Strategy = strategy_of(candidate)
    workload = Workload(data, Random(), trial.layers, model=model)
    plan = comm.broadcast(strategy.plan(workload, Topology(comm.size)) if comm.rank == 0 else None)
    assert isinstance(plan, Plan)
    shard = Shard.open(data if comm.rank == 0 else None, plan.part_of, comm, placement=plan.placement)
    engine = strategy.build(plan, shard.to(comm.device, data.x.dtype), model, task, comm, seed=0)
    optimizer = Adam().build(engine.named_parameters(), epochs=_EPOCHS, layer_of=model.layer_of)
    seconds = []
    for epoch in range(_WARMUP + _EPOCHS):
        with EpochMeter(comm) as meter:
            engine.train_epoch(epoch, optimizer)
        seconds.append(meter.read()["seconds"])
    engine.drain()
    return median(seconds[_WARMUP:])
