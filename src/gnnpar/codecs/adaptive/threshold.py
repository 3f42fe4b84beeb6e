"""The choice of widths by thresholds: exact up to one group a pair, in milliseconds.

Within a pair a byte costs the same wherever it is spent, so steps to more bits are taken in order of variance saved per
byte (on each group's convex hull). Rounds share no variable, so each is a search over its own time Z: all pairs of the
round may use Z, and the sum of their variances plus the price of Z is least at a breakpoint of one of them.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from gnnpar.codecs.adaptive.problem import Array, Pair, Problem

_FREE = 1e-6  # bytes: rows are made of words, so that 4 bits of a narrow row may cost what 2 bits cost
_LOOK_AHEAD = 200  # steps tried once more for the bytes that the first step too long leaves over


class _Steps(NamedTuple):
    """Steps of a pair, best first, and what was spent and saved before each of them and after the last.

    Shapes: group, entry, nbytes [K]; spent, variance [K + 1].
    """

    group: Array
    entry: Array
    nbytes: Array
    spent: Array
    variance: Array


def solve(problem: Problem) -> list[Array]:
    """Menu entries [G] of every pair."""
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
    """Every group climbs its convex hull, from the fewest bits on."""
    variance, nbytes = pair.variance, pair.nbytes
    groups, entries, costs, gains = [], [], [], []
    at = np.zeros(len(variance), dtype=np.int64)
    climbing = np.arange(len(variance))
    while len(climbing):
        here = at[climbing]
        saved = variance[climbing, here][:, None] - variance[climbing]
        cost = nbytes[climbing] - nbytes[climbing, here][:, None]
        rate = np.where(saved > 0, saved / np.maximum(cost, _FREE), 0.0)
        target = rate.shape[1] - 1 - np.argmax(rate[:, ::-1], axis=1)  # of equal rates the farthest
        each = np.arange(len(climbing))
        worth = rate[each, target] > 0
        climbing, target, each = climbing[worth], target[worth], each[worth]
        groups.append(climbing)
        entries.append(target)
        costs.append(cost[each, target])
        gains.append(saved[each, target])
        at[climbing] = target
    group, entry, cost, gain = (np.concatenate(x) if x else np.zeros(0) for x in (groups, entries, costs, gains))
    order = np.argsort(-gain / np.maximum(cost, _FREE), kind="stable")
    cost, gain = cost[order], gain[order]
    spent = float(nbytes[:, 0].sum()) + np.concatenate([[0.0], np.cumsum(cost)])
    left = float(variance[:, 0].sum()) - np.concatenate([[0.0], np.cumsum(gain)])
    return _Steps(group[order].astype(np.int64), entry[order].astype(np.int64), cost, spent, left)


def _take(pair: Pair, steps: _Steps, allowed: float) -> Array:
    """The first steps as far as the bytes allow, then later ones that still fit."""
    entries = np.zeros(len(pair.rows), dtype=np.int64)
    tolerance = 1e-9 * max(steps.spent[-1], 1.0)
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
