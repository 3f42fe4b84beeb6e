"""Solvers of the assignment of bits: thresholds, in milliseconds, and a mixed-integer program (HiGHS) as their oracle.

Thresholds are exact up to one group per pair. Within a pair all bytes cost the same, so steps to more bits are taken in
order of variance saved per byte (on each group's convex hull). Rounds share no variable, so search each over its own
time Z. All pairs of the round may take Z seconds. The sum of their variances plus the price of Z has its minimum at a
breakpoint of one pair.
"""

from __future__ import annotations

from importlib import import_module
from itertools import accumulate
from typing import NamedTuple

import numpy as np

from gnnpar.codecs.adaptive.problem import Array, BitProblem, Pair

_FREE = 1e-6  # bytes of a free step: rows are whole words, so 4 bits of a narrow row may cost as much as 2 bits
_LOOK_AHEAD = 200  # steps to try for the remaining bytes after the first step that does not fit
_SECONDS, _GAP = 60.0, 1e-4  # limits of HiGHS: time, and distance from the optimum


class _Steps(NamedTuple):
    """Steps of a pair, best first, and the totals before each step and after the last. Shapes: group, entry, nbytes
    [K]; spent, variance [K + 1]."""

    group: Array
    entry: Array
    nbytes: Array
    spent: Array
    variance: Array


def solve_thresholds(problem: BitProblem) -> list[Array]:
    """Return menu entries [G] of every pair, by thresholds."""
    choice: list[Array] = [np.zeros(0, dtype=np.int64)] * len(problem.pairs)
    per_variance, per_second = problem.weights
    for members in problem.rounds:
        pairs = [problem.pairs[i] for i in members]
        steps = [_steps(pair) for pair in pairs]
        seconds = [pair.seconds_per_byte * s.spent + pair.latency_seconds for pair, s in zip(pairs, steps, strict=True)]
        floor = max(max(t[0] for t in seconds), 0.0)
        times = np.unique(np.concatenate([[floor], *(t[t >= floor] for t in seconds)]))
        cost = per_second * np.maximum(times, problem.hidden_seconds)
        for t, s in zip(seconds, steps, strict=True):
            cost = cost + per_variance * s.variance[np.searchsorted(t, times, side="right") - 1]
        best = float(max(times[int(np.argmin(cost))], problem.hidden_seconds if per_second else 0.0))
        if not per_second:
            best = np.inf
        for i, pair, s in zip(members, pairs, steps, strict=True):
            allowed = np.inf
            if np.isfinite(best) and pair.seconds_per_byte > 0:
                allowed = (best - pair.latency_seconds) / pair.seconds_per_byte
            choice[i] = _take(pair, s, min(allowed, pair.budget_nbytes))
    return choice


def _steps(pair: Pair) -> _Steps:
    """Return the steps of every group along its convex hull, starting at the fewest bits."""
    variance, nbytes = pair.variance, pair.nbytes
    groups: list[Array] = []
    entries: list[Array] = []
    costs: list[Array] = []
    gains: list[Array] = []
    at = np.zeros(len(variance), dtype=np.int64)
    climbing = np.arange(len(variance))
    while len(climbing):
        here = at[climbing]
        saved = variance[climbing, here][:, None] - variance[climbing]
        cost = nbytes[climbing] - nbytes[climbing, here][:, None]
        rate = np.where(saved > 0, saved / np.maximum(cost, _FREE), 0.0)
        target = rate.shape[1] - 1 - np.argmax(rate[:, ::-1], axis=1)  # the largest step of equal rates
        each = np.arange(len(climbing))
        worth = rate[each, target] > 0
        climbing, target, each = climbing[worth], target[worth], each[worth]
        groups.append(climbing)
        entries.append(target)
        costs.append(cost[each, target])
        gains.append(saved[each, target])
        at[climbing] = target
    group, entry, cost, gain = (_joined(x) for x in (groups, entries, costs, gains))
    order = np.argsort(-gain / np.maximum(cost, _FREE), kind="stable")
    cost, gain = cost[order], gain[order]
    spent = float(nbytes[:, 0].sum()) + np.concatenate([[0.0], np.cumsum(cost)])
    left = float(variance[:, 0].sum()) - np.concatenate([[0.0], np.cumsum(gain)])
    return _Steps(group[order].astype(np.int64), entry[order].astype(np.int64), cost, spent, left)


def _joined(arrays: list[Array]) -> Array:
    return np.concatenate(arrays) if arrays else np.zeros(0)


def _take(pair: Pair, steps: _Steps, allowed: float) -> Array:
    """Take the first steps within the allowed bytes, then later ones that still fit."""
    entries = np.zeros(len(pair.rows), dtype=np.int64)
    tolerance = 1e-9 * max(float(steps.spent[-1]), 1.0)
    count = max(int(np.searchsorted(steps.spent, allowed + tolerance, side="right")) - 1, 0)
    np.maximum.at(entries, steps.group[:count], steps.entry[:count])
    rest = allowed + tolerance - steps.spent[count]
    skipped: set[int] = set()
    for k in range(count, min(count + _LOOK_AHEAD, len(steps.group))):
        group = int(steps.group[k])
        if group in skipped:
            continue
        if steps.nbytes[k] <= rest:
            entries[group] = steps.entry[k]
            rest -= steps.nbytes[k]
        else:
            skipped.add(group)
    return entries


def solve_program(problem: BitProblem) -> list[Array]:
    """Return menu entries [G] of every pair, the best by HiGHS within a minute. ValueError if it finds none."""
    x = run_highs(problem, integral=True)[0]
    if x is None:
        raise ValueError(
            "solver=highs found no assignment within 60 s; set codec.group_size higher, or solver=threshold"
        )
    choice: list[Array] = []
    start = 0
    for pair in problem.pairs:
        count = pair.variance.size
        choice.append(x[start : start + count].reshape(pair.variance.shape).argmax(1))
        start += count
    return choice


def run_highs(problem: BitProblem, *, integral: bool) -> tuple[Array | None, float]:
    """Return (binaries then Z_r, objective). `integral` false: of the linear relaxation, a lower bound."""
    sparse, optimize = import_module("scipy.sparse"), import_module("scipy.optimize")  # by name: scipy has no types

    starts = list(accumulate((pair.variance.size for pair in problem.pairs), initial=0))
    num_binaries, num_rounds = starts[-1], len(problem.rounds)
    per_variance, per_second = problem.weights
    v_u, _, t_u, t_span = problem.scales
    scale = t_span or 1.0  # Z in units of the span: seconds may be 1e-6, the tolerance of a constraint
    cost = np.concatenate(
        [*(per_variance * p.variance.ravel() for p in problem.pairs), np.full(num_rounds, per_second * scale)]
    )
    choices = [sparse.kron(sparse.eye(len(p.rows)), np.ones((1, p.variance.shape[1]))) for p in problem.pairs]
    one = sparse.block_diag([*choices, sparse.csr_matrix((0, num_rounds))], format="csr")
    round_of = {i: r for r, members in enumerate(problem.rounds) for i in members}
    limits: list[tuple[Array, Array, float]] = []  # columns, their factors, upper bound
    for i, pair in enumerate(problem.pairs):
        own, nbytes = np.arange(starts[i], starts[i + 1]), pair.nbytes.ravel()
        seconds = np.append(pair.seconds_per_byte / scale * nbytes, -1.0)
        limits.append((np.append(own, num_binaries + round_of[i]), seconds, -pair.latency_seconds / scale))
        if np.isfinite(pair.budget_nbytes):
            limits.append((own, 1.0 / pair.budget_nbytes * nbytes, 1.0))
    columns, factors, upper = zip(*limits, strict=True)
    ends = np.cumsum([0, *map(len, columns)])
    table = np.concatenate(factors), np.concatenate(columns), ends
    at_most = sparse.csr_matrix(table, shape=(len(limits), num_binaries + num_rounds))
    low = np.concatenate([np.zeros(num_binaries), np.full(num_rounds, problem.hidden_seconds / scale)])
    high = np.concatenate([np.ones(num_binaries), np.full(num_rounds, np.inf)])
    solution = optimize.milp(
        cost,
        constraints=[
            optimize.LinearConstraint(one, 1, 1),
            optimize.LinearConstraint(at_most, -np.inf, np.array(upper)),
        ],
        bounds=optimize.Bounds(low, high),
        integrality=np.concatenate([np.full(num_binaries, int(integral)), np.zeros(num_rounds)]),
        options={"time_limit": _SECONDS, "mip_rel_gap": _GAP},
    )
    objective = np.nan if solution.x is None else float(solution.fun) - per_variance * v_u - per_second * t_u
    return solution.x, objective
