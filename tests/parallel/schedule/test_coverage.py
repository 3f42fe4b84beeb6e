"""Coverage: which gradients exist, against counting by hand and over all orders."""

import itertools

import pytest

from gnnpar.parallel.pipeline.schedule.action import fill_drain, one_forward_one_backward
from gnnpar.parallel.pipeline.schedule.coverage import coverage, expected, expected_weight

EDGES = [[9, 1, 2, 0], [3, 8, 1, 1], [0, 2, 7, 4], [5, 0, 1, 6]]  # [into, from]
TOTAL = sum(map(sum, EDGES))


@pytest.mark.parametrize("stages", [1, 2, 3])
@pytest.mark.parametrize("order", [(0, 1, 2, 3), (2, 0, 3, 1)])
def test_lifo_keeps_every_fresh_edge(stages, order):
    found = coverage(fill_drain(stages, 4), EDGES, order)
    fresh = sum(EDGES[order[i]][order[j]] for i in range(4) for j in range(i))
    assert found.fresh == pytest.approx(fresh / TOTAL)
    assert found.kept == pytest.approx((30 + fresh) / TOTAL)
    assert found.kept_of_fresh == pytest.approx(1.0)
    assert found.own + found.fresh + found.stale == pytest.approx(1.0)


def test_virtual_stages_change_nothing():
    assert coverage(fill_drain(2, 4, virtual=2), EDGES, (1, 0, 2, 3)) == coverage(fill_drain(2, 4), EDGES, (1, 0, 2, 3))


@pytest.mark.parametrize("stages", [2, 3, 4])
def test_1f1b_keeps_no_edge_across_chunks(stages):
    found = coverage(one_forward_one_backward(stages, 4), EDGES, (0, 1, 2, 3))
    assert found.kept == found.own == pytest.approx(30 / TOTAL)
    assert found.kept_of_fresh == 0.0


@pytest.mark.parametrize("schedule", [fill_drain(2, 4), one_forward_one_backward(2, 4), fill_drain(2, 4, virtual=2)])
def test_the_expectation_is_the_mean_over_all_orders(schedule):
    every = [coverage(schedule, EDGES, order) for order in itertools.permutations(range(4))]
    mean = expected(schedule, EDGES)
    for name in ("own", "fresh", "stale", "kept"):
        assert getattr(mean, name) == pytest.approx(sum(getattr(c, name) for c in every) / len(every))


@pytest.mark.parametrize("hops", range(5))
def test_the_weight_of_a_path_is_the_mean_over_all_orders(hops):
    """A path d_0 -> ... -> d_m survives where its slots rise; each hop doubles it (spec 3.3: 2^m / (m + 1)!)."""
    orders = list(itertools.permutations(range(hops + 1)))
    weights = [2.0**hops if list(order) == sorted(order) else 0.0 for order in orders]
    assert expected_weight(hops) == pytest.approx(sum(weights) / len(weights))


def test_bad_sizes():
    with pytest.raises(ValueError, match=r"edges are \[4, 4\], but the schedule has 3 slots"):
        expected(fill_drain(2, 3), EDGES)
    with pytest.raises(ValueError, match="no order of 4 chunks"):
        coverage(fill_drain(2, 4), EDGES, (0, 1, 2, 2))
