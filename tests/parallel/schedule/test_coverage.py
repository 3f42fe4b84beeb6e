"""Coverage: which gradients exist, against counting by hand and over all orders."""

import itertools
from collections.abc import Sequence

import pytest

from gnnpar.parallel.pipeline.schedule import Schedule, fill_drain, one_forward_one_backward
from gnnpar.parallel.pipeline.simulate import Counts, Coverage, expected, kept

EDGES = [[9, 1, 2, 0], [3, 8, 1, 1], [0, 2, 7, 4], [5, 0, 1, 6]]  # [into, from]
TOTAL = sum(map(sum, EDGES))


def coverage(schedule: Schedule, edges: Counts, order: Sequence[int]) -> Coverage:
    """Count the coverage of one epoch. `edges` [K, K] by chunk, `order[slot]` the chunk at a slot."""
    cells = [(i, j, float(edges[order[i]][order[j]])) for i in range(len(order)) for j in range(len(order))]
    matrices = [kept(schedule, stage) for stage in range(schedule.num_stages)]
    return Coverage(
        own=sum(n for i, j, n in cells if i == j) / TOTAL,
        fresh=sum(n for i, j, n in cells if j < i) / TOTAL,
        stale=sum(n for i, j, n in cells if j > i) / TOTAL,
        kept=sum(n for matrix in matrices for i, j, n in cells if matrix[i][j]) / TOTAL / len(matrices),
    )


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


def test_bad_sizes():
    with pytest.raises(ValueError, match=r"edges are \[4, 4\], but the schedule has 3 slots"):
        expected(fill_drain(2, 3), EDGES)
