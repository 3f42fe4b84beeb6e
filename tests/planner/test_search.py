"""Stages by dynamic programming against brute force; searches of a space find what there is to find."""

from __future__ import annotations

import itertools
import math
import random
import sys
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from gnnpar.parallel.declared import DeclaredCandidate
from gnnpar.parallel.pipeline.cost import PipelineCandidate, chain
from gnnpar.parallel.pipeline.placing import Line, place_layers
from gnnpar.parallel.sequential.strategy import SAR
from gnnpar.planner.halving import EPOCHS, check, halved
from gnnpar.planner.planner import Evaluated, Planned
from gnnpar.planner.search.tree import Evaluator, Space, climb, draw, published
from gnnpar.pricing.price import Price
from gnnpar.pricing.topology import Machines
from gnnpar.settings import Measured

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
