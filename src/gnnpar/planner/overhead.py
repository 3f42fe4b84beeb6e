"""Overhead of engines and views, without kernels and messages: measured trial epochs minus the closed form.

On a few hundred nodes, the interpreter takes nearly all of an epoch; trials of two depths separate its time per layer
and per epoch. On a few thousand nodes, kernels dominate; that trial gives their slowdown compared with a loop over one
kernel, which keeps its rows in the cache. Predictions use no other measured epochs.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from statistics import mean, median

from gnnpar.comm import Communicator
from gnnpar.comm.threads import ThreadWorld
from gnnpar.data.dataset import Dataset
from gnnpar.data.synthetic import SBM
from gnnpar.data.tasks import make_task
from gnnpar.models.gcn import GCN
from gnnpar.models.gnn import GNN
from gnnpar.parallel.context import BuildContext
from gnnpar.parallel.strategy import Workload
from gnnpar.partition.partition import Random
from gnnpar.partition.shard import Shard
from gnnpar.placement import Plan, Topology
from gnnpar.planner.extract import record
from gnnpar.planner.registry import shipped
from gnnpar.pricing.candidate import Candidate, Scope
from gnnpar.pricing.machine import Machine
from gnnpar.pricing.rates import Rates
from gnnpar.pricing.statistics import GraphStats, PartStats
from gnnpar.pricing.topology import one_host
from gnnpar.pricing.work import Work
from gnnpar.training.meter import EpochMeter
from gnnpar.training.optim import Adam

Epochs = Mapping[str, Mapping[str, float]]
"""engine -> trial -> seconds per epoch"""
_LEAST, _MOST = 0.8, 2.0  # bounds of the kernels' slowdown
_WARMUP, _EPOCHS = 4, 20
_WARMUP_LATE, _EPOCHS_LATE = 1, 3


@dataclass(frozen=True)
class Trial:
    """A graph and a model to train on it. `shallow` and `deep` are tiny; kernels dominate `small`."""

    name: str
    nodes: int
    degree: float
    width: int
    layers: int

    def graph(self) -> Dataset:
        return SBM(num_nodes=self.nodes, avg_degree=self.degree, num_features=self.width).load(None, 0)

    def model(self) -> GNN:
        return GCN(num_layers=self.layers, hidden=self.width).build(self.width, 8, seed=0)


def trials(ranks: int) -> tuple[Trial, Trial, Trial]:
    """Return the three trials. A pipeline has at least as many layers as stages."""
    few = max(2, ranks)
    return (
        Trial("shallow", 400, 6.0, 16, few),
        Trial("deep", 400, 6.0, 16, few + 8),
        Trial("small", 2500 * max(2, ranks), 14.0, 48, max(3, ranks)),
    )


def candidates(trial: Trial, ranks: int) -> list[Candidate]:
    """Return one candidate per engine of gnnpar's strategies.

    Prefer candidates that are not stale, since stale ones omit or overlap messages. Include one with a single rank,
    since a plan may leave ranks unused.
    """
    model, registry = trial.model(), shipped()
    scope = Scope(ir=record(model, trial.width), nodes=trial.nodes)
    of_engine: dict[str, Candidate] = {}
    for count in sorted({1, ranks}):
        for candidate in sorted(registry.candidates(scope, count), key=lambda c: "stale" in c.quality):
            of_engine.setdefault(candidate.engine, candidate)
    return list(of_engine.values())


def with_overhead(rates: Rates, link: tuple[float, float], ranks: int, epochs: Epochs) -> Rates:
    """Return the rates with the overhead fitted to the trials. link: (seconds per byte, latency)."""
    shallow, deep, small = (_Form(trial, link, ranks) for trial in trials(ranks))
    overhead: dict[str, tuple[float, float, float]] = {}
    for engine, took in epochs.items():
        layer, epoch, factor = 0.0, 0.0, 1.0
        for _ in range(3):  # the factors influence each other slightly
            left, slope = {}, {}
            for form in (shallow, deep):
                plain, unit = (form(rates, engine, (v, 0.0, factor)) for v in (0.0, 1.0))
                left[form.trial.name], slope[form.trial.name] = took[form.trial.name] - plain, unit - plain
            layer = max(0.0, (left["deep"] - left["shallow"]) / (slope["deep"] - slope["shallow"]))
            epoch = max(0.0, mean(left[name] - slope[name] * layer for name in left))
            factor = _root(lambda f, e=engine, v=layer, w=epoch: small(rates, e, (v, w, f)), took["small"])
        overhead[engine] = layer, epoch, factor
    return replace(rates, visits=overhead)


@dataclass
class _Form:
    """The closed-form prediction of a trial."""

    trial: Trial
    link: tuple[float, float]
    ranks: int

    def __post_init__(self) -> None:
        data = self.trial.graph()
        self.ir, self.graph = record(self.trial.model(), data.num_features), GraphStats.of(data)
        self.candidates = {c.engine: c for c in candidates(self.trial, self.ranks)}
        self.parts = {p: PartStats.of(data.edge_index, Random().part_of(data, p), p) for p in {1, self.ranks}}

    def __call__(self, rates: Rates, engine: str, overhead: tuple[float, float, float]) -> float:
        """Return predicted seconds per epoch for an overhead of the engine."""
        candidate = self.candidates[engine]
        each = (replace(rates, visits={engine: overhead}),) * self.ranks
        theta, latency = self.link
        fabric = one_host(self.ranks, memory_bytes=1e12, rate=1 / theta, latency=latency)
        work = Work(self.ir, self.graph, self.parts[candidate.parts], each[: candidate.parts])
        return candidate.price(work, Machine(fabric, each)).seconds


def _root(seconds: Callable[[float], float], target: float) -> float:
    """Return the factor at which an increasing function reaches the target, by bisection."""
    low, high = _LEAST, _MOST
    for _ in range(30):
        middle = (low + high) / 2
        low, high = (middle, high) if seconds(middle) < target else (low, middle)
    return (low + high) / 2


def trial_epochs(comm: Communicator, until: float = math.inf) -> dict[str, dict[str, float]]:
    """Return engine -> trial -> seconds per epoch of this rank. Collective. until: time.monotonic() after which trials
    are shorter."""
    measured: dict[str, dict[str, float]] = {}
    alone = ThreadWorld(1).communicators()[0]
    for trial in trials(comm.size):
        data = trial.graph() if comm.rank == 0 else None
        given = comm.broadcast(data)
        assert isinstance(given, Dataset)
        for candidate in candidates(trial, comm.size):
            late = comm.broadcast(time.monotonic() > until)  # rank 0 decides
            epochs = (_WARMUP_LATE, _EPOCHS_LATE) if late else (_WARMUP, _EPOCHS)
            among = comm if candidate.ranks == comm.size else alone
            here = _epoch_seconds(candidate, trial, given, among, epochs) if among is comm or comm.rank == 0 else None
            seconds = here if among is comm else comm.broadcast(here)  # other ranks wait for rank 0
            assert isinstance(seconds, float)
            measured.setdefault(candidate.engine, {})[trial.name] = seconds
    return measured


def _epoch_seconds(
    candidate: Candidate, trial: Trial, data: Dataset, comm: Communicator, epochs: tuple[int, int]
) -> float:
    """Return the median of epoch seconds. epochs: (warm-up epochs, timed epochs)."""
    model, task = trial.model(), make_task(data.task, data.num_classes)
    strategy = shipped().strategy_of(candidate)
    workload = Workload(data, Random(), trial.layers, model=model)
    plan = comm.broadcast(strategy.plan(workload, Topology(comm.size)) if comm.rank == 0 else None)
    assert isinstance(plan, Plan)
    shard = Shard.open(data if comm.rank == 0 else None, plan.part_of, comm, placement=plan.placement)
    shard = shard.to(comm.device, data.x.dtype)
    engine = strategy.build(BuildContext(plan=plan, shard=shard, model=model, task=task, comm=comm, seed=0))
    warmup, timed = epochs
    optimizer = Adam().build(engine.named_parameters(), epochs=timed, layer_of=model.layer_of)
    seconds = []
    for epoch in range(warmup + timed):
        with EpochMeter(comm) as meter:
            engine.train_epoch(epoch, optimizer)
        seconds.append(meter.read()["seconds"])
    engine.drain()
    return median(seconds[warmup:])
