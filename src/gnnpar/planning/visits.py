"""What engines and views take besides kernels and messages: epochs of tiny graphs, less what the closed form says.

On a graph of a few hundred nodes nearly all of an epoch is the interpreter's. Two depths tell what a layer takes, and
what an epoch does. The graph and the models are these alone: nothing that is predicted later is looked at.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from statistics import mean

from gnnpar.data.dataset import Dataset
from gnnpar.data.synthetic import SBM
from gnnpar.models.gcn import GCN
from gnnpar.models.gnn import GNN
from gnnpar.planning.candidate import Candidate, even_cuts
from gnnpar.planning.closed import Setting, closed
from gnnpar.planning.extract import record
from gnnpar.planning.rates import Rates
from gnnpar.planning.statistics import GraphStats, PartStats
from gnnpar.planning.topology import one_host
from gnnpar.planning.work import Work
from gnnpar.shard.partition import Random

Tiny = Mapping[str, Mapping[int, float]]
"""engine -> layers -> seconds an epoch"""


def graph() -> Dataset:
    return SBM(num_nodes=400, avg_degree=6.0, num_features=16).load(None, 0)


def model(layers: int) -> GNN:
    return GCN(num_layers=layers, hidden=16).build(16, 8, seed=0)


def depths(ranks: int) -> tuple[int, int]:
    """A pipeline has as many layers as stages or more."""
    return max(2, ranks), max(2, ranks) + 8


def candidates(layers: int, ranks: int) -> list[Candidate]:
    """One of every engine."""
    if ranks == 1:
        return [Candidate(family="single")]
    cuts = even_cuts(layers, ranks)
    return [
        Candidate(family="graph_parallel", parts=ranks),
        Candidate(family="graph_parallel", parts=ranks, bits=16),
        Candidate(family="adaqp", parts=ranks, bits=8),
        Candidate(family="sar", parts=ranks),
        Candidate(family="gnnpipe", stages=ranks, cuts=cuts),
        Candidate(family="gnnpipe", stages=ranks, chunks=4 * ranks, cuts=cuts),
    ]


def with_visits(rates: Rates, link: tuple[float, float], ranks: int, tiny: Tiny) -> Rates:
    """The rates, told what tiny epochs took. `link`: (seconds a byte, latency)."""
    found: dict[str, tuple[float, float]] = {}
    for candidate in candidates(depths(ranks)[0], ranks):
        engine = candidate.engine
        left, slope = {}, {}
        for layers, seconds in tiny[engine].items():
            plain, unit = (_epoch(replace(rates, visits={engine: v}), link, ranks, layers, engine) for v in _UNITS)
            left[layers], slope[layers] = seconds - plain, unit - plain
        few, many = sorted(left)
        layer = max(0.0, (left[many] - left[few]) / (slope[many] - slope[few]))
        found[engine] = layer, max(0.0, mean(left[n] - slope[n] * layer for n in (few, many)))
    return replace(rates, visits=found)


_UNITS = ((0.0, 0.0), (1.0, 0.0))


def _epoch(rates: Rates, link: tuple[float, float], ranks: int, layers: int, engine: str) -> float:
    """What the closed form says of a tiny epoch."""
    candidate = next(c for c in candidates(layers, ranks) if c.engine == engine)
    data = graph()
    stats = PartStats.of(data.edge_index, Random().part_of(data, candidate.parts), candidate.parts)
    work = Work(record(model(layers), data.num_features), GraphStats.of(data), stats, (rates,) * candidate.parts)
    fabric = one_host(ranks, cores=ranks, memory_bytes=1e12, rate=1 / link[0], latency=link[1])
    return closed(candidate, work, Setting(fabric, (rates,) * ranks)).seconds
