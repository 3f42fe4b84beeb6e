"""What engines and views take besides kernels and messages: epochs of trials, less what the closed form says of them.

On a graph of a few hundred nodes nearly all of an epoch is the interpreter's: two depths tell what a layer takes, and
what an epoch does. On one of some thousands kernels are: how much slower than alone in a loop, where their rows are
still in the cache. The trials are these three: nothing that is predicted later is looked at.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from statistics import mean

from gnnpar.data.dataset import Dataset
from gnnpar.data.synthetic import SBM
from gnnpar.models.gcn import GCN
from gnnpar.models.gnn import GNN
from gnnpar.partition.partition import Random
from gnnpar.planner.candidate import Candidate, even_cuts
from gnnpar.planner.closed import closed
from gnnpar.planner.extract import record
from gnnpar.pricing.machine import Machine
from gnnpar.pricing.rates import Rates
from gnnpar.pricing.statistics import GraphStats, PartStats
from gnnpar.pricing.topology import one_host
from gnnpar.pricing.work import Work

Tiny = Mapping[str, Mapping[str, float]]
"""engine -> graph -> seconds an epoch"""
_LEAST, _MOST = 0.8, 2.0  # what a factor of kernels may be


@dataclass(frozen=True)
class Trial:
    """A graph and a model to train on it. `shallow` and `deep` are tiny, `small` is all kernels."""

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
    """A pipeline has as many layers as stages or more."""
    few = max(2, ranks)
    return (
        Trial("shallow", 400, 6.0, 16, few),
        Trial("deep", 400, 6.0, 16, few + 8),
        Trial("small", 2500 * max(2, ranks), 14.0, 48, max(3, ranks)),
    )


def candidates(layers: int, ranks: int) -> list[Candidate]:
    """One of every engine; of `single` also where there are more ranks, since a plan may leave them unused."""
    if ranks == 1:
        return [Candidate(family="single")]
    cuts = even_cuts(layers, ranks)
    return [
        Candidate(family="single"),
        Candidate(family="graph_parallel", parts=ranks),
        Candidate(family="graph_parallel", parts=ranks, bits=16),
        Candidate(family="adaqp", parts=ranks, bits=8),
        Candidate(family="sar", parts=ranks),
        Candidate(family="gnnpipe", stages=ranks, cuts=cuts),
        Candidate(family="gnnpipe", stages=ranks, chunks=4 * ranks, cuts=cuts),
    ]


def with_visits(rates: Rates, link: tuple[float, float], ranks: int, tiny: Tiny) -> Rates:
    """The rates, told what the trials took. `link`: (seconds a byte, latency)."""
    shallow, deep, small = (_Said(trial, link, ranks) for trial in trials(ranks))
    found: dict[str, tuple[float, float, float]] = {}
    for engine, took in tiny.items():
        layer, epoch, factor = 0.0, 0.0, 1.0
        for _ in range(3):  # each of them stands in the other's way, a little
            left, slope = {}, {}
            for said in (shallow, deep):
                plain, unit = (said(rates, engine, (v, 0.0, factor)) for v in (0.0, 1.0))
                left[said.trial.name], slope[said.trial.name] = took[said.trial.name] - plain, unit - plain
            layer = max(0.0, (left["deep"] - left["shallow"]) / (slope["deep"] - slope["shallow"]))
            epoch = max(0.0, mean(left[name] - slope[name] * layer for name in left))
            factor = _root(lambda f, e=engine, v=layer, w=epoch: small(rates, e, (v, w, f)), took["small"])
        found[engine] = layer, epoch, factor
    return replace(rates, visits=found)


@dataclass
class _Said:
    """What the closed form says of a trial."""

    trial: Trial
    link: tuple[float, float]
    ranks: int

    def __post_init__(self) -> None:
        data = self.trial.graph()
        self.ir, self.graph = record(self.trial.model(), data.num_features), GraphStats.of(data)
        self.parts = {p: PartStats.of(data.edge_index, Random().part_of(data, p), p) for p in {1, self.ranks}}

    def __call__(self, rates: Rates, engine: str, visit: tuple[float, float, float]) -> float:
        """Seconds an epoch, had the engine this visit."""
        candidate = next(c for c in candidates(self.trial.layers, self.ranks) if c.engine == engine)
        each = (replace(rates, visits={engine: visit}),) * self.ranks
        theta, latency = self.link
        fabric = one_host(self.ranks, cores=self.ranks, memory_bytes=1e12, rate=1 / theta, latency=latency)
        work = Work(self.ir, self.graph, self.parts[candidate.parts], each[: candidate.parts])
        return closed(candidate, work, Machine(fabric, each)).seconds


def _root(seconds: Callable[[float], float], target: float) -> float:
    """The factor at which a growing function reaches the target, by bisection."""
    low, high = _LEAST, _MOST
    for _ in range(30):
        middle = (low + high) / 2
        low, high = (middle, high) if seconds(middle) < target else (low, middle)
    return (low + high) / 2
