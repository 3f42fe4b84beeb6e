"""Stages by dynamic programming against brute force; searches of a space find what there is to find."""

from __future__ import annotations

import itertools
import math
import random
import time
from collections.abc import Callable

import pytest

from gnnpar.planning.closed import chain
from gnnpar.planning.search.space import Evaluator, Space, anneal, descend, draw
from gnnpar.planning.search.stages import assign_stages
from gnnpar.planning.search.tree import climb


def brute_force(layers: int, counts: list[int], stage: Callable, cut: Callable, chunks: int) -> float:
    best = math.inf
    devices = [c for c, count in enumerate(counts) for _ in range(count)]
    for size in range(1, min(layers, len(devices)) + 1):
        for inside in itertools.combinations(range(1, layers), size - 1):
            cuts = (0, *inside)
            ends = (*inside, layers)
            for classes in set(itertools.permutations(devices, size)):
                stages = [stage(a, b, c) for a, b, c in zip(cuts, ends, classes, strict=True)]
                ways = [cut(a, c, d) for a, c, d in zip(inside, classes, classes[1:], strict=False)]
                best = min(best, chain(stages, [w for w, _ in ways], [b for _, b in ways], chunks))
    return best


@pytest.mark.parametrize("seed", range(40))
def test_stages_equal_brute_force(seed: int) -> None:
    """Up to 8 layers on up to 4 devices of up to 3 classes, with boundaries that may be the bottleneck."""
    rng = random.Random(seed)
    layers, num_classes = rng.randint(1, 8), rng.randint(1, 3)
    counts = [1] * num_classes
    for _ in range(4 - num_classes):
        counts[rng.randrange(num_classes)] += rng.randint(0, 1)
    seconds = [[rng.uniform(0.5, 2) / (1 + c) for _ in range(layers)] for c in range(num_classes)]
    widths = [rng.choice([1, 2]) * rng.uniform(0.2, 3) for _ in range(layers)]
    speed = {(c, d): rng.uniform(0.3, 2) for c in range(num_classes) for d in range(num_classes)}

    def stage(a: int, b: int, c: int) -> float:
        return sum(seconds[c][a:b]) if b - a <= 5 or c == 0 else math.inf  # memory: few layers fit on class c > 0

    def cut(layer: int, c: int, d: int) -> tuple[float, float]:
        alone = widths[layer] / speed[c, d]
        return alone + 0.1, alone

    for chunks in (1, 4, 16):
        found = assign_stages(layers, counts, stage, cut, chunks=chunks)
        assert found.seconds == pytest.approx(brute_force(layers, counts, stage, cut, chunks))
        assert len(found.cuts) == len(found.classes)
        assert all(found.classes.count(c) <= counts[c] for c in set(found.classes))


def test_stages_of_a_given_number_and_what_cannot_be() -> None:
    found = assign_stages(8, [4], lambda a, b, c: b - a, lambda *_: (0.0, 0.0), chunks=8, stages=4)
    assert found.cuts == (0, 2, 4, 6)
    with pytest.raises(ValueError, match="5 stages cannot be made of 8 layers and 4 devices: use at most 4"):
        assign_stages(8, [4], lambda a, b, c: b - a, lambda *_: (0.0, 0.0), chunks=8, stages=5)
    with pytest.raises(ValueError, match="no pipeline of 3 layers fits on these 2 devices"):
        assign_stages(3, [2], lambda a, b, c: math.inf, lambda *_: (0.0, 0.0), chunks=2)


def test_many_layers_take_seconds() -> None:
    began = time.process_time()
    rng = random.Random(0)
    sums = [0.0, *itertools.accumulate(rng.uniform(1, 2) for _ in range(64))]
    found = assign_stages(64, [16], lambda a, b, c: sums[b] - sums[a], lambda *_: (0.1, 0.1), chunks=64, stages=16)
    assert len(found.cuts) == 16
    assert found.seconds < 1.05 * (sums[-1] + 63 * sums[-1] / 16 + 1.5) + 63
    assert time.process_time() - began < 10


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
        ("descend", lambda e: descend(e)), ("anneal", lambda e: anneal(e, seed=1)),
        ("climb", lambda e: climb(e, seed=1)), ("draw", lambda e: draw(e, seed=1)),
    ):  # fmt: skip
        evaluate = Evaluator(space, price, budget=300)
        search(evaluate)
        assert len(evaluate.seen) <= 300
        assert evaluate.curve == sorted(evaluate.curve, reverse=True)
        reached[name] = evaluate.best[1]
        assert reached[name] == evaluate.curve[-1]
        assert price(space.at(evaluate.best[0])) == reached[name]
    assert all(reached[name] <= 1.12 * best for name in ("descend", "anneal", "climb"))
    assert min(reached.values()) <= 1.03 * best


def test_a_whole_space_is_searched_within_its_budget() -> None:
    space = Space({"a": [0, 1], "b": [0, 1, 2]})
    evaluate = Evaluator(space, lambda p: 3.0 - p["a"] - p["b"] / 2, budget=6)
    climb(evaluate, seed=0)
    assert evaluate.best == ((1, 2), 1.0)
    with pytest.raises(ValueError, match="b has nothing to choose from"):
        Space({"a": [1], "b": []})
