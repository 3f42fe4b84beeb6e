"""Searches: stages by dynamic programming and places of unequal devices against brute force; a space's best point is
found; the guide learns what the tree found."""

from __future__ import annotations

import itertools
import math
import random
import sys
from collections.abc import Callable
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch

from gnnpar.data.synthetic import SBM
from gnnpar.parallel.declared import DeclaredCandidate
from gnnpar.parallel.pipeline.cost import PipelineCandidate, chain
from gnnpar.parallel.pipeline.placing import Line, place_layers
from gnnpar.parallel.sequential.strategy import SAR
from gnnpar.partition.partition import Metis, Random, Range, Shares
from gnnpar.planner.guide import network
from gnnpar.planner.guide.features import CHOICE_WIDTH, RELATIONS, WIDTHS, choice_features, scene
from gnnpar.planner.guide.network import WEIGHTS, Guide, load, prior_of
from gnnpar.planner.halving import EPOCHS, check, halved
from gnnpar.planner.planner import Evaluated, Planned, Request, price_grids
from gnnpar.planner.registry import Registry, shipped
from gnnpar.planner.search.named import run
from gnnpar.planner.search.places import Places, device_of_rank
from gnnpar.planner.search.points import Points
from gnnpar.planner.search.tree import Evaluator, Space, climb, draw, published
from gnnpar.pricing.fabric import Fabric
from gnnpar.pricing.ir import ModelIR
from gnnpar.pricing.machine import Machine
from gnnpar.pricing.price import Price
from gnnpar.pricing.rates import derived
from gnnpar.pricing.statistics import GraphStats, PartStats
from gnnpar.pricing.topology import Machines
from gnnpar.pricing.work import Work
from gnnpar.settings import Measured
from planner.conftest import ir_of

sys.path.insert(0, str(Path(__file__).parents[2] / "experiments"))

baselines: Any = import_module("planner_search.searches")  # Any: a module of a study


@pytest.mark.parametrize("seed", range(30))
def test_ordered_stages_equal_brute_force(seed: int) -> None:
    """Stages on given devices, each layer with its own time on each, boundaries that may be the bottleneck."""
    rng = random.Random(seed)
    stages, layers = rng.randint(2, 4), rng.randint(4, 9)
    numbers = np.random.default_rng(seed)
    alone = numbers.uniform(0.2, 3, (stages - 1, layers))
    line = Line(numbers.uniform(0.5, 2, (stages, layers)), alone + 0.1, alone)
    for chunks in (1, 3, 16):
        best = math.inf
        for inside in itertools.combinations(range(1, layers), stages - 1):
            ends = zip((0, *inside), (*inside, layers), strict=True)
            times = [float(line.layers[s, a:b].sum()) for s, (a, b) in enumerate(ends)]
            ways = [(float(line.whole[s, a]), float(alone[s, a])) for s, a in enumerate(inside)]
            best = min(best, chain(times, [w for w, _ in ways], [b for _, b in ways], chunks))
        seconds, cuts = place_layers(line, chunks=chunks)
        assert seconds == pytest.approx(best)
        assert len(cuts) == stages and cuts[0] == 0
    with pytest.raises(ValueError, match="9 layers cannot be cut into 10 stages"):
        place_layers(Line(np.ones((10, 9)), np.ones((9, 9)), np.ones((9, 9))), chunks=2)


def toy(seed: int) -> tuple[Space, Callable, float]:
    """Names that cost by themselves and in pairs, with one forbidden choice; and the optimum."""
    rng = random.Random(seed)
    names = [f"n{i}" for i in range(6)]
    alone = {n: [rng.uniform(1, 3) for _ in range(4)] for n in names}
    pair = {(a, b): rng.uniform(0, 1) for a in range(4) for b in range(4)}

    def price(chosen: dict) -> float:
        if chosen["n0"] == 3:
            return math.inf
        values = list(chosen.values())
        total = sum(alone[n][v] for n, v in chosen.items())
        return total + sum(pair[a, b] for a, b in itertools.pairwise(values))

    space = Space({n: list(range(4)) for n in names})
    best = min(price(dict(zip(names, p, strict=True))) for p in itertools.product(range(4), repeat=6))
    return space, price, best


@pytest.mark.parametrize("seed", range(3))
def test_searches_find_good_points(seed: int) -> None:
    space, price, best = toy(seed)
    reached = {}
    for name, search in (
        ("descend", lambda e: baselines.descend(e)),
        ("anneal", lambda e: baselines.anneal(e, seed=1)),
        ("climb", lambda e: climb(e, seed=1)),
        ("draw", lambda e: draw(e, seed=1)),
        ("published", lambda e: published(e, seed=1)),
        ("again", lambda e: baselines.descend_again(e, seed=1)),
    ):
        evaluate = Evaluator(space, price, budget=300)
        search(evaluate)
        assert len(evaluate.seen) <= 300
        reached[name] = evaluate.best[1]
        assert price(space.at(evaluate.best[0])) == reached[name]
    assert all(reached[name] <= 1.12 * best for name in ("descend", "again", "anneal", "climb"))
    assert min(reached.values()) <= 1.03 * best


def test_a_whole_space_is_searched_within_its_budget() -> None:
    space = Space({"a": [0, 1], "b": [0, 1, 2]})
    evaluate = Evaluator(space, lambda p: 3.0 - p["a"] - p["b"] / 2, budget=6)
    climb(evaluate, seed=0)
    assert evaluate.best == ((1, 2), 1.0)
    with pytest.raises(ValueError, match="b has nothing to choose from"):
        Space({"a": [1], "b": []})


def test_a_prior_leads_the_tree() -> None:
    """With all of its weight on the best choices the first playouts find the best point."""
    space, price, best = toy(0)
    target = min(itertools.product(range(4), repeat=6), key=lambda p: price(space.at(p)))
    sharp = Evaluator(space, price, budget=30)
    climb(sharp, seed=0, prior=lambda prefix, _: [0.97 if c == target[len(prefix)] else 0.01 for c in range(4)])
    assert sharp.best == (target, best)


def test_equal_points_count_once() -> None:
    evaluate = Evaluator(Space({"a": [0, 1], "b": [0, 1]}), lambda p: p["a"] + p["b"], 10, lambda p: (p[0], 0))
    draw(evaluate, seed=0)
    assert set(evaluate.seen) == {(0, 0), (1, 0)}


def planned(count: int) -> Planned:
    """Candidates predicted at 1, 2, 3, ... seconds; the last is refused."""
    evaluated = [
        Evaluated(DeclaredCandidate(strategy=SAR(prefetch=i), parts=2), Price(phases={"compute": i + 1.0}), i + 1.0)
        for i in range(count)
    ]
    refused = Evaluated(PipelineCandidate(stages=2), Price(phases={"compute": 0.5}), 0.5, "stale is not allowed")
    nothing = cast("Any", None)
    return Planned(nothing, (*evaluated, refused), "enumerate", 0, 0.0)


def test_the_better_half_runs_for_longer_and_the_fastest_is_chosen() -> None:
    """Of made-up times."""
    found, seen = planned(6), []
    truth = {0: 5.0, 1: 4.0, 2: 3.0, 3: 9.0}

    def run(plan: Any, epochs: int) -> float:
        seen.append((plan, epochs))
        return truth[plan]

    best, seconds = halved(found, 4, lambda p: cast("Any", p.candidate.as_json()["prefetch"]), run, lambda _: None)
    assert seen == [(0, EPOCHS), (1, EPOCHS), (2, EPOCHS), (3, EPOCHS), (2, 2 * EPOCHS), (1, 2 * EPOCHS)]
    assert best.chosen.candidate.as_json()["prefetch"] == 2
    assert len(best.evaluated) == len(found.evaluated)
    assert seconds == {p.candidate.label: truth[i] for i, p in enumerate(found.evaluated[:4])}


def test_plans_are_measured_on_this_machine_with_a_core_a_rank() -> None:
    settings: Any = SimpleNamespace(topology=Measured(cores=2), names={"topology": "measured"}, threads_per_rank="auto")
    check(settings, 2, 4)
    with pytest.raises(ValueError, match=r"--measure=4: 4 ranks of 1 threads share 2 cores.*set world_size=2"):
        check(settings, 4, 4)
    settings.topology = Machines(
        devices={"cpu": {"type": "cpu", "memory": "1 GiB"}}, hosts=({"name": "h", "devices": {"cpu": 1}},)
    )
    settings.names = {"topology": "two_nodes"}
    with pytest.raises(ValueError, match=r"--measure=4 runs plans on this machine, but topology=two_nodes"):
        check(settings, 2, 4)


LARGE = GraphStats(nodes=400_000, edges=6_000_000, features=32, classes=8, train=200_000)
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
    return PartStats.even(LARGE.nodes, LARGE.edges, parts, alpha=0.2 * (parts - 1), cut_share=0.2)


def only(*names: str) -> Registry:
    """The shipped strategies of these names; of all without any."""
    registry = shipped()
    return replace(registry, strategies={name: registry.strategies[name] for name in names or registry.strategies})


def request(ir: ModelIR, fabric: Fabric, *allowed: str, strategies: tuple[str, ...] = ()) -> Request:
    machine = Machine(fabric, tuple(RATES[d.kind] for d in fabric.devices))
    return Request(
        ir,
        LARGE,
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
    work = Work(ir, LARGE, even(1), asked.machine.rates[:1])
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
    assert sum(stats.edges(p) for p in range(4)) == pytest.approx(LARGE.edges)
    assert even(4).reshaped((1, 1, 1, 1)).halo[0] == pytest.approx(even(4).halo[0])


instances: Any = import_module("planner_search.instances")  # Any: modules of a study
training: Any = import_module("planner_search.train_guide")
HELD_OUT, instance, families = instances.HELD_OUT, instances.draw, instances.families


def test_the_shipped_weights() -> None:
    """Below 50 k parameters and 200 kB; read without pickles; every tensor is one of the architecture's."""
    assert WEIGHTS.stat().st_size < 200_000
    state = torch.load(WEIGHTS, weights_only=True)
    expected = Guide().state_dict()
    assert {k: v.shape for k, v in state.items()} == {k: v.shape for k, v in expected.items()}
    assert sum(v.numel() for v in state.values()) < 50_000
    assert all(bool(v.isfinite().all()) for v in load().state_dict().values())


def test_it_learns_and_its_weights_survive(tmp_path: Path) -> None:
    """On two tiny games the loss falls by a third at least; a saved guide gives the same priors to half precision."""
    torch.manual_seed(0)
    games = [game for game in (training.play(seed, None, plays=15, most=3) for seed in range(2)) if game is not None]
    assert games
    for game in games:
        for example in game.examples:
            assert float(example.target.sum()) == pytest.approx(1)
    guide = Guide()
    before = float(torch.stack([training.loss_of(guide, game) for game in games]).mean().detach())
    losses = training.fit(guide, games, epochs=40, seed=0, rate=6e-3)
    assert losses[-1] < 0.67 * before
    training.save(guide, tmp_path / "w.pt")
    points = Points(instance(0, split="held_out", most=6).request)
    start = (0,) * len(points.space.sizes)
    kept, again = (prior_of(g, points)((), start) for g in (guide.eval(), load(tmp_path / "w.pt")))
    assert again == pytest.approx(kept, abs=0.01)
    torch.save({"a": torch.zeros(1)}, tmp_path / "w2.pt")
    with pytest.raises(ValueError, match="holds no guide"):
        load(tmp_path / "w2.pt")


def test_scenes_and_priors() -> None:
    """Shapes, finite features, probabilities; a search with the guide stays in its budget and repeats itself."""
    request = instance(3, split="held_out", most=8).request
    points = Points(request)
    seen = scene(points)
    assert {name: x.shape[1] for name, x in seen.nodes.items()} == WIDTHS
    assert set(seen.edges) == set(RELATIONS)
    for name, x in seen.nodes.items():
        assert bool(x.isfinite().all()), name
    for (source, _, target), pairs in seen.edges.items():
        if pairs.numel():
            assert int(pairs[0].max()) < len(seen.nodes[source])
            assert int(pairs[1].max()) < len(seen.nodes[target])
    start = (0,) * len(points.space.sizes)
    rows, kinds = choice_features(points, (), start)
    assert rows.shape == (points.space.sizes[0], CHOICE_WIDTH)
    assert set(kinds) == {""}
    prior = prior_of(load(), points)
    for depth in range(len(start)):
        given = prior(start[:depth], start)
        assert len(given) == points.space.sizes[depth]
        assert sum(given) == pytest.approx(1, abs=1e-5)
    found = [run(request, "guided", budget=25, seed=4) for _ in range(2)]
    assert found[0].evaluations <= 25 + len(price_grids(request))
    assert found[0].evaluated[0].objective == found[1].evaluated[0].objective


def test_nothing_held_out_is_trained_on() -> None:
    for group, held in HELD_OUT.items():
        assert not set(held) & set(families("train", group))
        assert families("held_out", group) == held
    for seed in range(2):
        name = instance(seed, split="train", most=4).name
        assert not any(word in name for words in HELD_OUT.values() for word in words)
        assert instance(seed, split="train", most=4).name == name


def test_loading_the_prior_keeps_the_random_state(monkeypatch: pytest.MonkeyPatch) -> None:
    network.load.cache_clear()
    before = torch.random.get_rng_state()
    network.load()
    assert torch.equal(before, torch.random.get_rng_state())
