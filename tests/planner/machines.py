"""Models, machines and work that tests of the planner price."""

from __future__ import annotations

from dataclasses import replace

from composing import configured
from gnnpar.planner.extract import record
from gnnpar.pricing.ir import ModelIR
from gnnpar.pricing.machine import Machine
from gnnpar.pricing.rates import NOMINAL
from gnnpar.pricing.statistics import GraphStats
from gnnpar.pricing.topology import one_host

QUIET = replace(NOMINAL, message=0.0, interference=0.0, epoch=0.0, step=0.0, reduce=(0.0, 0.0))
GRAPH = GraphStats(nodes=4000, edges=60000, features=32, classes=8, train=2000)


def ir_of(name: str = "resgcn", layers: int = 8, hidden: int = 64) -> ModelIR:
    """A model of the widths of GRAPH, traced."""
    config = configured("model", name, f"model.num_layers={layers}", f"model.hidden={hidden}")
    return record(config.build(GRAPH.features, GRAPH.classes, seed=0), GRAPH.features)


def machine(ranks: int, *, rate: float = 1e9, latency: float = 5e-5) -> Machine:
    """One host of as many devices."""
    return Machine(one_host(ranks, memory_bytes=1e12, rate=rate, latency=latency), (NOMINAL,) * ranks)
