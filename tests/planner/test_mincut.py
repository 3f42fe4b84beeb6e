"""Duplication by minimum cut equals the mixed-integer program, and sufficient factors pay where the formula says."""

from __future__ import annotations

import random

import numpy as np
import pytest
from scipy.optimize import Bounds, LinearConstraint, milp

from gnnpar.parallel.factors import break_even_rows
from gnnpar.planner.mincut import Tensor, cost, duplicate, sufficient_factors


def random_dag(rng: random.Random, size: int) -> tuple[list[float], list[Tensor]]:
    weights = [rng.uniform(-1, 1.5) for _ in range(size)]
    tensors = []
    for i in range(size - 1):
        readers = tuple(sorted(rng.sample(range(i + 1, size), min(size - i - 1, rng.randint(1, 3)))))
        tensors.append(Tensor(i, readers, rng.uniform(0, 0.8)))
    return weights, tensors


def by_milp(weights: list[float], tensors: list[Tensor]) -> float:
    """x_i and one b_t a tensor: b_t >= x_reader - x_producer."""
    size = len(weights)
    objective = np.array([*weights, *(t.seconds for t in tensors)])
    rows = []
    for number, t in enumerate(tensors):
        for reader in t.readers:
            row = np.zeros(len(objective))
            row[reader], row[size + number] = 1, -1
            if t.producer is not None:
                row[t.producer] = -1
            rows.append(row)
    found = milp(
        objective,
        constraints=LinearConstraint(np.array(rows), ub=0),
        bounds=Bounds(0, 1),
        integrality=np.ones(len(objective)),
    )
    return float(found.fun)


@pytest.mark.parametrize("seed", range(60))
def test_equals_the_integer_program(seed: int) -> None:
    rng = random.Random(seed)
    weights, tensors = random_dag(rng, rng.randint(3, 40))
    choice = duplicate(weights, tensors)
    assert choice.seconds == pytest.approx(cost(choice.duplicated, weights, tensors))
    assert choice.seconds == pytest.approx(by_milp(weights, tensors), abs=1e-9)


def test_a_tensor_is_broadcast_once_for_all_its_readers() -> None:
    """Alone neither reader pays for the broadcast, together they do."""
    weights, tensors = [5.0, -1.0, -1.0], [Tensor(0, (1, 2), 1.5)]
    assert duplicate(weights, tensors).duplicated == {1, 2}
    assert duplicate([5.0, -1.0, 1.0], tensors).duplicated == frozenset()
    assert duplicate([0.0, 0.0, 0.0], tensors).duplicated == frozenset()
    assert duplicate(weights, [Tensor(None, (1,), 9.0)]).duplicated == {1, 2}  # what is everywhere costs nothing


def test_sufficient_factors() -> None:
    """Wide layers with few rows gain, hidden layers of full-graph training lose."""
    link, flop = 2.8e9, 1e-13
    for m, n, replicas in ((25088, 4096, 2), (4096, 4096, 4), (256, 256, 4)):
        least = break_even_rows(m, n, replicas=replicas, rate=link, seconds_per_flop=flop)
        for rows, wins in ((0.9 * least, True), (1.1 * least, False)):
            factors, reduced = sufficient_factors(rows, m, n, replicas=replicas, rate=link, seconds_per_flop=flop)
            assert (factors < reduced) == wins
    assert break_even_rows(25088, 4096, replicas=2, rate=link, seconds_per_flop=0) == pytest.approx(3521, rel=1e-3)
    assert break_even_rows(256, 256, replicas=4, rate=link, seconds_per_flop=0) == pytest.approx(64)
    assert break_even_rows(4096, 4096, replicas=4, rate=link, seconds_per_flop=0) == pytest.approx(1024)
