"""What the cut recomputes, what that saves, and that a run with it sends so much less and computes the same."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from composing import configured
from gnnpar.parallel.halo.strategy import GraphParallel
from gnnpar.parallel.sequential.strategy import SAR
from gnnpar.partition.partition import Random
from gnnpar.planner.extract import record
from gnnpar.planner.planner import Request, evaluate, search
from gnnpar.planner.recompute import decide, how_held
from gnnpar.planner.registry import Registry
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
    best, plain = search(request)[0], search(replace(request, held=None))[0]
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
    before, after = search(plain)[0], search(cached)[0]
    assert after.price == evaluate(after.candidate, kept, cached).price
    assert after.price.phases["wire"] < 0.7 * before.price.phases["wire"]
    assert after.price.memory[0].halo > before.price.memory[0].halo
