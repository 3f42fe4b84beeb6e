"""Cuts into stages, compared with every cut there is."""

import itertools
import random

import pytest

from gnnpar.parallel.pipeline.placing import balanced, even


def every_cut(num_layers: int, stages: int):
    for ends in itertools.combinations(range(1, num_layers), stages - 1):
        marks = (0, *ends, num_layers)
        yield tuple(range(a, b) for a, b in itertools.pairwise(marks))


@pytest.mark.parametrize("seed", range(40))
def test_the_balanced_cut_is_the_best_of_all(seed):
    draw = random.Random(seed)
    num_layers = draw.randint(1, 9)
    stages = draw.randint(1, num_layers)
    costs = [float(draw.choice([0, 1, 1, 2, 3, 8])) for _ in range(num_layers)]
    slowest = {cut: max(sum(costs[i] for i in layers) for layers in cut) for cut in every_cut(num_layers, stages)}
    best = min(slowest.values())
    expected = min((tuple(map(len, cut)), cut) for cut, cost in slowest.items() if cost == best)[1]
    assert balanced(costs, stages) == expected


def test_even_cuts_give_the_rest_to_the_first_stages():
    assert [len(layers) for layers in even(33, 8)] == [5, 4, 4, 4, 4, 4, 4, 4]
    assert even(3, 3) == (range(0, 1), range(1, 2), range(2, 3))


def test_the_expensive_first_layer_of_physics_gets_a_stage_of_its_own():
    """Cutting by cost instead of by count takes the slowest stage from 2.56 to about 1.5 ms."""
    costs = [1.36] + [0.30] * 32  # ms a chunk
    by_count = max(sum(costs[i] for i in layers) for layers in even(33, 8))
    by_cost = max(sum(costs[i] for i in layers) for layers in balanced(costs, 8))
    assert by_count == pytest.approx(2.56)
    assert by_cost == pytest.approx(1.5, abs=0.05)


@pytest.mark.parametrize("cut", [lambda: even(3, 4), lambda: balanced([1.0, 2.0, 3.0], 4)])
def test_more_stages_than_layers(cut):
    with pytest.raises(ValueError, match="3 layers cannot be cut into 4 stages"):
        cut()
