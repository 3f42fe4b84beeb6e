"""Duplication of a chain equals the mixed-integer program, and sufficient factors pay where the formula says."""

from __future__ import annotations

import random
from collections.abc import Sequence

import numpy as np
import pytest
from scipy.optimize import Bounds, LinearConstraint, milp

from gnnpar.parallel.factors import break_even_rows
from gnnpar.planner.recompute import duplicated


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
def test_equals_the_integer_program(seed: int) -> None:
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


def test_sufficient_factors() -> None:
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
