"""Epochs of tiny graphs by every engine, timed as a run's epochs are: for the planner's calibration."""

from __future__ import annotations

from statistics import median

from gnnpar.comm import Communicator
from gnnpar.data.tasks import make_task
from gnnpar.plan import Topology
from gnnpar.planning import visits
from gnnpar.planning.candidate import Candidate
from gnnpar.runner.measure import EpochMeter
from gnnpar.runner.optim import Adam
from gnnpar.shard.partition import Random
from gnnpar.shard.shard import Shard
from gnnpar.strategies.strategy import Strategy, Workload
from gnnpar.strategies.tag import strategy_of

_WARMUP, _EPOCHS = 4, 16


def tiny_epochs(comm: Communicator) -> dict[str, dict[int, float]]:
    """engine -> layers -> seconds an epoch of this rank. Collective."""
    found: dict[str, dict[int, float]] = {}
    for layers in visits.depths(comm.size):
        for candidate in visits.candidates(layers, comm.size):
            found.setdefault(candidate.engine, {})[layers] = _epoch_seconds(candidate, layers, comm)
    return found


def _epoch_seconds(candidate: Candidate, layers: int, comm: Communicator) -> float:
    data, model = visits.graph(), visits.model(layers)
    task = make_task(data.task, data.num_classes)
    strategy: Strategy = strategy_of(candidate)
    plan = strategy.plan(Workload(data, Random(), layers, model=model), Topology(comm.size))
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
