"""Closed forms for thousands of equal ranks equal the ones that count every pair."""

from __future__ import annotations

import sys
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from gnnpar.parallel.declared import DeclaredCandidate
from gnnpar.parallel.halo.strategy import GraphParallel
from gnnpar.parallel.pipeline.cost import PipelineCandidate
from gnnpar.parallel.pipeline.placing import even_cuts
from gnnpar.parallel.sequential.strategy import SAR
from gnnpar.pricing.fabric import Fabric
from gnnpar.pricing.machine import Machine
from gnnpar.pricing.rates import derived
from gnnpar.pricing.statistics import GraphStats, PartStats
from gnnpar.pricing.topology import Machines
from gnnpar.pricing.work import Work
from planner.machines import ir_of

sys.path.insert(0, str(Path(__file__).parents[2] / "experiments"))

paper_of: Any = import_module("planner_scale.paper")  # Any: a module of a study

GRAPH = GraphStats(nodes=200_000, edges=3_000_000, features=32, classes=8, train=100_000)
RATES = derived(14e12, 900e9)
CANDIDATES = (
    DeclaredCandidate(strategy=GraphParallel(), parts=8),
    DeclaredCandidate(strategy=GraphParallel(overlap="none"), parts=8),
    DeclaredCandidate(strategy=GraphParallel(), parts=8, bits=4),
    DeclaredCandidate(strategy=SAR(), parts=8),
    DeclaredCandidate(strategy=SAR(prefetch=0, remat=False), parts=8),
    DeclaredCandidate(strategy=GraphParallel(), parts=2),
    PipelineCandidate(stages=8, chunks=16),
    PipelineCandidate(stages=4, parts=2, chunks=4),
    PipelineCandidate(stages=2, parts=4, chunks=8),
    PipelineCandidate(stages=8),
)


def law(parts: int) -> tuple[float, float]:
    return 0.1 * (parts - 1), 0.3 * (parts - 1) / parts


def hosts() -> Fabric:
    kind = {"type": "cuda", "memory": "32 GiB", "speed": "14 Tflop/s", "memory_rate": "900 GB/s"}
    return Machines(
        devices={"v": kind},
        hosts=({"name": "h", "devices": {"v": 4}, "inside": "bus", "nic": "nic", "count": 2},),
        links={"bus": {"rate": "50 GB/s", "latency": "6 us"}, "nic": {"rate": "3 GB/s", "latency": "30 us"}},
    ).fabric


@pytest.mark.parametrize("name", ["resgcn", "gat", "gcnii"])
def test_equal_ranks_cost_what_counting_says(name: str) -> None:
    ir = ir_of(name, layers=9)
    cluster = paper_of.Cluster(per_host=4, port=(50e9, 6e-6), nic=(3e9, 30e-6), rates=RATES)
    paper = paper_of.Paper(ir, GRAPH, law, cluster)
    machine = Machine(hosts(), (RATES,) * 8)
    for given in CANDIDATES:
        candidate = given
        if isinstance(given, PipelineCandidate):
            candidate = replace(given, cuts=even_cuts(9, given.stages))
        alpha, share = law(given.parts)
        parts = PartStats.even(GRAPH.nodes, GRAPH.edges, given.parts, alpha=alpha, cut_share=share)
        work = Work(ir, GRAPH, parts, (RATES,) * given.parts)
        counted, paper_phases = candidate.phases(*candidate.in_engine(work, machine)), paper.epoch(candidate)
        for phase, seconds in vars(counted).items():
            assert vars(paper_phases)[phase] == pytest.approx(seconds, rel=1e-9, abs=1e-12), (candidate.label, phase)
        assert paper.peak_bytes(candidate) == pytest.approx(max(m.total for m in candidate.memory(work)))
