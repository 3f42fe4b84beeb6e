"""Unequal devices: unequal stages and parts on the right places, found by every search; brute force where it can be."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

import pytest
import torch

from gnnpar.data.synthetic import SBM
from gnnpar.parallel.pipeline.cost import PipelineCandidate
from gnnpar.partition.partition import Metis, Random, Range, Shares
from gnnpar.planner.planner import Request
from gnnpar.planner.registry import Registry, shipped
from gnnpar.planner.search.named import run
from gnnpar.planner.search.places import Places, device_of_rank
from gnnpar.planner.search.points import Points
from gnnpar.pricing.fabric import Fabric
from gnnpar.pricing.ir import ModelIR
from gnnpar.pricing.machine import Machine
from gnnpar.pricing.rates import derived
from gnnpar.pricing.statistics import GraphStats, PartStats
from gnnpar.pricing.topology import Machines
from gnnpar.pricing.work import Work
from planner.machines import ir_of

GRAPH = GraphStats(nodes=400_000, edges=6_000_000, features=32, classes=8, train=200_000)
RATES = {"fast": derived(12e12, 800e9), "slow": derived(4e12, 200e9)}


def fabric(*hosts: tuple[str, int], nic: str = "25 Gbit/s") -> Fabric:
    """Hosts of one kind each."""
    kind = {"type": "cuda", "memory": "16 GiB", "speed": "1 Tflop/s", "memory_rate": "1 GB/s"}
    return Machines(
        devices=dict.fromkeys(RATES, kind),
        hosts=tuple(
            {"name": f"h{i}", "devices": {k: n}, "inside": "bus", "nic": "nic"} for i, (k, n) in enumerate(hosts)
        ),
        links={"bus": {"rate": "50 GB/s", "latency": "5 us"}, "nic": {"rate": nic, "latency": "20 us"}},
    ).fabric


def even(parts: int) -> PartStats:
    return PartStats.even(GRAPH.nodes, GRAPH.edges, parts, alpha=0.2 * (parts - 1), cut_share=0.2)


def only(*names: str) -> Registry:
    """The shipped strategies of these names; of all without any."""
    registry = shipped()
    return replace(registry, strategies={name: registry.strategies[name] for name in names or registry.strategies})


def request(ir: ModelIR, fabric: Fabric, *allowed: str, strategies: tuple[str, ...] = ()) -> Request:
    machine = Machine(fabric, tuple(RATES[d.kind] for d in fabric.devices))
    return Request(
        ir,
        GRAPH,
        even,
        machine,
        fabric.size,
        frozenset({"exact", *allowed}),  # type: ignore[arg-type]
        places=True,
        registry=only(*strategies),
        uneven=lambda shares: even(len(shares)).reshaped(shares),
    )


def test_slow_devices_get_small_parts() -> None:
    """Enumeration has equal parts only; every search but it finds that a slow device holds fewer nodes."""
    asked = request(ir_of("gcn", 3), fabric(("slow", 2), ("fast", 2)), strategies=("graph_parallel", "sar"))
    uniform = run(asked, "enumerate").evaluated[0]
    for name in ("guided", "tag", "random"):
        best = run(asked, name, budget=60, seed=1).evaluated[0]
        assert best.objective < 0.8 * uniform.objective, name
        slow, fast = (
            [s for s, d in zip(best.shares, best.devices, strict=True) if asked.machine.fabric.devices[d].kind == kind]
            for kind in ("slow", "fast")
        )
        assert max(slow) < 0.5 * min(fast), name
        assert sum(best.shares) == pytest.approx(1, abs=1e-4)


def test_stages_and_places_equal_brute_force() -> None:
    """A pipeline over two kinds in three hosts: every order of kinds, every cut."""
    ir = ir_of("resgcn", 7)
    asked = request(ir, fabric(("fast", 1), ("slow", 2), ("fast", 1), nic="3 Gbit/s"), "stale", strategies=("gnnpipe",))
    found = run(asked, "guided", budget=200).evaluated[0]
    work = Work(ir, GRAPH, even(1), asked.machine.rates[:1])
    best = math.inf
    for order in itertools.permutations([[0], [1, 2], [3]]):
        devices = [d for host in order for d in host]
        machine = Machine(asked.machine.fabric.choose(devices), tuple(asked.machine.rates[d] for d in devices))
        for cuts in itertools.combinations(range(1, 7), 3):
            for chunks in (1, 4, 8, 16, 32):
                candidate = PipelineCandidate(stages=4, chunks=chunks, cuts=(0, *cuts))
                best = min(best, candidate.price(work, machine).seconds)
    assert found.price.seconds == pytest.approx(best, rel=0.02)  # cuts: one bottleneck for both directions
    lengths = [len(span) for span in found.candidate.layers_of(7)]
    kinds = [asked.machine.fabric.devices[d].kind for d in found.devices]
    assert max(n for n, k in zip(lengths, kinds, strict=True) if k == "slow") < max(lengths)


def test_every_point_is_one_candidate_in_one_place() -> None:
    """Points with the same canonical point are the same plan; different ones differ."""
    asked = request(ir_of("gat", 4), fabric(("fast", 2), ("slow", 1), ("fast", 1)), "stale", "quantized", "rounded")
    points = Points(replace(asked, fewer=True))
    made: dict = {}
    names = list(points.space.choices)
    step = 7  # every seventh point of a space of thousands
    for point in itertools.islice(itertools.product(*map(range, points.space.sizes)), 0, None, step * 97):
        canonical = points.canonical(point)
        assert points.canonical(canonical) == canonical
        key = (*points.candidate(canonical)[:2], points.space.at(canonical)["shares"])
        assert made.setdefault(key, canonical) == canonical, names
    assert len(made) > 50


def test_orders_of_kinds() -> None:
    places = Places(fabric(("fast", 2), ("slow", 2), ("fast", 2)))
    assert places.kinds == ("fast", "slow")
    assert places.order(["slow", "fast"]) == [2, 3, 0, 1, 4, 5]
    assert places.order(["slow", "slow"]) == [2, 3, 0, 1, 4, 5]  # no second slow host
    assert places.used_kinds(["slow", "slow"], 6) == ("slow", "fast")
    assert places.used_kinds(["fast", "slow"], 2) == ("fast", "fast")  # the second host holds no rank
    assert device_of_rank([2, 3, 0, 1], 2, 2, "stages") == (2, 3, 0, 1)
    assert device_of_rank([2, 3, 0, 1], 2, 2, "parts") == (2, 0, 3, 1)


@pytest.mark.parametrize("by", [Metis(), Random(), Range()])
def test_uneven_partitions_have_their_shares(by: Metis | Random | Range) -> None:
    dataset = SBM(num_nodes=1200).load(None, 0)
    shares = (0.5, 0.3, 0.2)
    sizes = torch.bincount(Shares.wrap(by, shares).part_of(dataset, 3)) / 1200
    assert sizes.tolist() == pytest.approx(shares, abs=0.03)
    assert Shares.supported(by)
    with pytest.raises(ValueError, match="must all be above 0"):
        Shares.wrap(by, (0.5, 0.0))
    with pytest.raises(ValueError, match="3 shares make no 2 parts"):
        Shares.wrap(by, shares).part_of(dataset, 2)


def test_reshaped_statistics_conserve_nodes_and_edges() -> None:
    stats = even(4).reshaped((0.4, 0.3, 0.2, 0.1))
    assert stats.nodes == pytest.approx([160_000, 120_000, 80_000, 40_000])
    assert sum(stats.edges(p) for p in range(4)) == pytest.approx(GRAPH.edges)
    assert even(4).reshaped((1, 1, 1, 1)).halo[0] == pytest.approx(even(4).halo[0])


def test_nothing_fits_is_one_line() -> None:
    asked = request(ir_of("gcn", 2), fabric(("fast", 2)))
    tiny = replace(
        asked.machine.fabric, devices=tuple(replace(d, memory_bytes=1e6) for d in asked.machine.fabric.devices)
    )
    with pytest.raises(ValueError, match="no plan fits: the nearest"):
        run(replace(asked, machine=Machine(tiny, asked.machine.rates)), "guided", budget=30)
