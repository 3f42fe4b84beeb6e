"""Costs: counts of a partition, bytes, closed forms against the simulator, memory; the simulator by hand."""

from __future__ import annotations

import json
import math
import random
import sys
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch

from gnnpar.data.synthetic import SBM
from gnnpar.parallel.cagnet.strategy import Cagnet
from gnnpar.parallel.declared import DeclaredCandidate
from gnnpar.parallel.halo.strategy import GraphParallel
from gnnpar.parallel.pipeline.cost import PipelineCandidate, chain
from gnnpar.parallel.pipeline.placing import even_cuts
from gnnpar.parallel.sequential.strategy import SAR
from gnnpar.partition.partition import Random
from gnnpar.partition.shard import partition_statistics
from gnnpar.planner.planner import Evaluated, Request
from gnnpar.planner.search.named import run
from gnnpar.pricing.candidate import Candidate, Scope
from gnnpar.pricing.fabric import Device, Fabric, Wire, build
from gnnpar.pricing.ir import ModelIR
from gnnpar.pricing.machine import Machine
from gnnpar.pricing.price import Phases
from gnnpar.pricing.rates import NOMINAL, Rates, derived
from gnnpar.pricing.simulate import EpochTimeline, fair_rates, simulate, simulated
from gnnpar.pricing.statistics import GraphStats, PartStats
from gnnpar.pricing.steps import in_rounds
from gnnpar.pricing.tasks import SimulatedTask
from gnnpar.pricing.topology import Machines
from gnnpar.pricing.work import DIRECTIONS, Work, wire_bytes
from planner.conftest import GRAPH, QUIET, ir_of


def star(size: int, rate: float, latency: float = 0.0) -> Fabric:
    """Every device with a port of its own on one switch."""
    devices = [Device(name=f"d{i}", host="h", kind="k", type="cpu", memory_bytes=1e12) for i in range(size)]
    return build(devices, [Wire(ends=(d.name, "switch"), rate=rate, latency=latency) for d in devices])


def crossing(line: EpochTimeline) -> float:
    """Return the bytes over all links."""
    return sum(demand * task.nbytes for task in line.tasks for demand in task.demand.values())


def work(ir: ModelIR, parts: int, *, alpha: float = 1.0, rates: Rates = QUIET) -> Work:
    stats = PartStats.even(GRAPH.nodes, GRAPH.edges, parts, alpha=alpha, cut_share=0.3)
    return Work(ir, GRAPH, stats, (rates,) * parts)


def closed(candidate: Candidate, work: Work, machine: Machine) -> Phases:
    """In the rates of its engine."""
    return candidate.phases(*candidate.in_engine(work, machine))


def test_part_statistics_are_those_of_the_partition() -> None:
    dataset = SBM(num_nodes=300).load(None, 0)
    part_of = Random().part_of(dataset, 3)
    stats = PartStats.of(dataset.edge_index, part_of, 3)
    told = partition_statistics(dataset, part_of, 3)
    assert list(stats.nodes) == told["nodes"]
    assert [stats.edges(p) for p in range(3)] == told["edges"]
    assert [list(row) for row in stats.halo] == told["halo_from"]
    assert [stats.sent(q) for q in range(3)] == told["sent_rows"]
    assert stats.alpha == pytest.approx(told["alpha"])
    assert sum(map(sum, stats.cut)) == told["cut_edges"]
    assert torch.equal(part_of.bincount(), torch.tensor(stats.nodes))


@pytest.mark.parametrize(
    "candidate",
    [
        DeclaredCandidate(strategy=GraphParallel(), parts=3),
        DeclaredCandidate(strategy=GraphParallel(), parts=3, bits=8),
        DeclaredCandidate(strategy=SAR(), parts=3),
    ],
    ids=lambda c: c.label,
)
def test_bytes_are_conserved(candidate: DeclaredCandidate) -> None:
    """What crosses the simulated links is what the formula says, twice (a port out, a port in)."""
    ir = ir_of(layers=3)
    here = work(ir, 3)
    line = simulated(candidate, here, Machine(star(3, 1e9), (QUIET,) * 3))
    sums = 2 * 2 * (3 - 1) / 3 * 4 * ir.params * 3
    sent = sum(n for d in DIRECTIONS for i in range(3) for _, _, n in here.flows(i, d, candidate.bits))
    assert crossing(line) == pytest.approx(2 * sent + sums)
    # by hand: all sources forward, those with a gradient backward (all: an encoder stands before the first layer)
    rows = sum(wire_bytes(f.src, candidate.bits) * (1 + f.learned) for i in range(3) for f in ir.folds(i))
    assert sent == pytest.approx(1.0 * GRAPH.nodes * rows)


@pytest.mark.parametrize(("ranks", "copies"), [(4, 2), (9, 3)])
def test_cagnet_on_a_grid(ranks: int, copies: int) -> None:
    """Bytes by its formula cross the simulated links, and the closed form is near what the simulator says."""
    ir = ir_of("gcn", layers=3)
    here, machine = work(ir, ranks), Machine(star(ranks, 1e8), (QUIET,) * ranks)
    candidate = DeclaredCandidate(strategy=Cagnet(replication=copies), parts=ranks)
    line = simulated(candidate, here, machine)
    sums = 2 * 2 * (ranks - 1) * 4 * ir.params
    read = GRAPH.nodes / ranks * (ranks * ranks / copies - ranks / copies)  # d(q) = 1 for P / c of the parts
    added = (copies - 1) * GRAPH.nodes
    folds = [(f, 1 + f.learned) for i in range(3) for f in ir.folds(i)]
    expected = sum(4 * times * (read * f.width + added * f.out) for f, times in folds)
    assert crossing(line) == pytest.approx(2 * expected + sums)
    assert closed(candidate, here, machine).seconds == pytest.approx(line.seconds, rel=0.35)
    rows = {
        c: DeclaredCandidate(strategy=Cagnet(replication=c), parts=ranks).memory(here)[0].structure for c in (1, copies)
    }
    assert rows[copies] < 2 * rows[1]


def test_cagnet_is_proposed_on_grids_for_sums_alone() -> None:
    def grids(name: str, ranks: int) -> list[int]:
        found = Cagnet().candidates(Scope(ir=ir_of(name, layers=2), nodes=99), ranks)
        return [c.as_json()["replication"] for c in found if c.as_json()["bits"] == 32]

    assert grids("gcn", 16) == [1, 2, 4]
    assert grids("gcn", 6) == grids("gat", 16) == [1]
    assert grids("gcn", 1) == []


@pytest.mark.quick(5)
@pytest.mark.parametrize("seed", range(25))
def test_pipeline_closed_form_is_exact_on_chains(seed: int) -> None:
    """Random devices, links, latencies and chunks: bound by computing or by links."""
    rng = random.Random(seed)
    stages, layers = rng.randint(2, 6), rng.randint(6, 12)
    ir = ir_of(rng.choice(["resgcn", "gcnii"]), layers=layers)
    chunks = rng.randint(1, 20)
    fabric = star(stages, 10 ** rng.uniform(6, 10), latency=rng.choice([0.0, 1e-4, 5e-3]))
    rates = tuple(replace(QUIET, scale=rng.uniform(0.5, 2)) for _ in range(stages))
    candidate = PipelineCandidate(stages=stages, chunks=chunks, cuts=even_cuts(layers, stages))
    here = replace(work(ir, 1), rates=rates[:1])
    machine = Machine(fabric, rates)
    expected = closed(candidate, replace(here, rates=rates[-1:]), machine).seconds
    assert simulated(candidate, replace(here, rates=rates[-1:]), machine).seconds == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize(
    "candidate",
    [
        DeclaredCandidate(strategy=GraphParallel(), parts=2),
        DeclaredCandidate(strategy=GraphParallel(overlap="none"), parts=2),
        DeclaredCandidate(strategy=SAR(), parts=2),
    ],
    ids=lambda c: c.label,
)
def test_flat_closed_form_is_exact_for_equal_parts(candidate: DeclaredCandidate) -> None:
    """Two equal ranks: a sum over layers of pieces and messages, overlapped or not."""
    for rate in (1e7, 1e9):
        for name in ("resgcn", "gat", "sage_max"):
            ir = ir_of(name, layers=3)
            here, machine = work(ir, 2), Machine(star(2, rate, 1e-4), (QUIET,) * 2)
            assert simulated(candidate, here, machine).seconds == pytest.approx(
                closed(candidate, here, machine).seconds
            )


def test_the_depth_rule() -> None:
    """Bound by links, a pipeline beats graph parallelism when L alpha > W, and loses when it is far below (8.1)."""
    fast = replace(QUIET, scale=1e-6)
    for layers, alpha, pipeline_wins in ((32, 0.9, True), (32, 0.35, True), (4, 0.3, False), (8, 0.2, False)):
        ir, ranks = ir_of(layers=layers), 4
        machine = Machine(star(ranks, 1e8), (fast,) * ranks)
        flat = closed(
            DeclaredCandidate(strategy=GraphParallel(), parts=ranks), work(ir, ranks, alpha=alpha, rates=fast), machine
        )
        deep = PipelineCandidate(stages=ranks, chunks=64, cuts=even_cuts(layers, ranks))
        staged = closed(deep, work(ir, 1, rates=fast), machine)
        assert (layers * alpha > ranks) == pipeline_wins
        assert (staged.seconds < flat.seconds) == pipeline_wins


def test_rounds() -> None:
    """Two rounds of 3 s and folds of 1 s after 2 s of inner edges."""
    assert in_rounds([3, 3], [1, 1], 2, prefetch=0, lost=0) == 2 + 3 + 1 + 3 + 1
    assert in_rounds([3, 3], [1, 1], 2, prefetch=1, lost=0) == 7  # both asked for at once: 3, 6, then the last fold
    assert chain([1, 2, 1], [0.5, 0.5], [0.25, 0.25], 5) == 4 + 1 + 8


def test_memory_by_family() -> None:
    """SAR holds a share of the remote rows, a pipeline its layers' weights only."""
    ir = ir_of("gat", layers=4, hidden=64)
    here = work(ir, 4, alpha=3.0)
    flat = DeclaredCandidate(strategy=GraphParallel(), parts=4).memory(here)[0]
    sar = DeclaredCandidate(strategy=SAR(prefetch=0), parts=4).memory(here)[0]
    assert sar.halo == 0 < flat.halo
    assert sar.total < flat.total
    deep = ir_of("resgcn", layers=8)
    staged = PipelineCandidate(stages=4, chunks=8, cuts=even_cuts(8, 4)).memory(work(deep, 1))
    assert len(staged) == 4
    assert sum(m.parameters for m in staged) == pytest.approx(5 * 4 * deep.params)
    assert staged[0].features > staged[1].features


def request(ranks: int, *allowed: str, memory_bytes: float = 1e12, rate: float = 1e8) -> Request:
    fabric = star(ranks, rate)
    devices = tuple(replace(d, memory_bytes=memory_bytes) for d in fabric.devices)
    machine = Machine(replace(fabric, devices=devices), (NOMINAL,) * ranks)
    return Request(
        ir_of(layers=8),
        GRAPH,
        lambda p: work(ir_of(layers=8), p).parts,
        machine,
        ranks,
        frozenset({"exact", *allowed}),  # type: ignore[arg-type]
    )


def enumerated(request: Request) -> tuple[Evaluated, ...]:
    return run(request, "enumerate").evaluated


def test_only_what_is_allowed_is_chosen() -> None:
    exact = enumerated(request(4))
    assert exact[0].candidate.quality == {"exact"}
    assert all(p.refused.endswith("not allowed") for p in exact if p.candidate.quality - {"exact"})
    free = enumerated(request(4, "rounded", "quantized", "stale"))
    assert free[0].objective <= exact[0].objective
    assert not any(p.refused for p in free)
    costly = enumerated(replace(request(4, "stale"), factors={"stale": 1e6}))
    assert costly[0].candidate.quality == {"exact"}
    names = {"graph_parallel", "adaqp", "sar", "gnnpipe", "hybrid", "pipegcn", "feature", "digest", "cagnet", "sancus"}
    assert {p.candidate.family for p in free} == names


def test_uneven_devices_get_uneven_stages() -> None:
    """A device three times slower gets fewer layers."""
    asked = request(4, "stale")
    rates = (replace(NOMINAL, scale=3.0), *asked.machine.rates[1:])
    devices = tuple(replace(d, kind=f"k{i}") for i, d in enumerate(asked.machine.fabric.devices))
    machine = Machine(replace(asked.machine.fabric, devices=devices), rates)
    pipes = [p for p in enumerated(replace(asked, machine=machine)) if p.candidate.family == "gnnpipe"]
    best = min(pipes, key=lambda p: p.price.seconds).candidate
    lengths = [len(span) for span in best.layers_of(8)]
    assert lengths[0] == min(lengths)
    assert lengths[0] < max(lengths)


def test_lowered_tasks_name_their_layer_and_ranks() -> None:
    tasks = DeclaredCandidate(strategy=GraphParallel(), parts=2).tasks(
        work(ir_of(layers=2), 2), Machine(star(2, 1e9), (QUIET,) * 2)
    )
    names = [t.name for t in tasks]
    assert {"F0 inner", "F1 0>1", "B0 1>0", "loss", "reduce", "step"} <= set(names)


sys.path.insert(0, str(Path(__file__).parents[2] / "experiments"))

paper_of: Any = import_module("planner_scale.paper")  # Any: a module of a study

LARGE = GraphStats(nodes=200_000, edges=3_000_000, features=32, classes=8, train=100_000)
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
    paper = paper_of.Paper(ir, LARGE, law, cluster)
    machine = Machine(hosts(), (RATES,) * 8)
    for given in CANDIDATES:
        candidate = given
        if isinstance(given, PipelineCandidate):
            candidate = replace(given, cuts=even_cuts(9, given.stages))
        alpha, share = law(given.parts)
        parts = PartStats.even(LARGE.nodes, LARGE.edges, given.parts, alpha=alpha, cut_share=share)
        work = Work(ir, LARGE, parts, (RATES,) * given.parts)
        counted, paper_phases = candidate.phases(*candidate.in_engine(work, machine)), paper.epoch(candidate)
        for phase, seconds in vars(counted).items():
            assert vars(paper_phases)[phase] == pytest.approx(seconds, rel=1e-9, abs=1e-12), (candidate.label, phase)
        assert paper.peak_bytes(candidate) == pytest.approx(max(m.total for m in candidate.memory(work)))


def compute(name: str, seconds: float, *after: int, device: int = 0, **more) -> SimulatedTask:
    return SimulatedTask(
        name=name, kind="compute", stream=("compute", device), devices=(device,), after=after, seconds=seconds, **more
    )


def flow(name: str, nbytes: float, links: list[int], *after: int, stream: object = None, **more) -> SimulatedTask:
    demand = dict.fromkeys(links, 1.0)
    return SimulatedTask(
        name=name, kind="flow", stream=stream or name, devices=(0, 1), after=after, nbytes=nbytes, demand=demand, **more
    )


def test_max_min_property() -> None:
    """No link is overfull, and every flow has a full link on which nobody is faster: the definition."""
    rng = random.Random(0)
    assert fair_rates([{}], []) == [math.inf]
    for _ in range(200):
        capacity = [rng.uniform(1, 10) for _ in range(5)]
        flows = [{link: rng.choice([1.0, 1.5]) for link in rng.sample(range(5), rng.randint(1, 3))} for _ in range(7)]
        rates = fair_rates(flows, capacity)
        load = [sum(r * f.get(link, 0) for r, f in zip(rates, flows, strict=True)) for link in range(5)]
        assert all(used <= cap * (1 + 1e-9) for used, cap in zip(load, capacity, strict=True))
        for rate, mine in zip(rates, flows, strict=True):
            full = [link for link in mine if load[link] >= capacity[link] * (1 - 1e-9)]
            assert any(rate >= max(r for r, f in zip(rates, flows, strict=True) if link in f) - 1e-9 for link in full)


def test_a_stream_serialises_and_latency_comes_first() -> None:
    line = simulate([flow("a", 10, [0], stream="s", latency=1), flow("b", 10, [0], stream="s", latency=1)], [10])
    assert [tuple(s) for s in line.spans] == [(0, 2), (1, 3)]  # the second's latency passes beside the first
    line = simulate([compute("a", 3), compute("b", 1), compute("c", 1, priority=-1), compute("d", 1, device=1)], [])
    assert [tuple(s) for s in line.spans] == [(0, 3), (4, 5), (3, 4), (0, 1)]  # a began before c was known


def test_computing_is_slower_beside_flows() -> None:
    line = simulate([compute("a", 4), flow("b", 20, [0])], [10], slowdown=2)
    assert line.spans[0].end == pytest.approx(5)  # 2 s at half speed, 3 at full


def test_the_trace_is_json() -> None:
    tasks = [compute("a", 1), flow("b", 30, [0, 1], 0), flow("c", 20, [1], 0), compute("d", 1, 1, 2, device=1)]
    line = simulate(tasks, [10, 10])
    events = json.loads(json.dumps(line.chrome_trace()))["traceEvents"]
    complete = [e for e in events if e["ph"] == "X"]
    assert sorted(e["name"] for e in complete) == ["a", "b (30 B)", "c (20 B)", "d"]
    assert sum(e["dur"] for e in complete if e["cat"] == "compute") == pytest.approx(2e6)
    assert line.seconds == pytest.approx(1 + 5 + 1)


def test_a_circle_is_refused() -> None:
    with pytest.raises(ValueError, match="2 tasks wait for each other, a among them"):
        simulate([compute("a", 1, 1), compute("b", 1, 0)], [])
