"""The choice of widths as a mixed-integer program, solved by HiGHS: the oracle of the threshold search."""

from __future__ import annotations

from typing import Any

import numpy as np

from gnnpar.codecs.adaptive.problem import Array, Problem

_SECONDS, _GAP = 60.0, 1e-4


def solve(problem: Problem) -> list[Array]:
    """Menu entries [G] of every pair; the best found within a minute."""
    x = _solve(problem, integral=True)[0]
    if x is None:
        raise ValueError(
            "solver=highs found no assignment within 60 s; set codec.group_size higher, or solver=threshold"
        )
    choice, start = [], 0
    for pair in problem.pairs:
        count = pair.variance.size
        choice.append(x[start : start + count].reshape(pair.variance.shape).argmax(1))
        start += count
    return choice


def lower_bound(problem: Problem) -> float:
    """The objective of the linear relaxation."""
    return _solve(problem, integral=False)[1]


def _solve(problem: Problem, *, integral: bool) -> tuple[Array | None, float]:
    """(binaries then Z_r, objective)."""
    from scipy import sparse
    from scipy.optimize import Bounds, LinearConstraint, milp

    # their types know single bounds only
    limit: Any = LinearConstraint
    bounds: Any = Bounds

    sizes = [pair.variance.size for pair in problem.pairs]
    starts = np.concatenate([[0], np.cumsum(sizes)])
    num_binaries, num_rounds = int(starts[-1]), len(problem.rounds)
    per_variance, per_second = problem.weights
    v_u, _, t_u, t_span = problem.scales
    scale = t_span or 1.0  # Z in units of the span: seconds may be 1e-6, the tolerance of a constraint
    cost = np.concatenate(
        [*(per_variance * p.variance.ravel() for p in problem.pairs), np.full(num_rounds, per_second * scale)]
    )
    round_of = {i: r for r, members in enumerate(problem.rounds) for i in members}
    one = sparse.lil_matrix((sum(len(p.rows) for p in problem.pairs), num_binaries + num_rounds))
    rows, columns, values, upper, line, group = [], [], [], [], 0, 0
    for i, pair in enumerate(problem.pairs):
        m = pair.variance.shape[1]
        for g in range(len(pair.rows)):
            one[group, starts[i] + g * m : starts[i] + (g + 1) * m] = 1
            group += 1
        limits: list[tuple[float, int | None, float]] = [
            (pair.seconds_per_byte / scale, num_binaries + round_of[i], -pair.latency_seconds / scale)
        ]
        if np.isfinite(pair.budget_nbytes):
            limits.append((1.0 / pair.budget_nbytes, None, 1.0))
        for factor, z, bound in limits:
            columns += range(starts[i], starts[i + 1])
            values += list(factor * pair.nbytes.ravel())
            rows += [line] * sizes[i]
            if z is not None:
                rows, columns, values = [*rows, line], [*columns, z], [*values, -1.0]
            upper.append(bound)
            line += 1
    at_most = sparse.csr_matrix((values, (rows, columns)), shape=(line, num_binaries + num_rounds))
    low = np.concatenate([np.zeros(num_binaries), np.full(num_rounds, problem.hidden_seconds / scale)])
    high = np.concatenate([np.ones(num_binaries), np.full(num_rounds, np.inf)])
    found = milp(
        cost,
        constraints=[limit(one.tocsr(), 1, 1), limit(at_most, -np.inf, np.array(upper))],
        bounds=bounds(low, high),
        integrality=np.concatenate([np.full(num_binaries, int(integral)), np.zeros(num_rounds)]),
        options={"time_limit": _SECONDS, "mip_rel_gap": _GAP},
    )
    objective = np.nan if found.x is None else float(found.fun) - per_variance * v_u - per_second * t_u
    return found.x, objective
