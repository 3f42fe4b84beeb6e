"""What the cut recomputes, what that saves, and that a run with it sends so much less and computes the same."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch
from scipy.optimize import Bounds, LinearConstraint, milp

from composing import configured
from gnnpar.parallel.factors import break_even_rows
from gnnpar.parallel.halo.strategy import GraphParallel
from gnnpar.parallel.sequential.strategy import SAR
from gnnpar.partition.partition import Random
from gnnpar.planner.extract import record
from gnnpar.planner.planner import Request, evaluate
from gnnpar.planner.recompute import decide, duplicated, how_held
from gnnpar.planner.registry import Registry
from gnnpar.planner.search.named import run
from gnnpar.planner.search.points import Points
from gnnpar.pricing.machine import Machine
from gnnpar.pricing.rates import NOMINAL
from gnnpar.pricing.statistics import GraphStats, PartStats
from gnnpar.pricing.work import DIRECTIONS, Held, Work
from gnnpar.verify.conformance import small_graph, train_in_threads
from planner.machines import GRAPH, machine

FLAT = Registry({"graph_parallel": GraphParallel(), "sar": SAR()})
PARTS = PartStats.even(GRAPH.nodes, GRAPH.edges, 2, alpha=0.8, cut_share=0.3)


def works(name: str, *, rate: float, parts: PartStats = PARTS, graph: GraphStats = GRAPH) -> tuple[Work, Work, Machine]:
    config = configured("model", name, "model.hidden=16")
    first, twin = (config.build(graph.features, graph.classes, seed=0, cached_first_layer=c) for c in (False, True))
    live, kept = record(first, graph.features), record(twin, graph.features)
    rates = (NOMINAL,) * 2
    held: Held = how_held(twin, kept)
    return Work(live, graph, parts, rates), Work(kept, graph, parts, rates, held), machine(2, rate=rate, latency=1e-5)


@pytest.mark.parametrize(("name", "held"), [("gcn", "result"), ("sage", "result"), ("gat", "rows")])
def test_a_slow_link_makes_layer_0_stay(name: str, held: Held) -> None:
    live, kept, here = works(name, rate=1e7)
    found = decide(live, kept, here)
    assert (found.held, found.layers[0]) == (held, 0)
    assert found.seconds > 0
    assert found.factors[0] == 0  # thousands of rows a rank: a sum of small matrices is always cheaper (5.3)
    assert "halos of 1 of 2 layers" in found.describe(chosen=True)


def test_attention_is_received_over_a_fast_link() -> None:
    """Messages of the halo cost more than their bytes, and nothing of a layer that is not linear can be kept."""
    live, kept, here = works("gat", rate=1e12)
    costly = tuple(replace(r, gemm=replace(r.gemm, number=1e-6), message=0.0, gather=0.0) for r in live.rates)
    found = decide(replace(live, rates=costly), replace(kept, rates=costly), Machine(here.fabric, costly))
    assert (found.held, found.seconds, found.nbytes) == ("no", 0.0, 0.0)
    assert "halos of 0 of 2 layers" in found.describe(chosen=True)


def test_the_planner_takes_it_where_it_is_faster() -> None:
    live, kept, here = works("gcn", rate=1e7)
    request = Request(live.ir, GRAPH, lambda _: PARTS, here, 2, registry=FLAT, held=(kept.ir, kept.held))
    best, plain = (run(each, "enumerate").chosen for each in (request, replace(request, held=None)))
    assert best.candidate.held
    assert best.candidate.label.endswith("first layer held")
    assert best.price.seconds < plain.price.seconds
    assert not plain.candidate.held


def test_an_encoder_leaves_nothing_to_hold() -> None:
    config = configured("model", "resgcn")
    with pytest.raises(ValueError, match="first_layer=cached needs raw features"):
        config.build(32, 8, seed=0, cached_first_layer=True)


@pytest.mark.parametrize("name", ["gcn", "gat"])
def test_a_run_sends_so_many_bytes_less(name: str) -> None:
    """What the cut says of layer 0 is what graph parallelism no longer sends, and losses stay (fp32 on the wire)."""
    data, config = small_graph(), configured("model", name, "model.hidden=8", "model.order=auto")
    live, cached = (
        train_in_threads(
            GraphParallel(), config, data, world=2, epochs=3, first_layer=first, dtype=torch.float32, partition=Random()
        )
        for first in ("live", "cached")
    )
    assert cached.losses == pytest.approx(live.losses, rel=1e-4)
    parts = PartStats.of(data.edge_index, Random().part_of(data, 2), 2)
    graph = GraphStats.of(data)
    work = works(name, rate=1e7, parts=parts, graph=graph)[0]
    work = replace(work, ir=record(config.build(graph.features, graph.classes, seed=0), graph.features))
    less = sum(n for d in DIRECTIONS for _, _, n in work.flows(0, d))
    sent = [sum(o.traffic[2].get(phase, 0) for phase in ("forward", "backward")) for o in (live, cached)]
    assert sent[0] - sent[1] == less > 0


def test_searches_hold_layer_0_too() -> None:
    """The cut is no name of the space: where it fires, a point is priced with it."""
    live, kept, here = works("gcn", rate=1e7)
    request = Request(live.ir, GRAPH, lambda _: PARTS, here, 2, registry=FLAT, held=(kept.ir, kept.held))
    points = Points(request)
    found = points.evaluated(tuple(0 for _ in points.space.choices))
    assert found.candidate.held
    assert found.price == evaluate(found.candidate, kept, request).price


def test_a_first_layer_that_is_cached_is_priced_so() -> None:
    """first_layer=cached of the user: every candidate keeps it, in time and in memory."""
    live, kept, here = works("gcn", rate=1e7)
    plain = Request(live.ir, GRAPH, lambda _: PARTS, here, 2, registry=FLAT)
    cached = replace(plain, ir=kept.ir, kept=kept.held)
    before, after = run(plain, "enumerate").chosen, run(cached, "enumerate").chosen
    assert after.price == evaluate(after.candidate, kept, cached).price
    assert after.price.phases["wire"] < 0.7 * before.price.phases["wire"]
    assert after.price.memory[0].halo > before.price.memory[0].halo


def cost(chosen: Sequence[int], weights: list[float], fetched: list[float]) -> float:
    return sum(weights[i] + (0 if i == 0 or i - 1 in chosen else fetched[i]) for i in chosen)


def by_milp(weights: list[float], fetched: list[float]) -> float:
    """x_i and one b_i a layer: b_i >= x_i - x_(i - 1)."""
    size = len(weights)
    rows = np.zeros((size - 1, 2 * size))
    for i in range(1, size):
        rows[i - 1, [i, i - 1, size + i]] = 1, -1, -1
    found = milp(
        np.array([*weights, *fetched]),
        constraints=LinearConstraint(rows, ub=0),
        bounds=Bounds(0, 1),
        integrality=np.ones(2 * size),
    )
    return float(found.fun)


@pytest.mark.parametrize("seed", range(60))
def test_duplication_of_a_chain_equals_the_integer_program(seed: int) -> None:
    rng = random.Random(seed)
    size = rng.randint(3, 40)
    weights = [rng.uniform(-1, 1.5) for _ in range(size)]
    fetched = [0.0, *(rng.uniform(0, 0.8) for _ in range(size - 1))]
    assert cost(duplicated(weights, fetched), weights, fetched) == pytest.approx(by_milp(weights, fetched), abs=1e-9)


def test_rows_are_fetched_once_for_a_run_of_layers() -> None:
    """Alone neither layer pays for the fetch, together they do; of equal choices the fewest layers."""
    assert duplicated([5.0, -1.0, -1.0], [0.0, 1.5, 1.5]) == (1, 2)
    assert duplicated([5.0, -1.0, 1.0], [0.0, 1.5, 1.5]) == ()
    assert duplicated([0.0, 0.0, 0.0], [0.0, 0.0, 0.0]) == ()
    assert duplicated([-1.0], [0.0]) == (0,)


def seconds_of(rows: float, m: int, n: int, replicas: int, rate: float, flop: float) -> tuple[float, float]:
    """Return the seconds of an all-gather of X and dZ with (P - 1) rows more of dW = X^T dZ, and of a ring sum of
    dW."""
    others = replicas - 1
    factors = others * rows * (m + n) * 4 / rate + others * 2 * rows * m * n * flop
    return factors, 2 * others / replicas * m * n * 4 / rate


def test_sufficient_factors_pay_where_the_formula_says() -> None:
    """Wide layers with few rows gain, hidden layers of full-graph training lose."""
    link, flop = 2.8e9, 1e-13
    for m, n, replicas in ((25088, 4096, 2), (4096, 4096, 4), (256, 256, 4)):
        least = break_even_rows(m, n, replicas=replicas, rate=link, seconds_per_flop=flop)
        for rows, wins in ((0.9 * least, True), (1.1 * least, False)):
            factors, reduced = seconds_of(rows, m, n, replicas, link, flop)
            assert (factors < reduced) == wins
    assert break_even_rows(25088, 4096, replicas=2, rate=link, seconds_per_flop=0) == pytest.approx(3521, rel=1e-3)
    assert break_even_rows(256, 256, replicas=4, rate=link, seconds_per_flop=0) == pytest.approx(64)
    assert break_even_rows(4096, 4096, replicas=4, rate=link, seconds_per_flop=0) == pytest.approx(1024)
