"""Recompute instead of communicate, decided exactly by a minimum cut. Source: TAG (arXiv 2302.06126), lossless gradient
aggregation.

Some operations may be duplicated: every replica runs them in full, which costs computing and saves the sum of what they
make. A tensor that feeds a duplicated operation from one that is not must be broadcast, once however many read it:

    min  sum_i w_i x_i  +  sum_t beta_t max over readers j of t of (x_j - x_producer)+

w_i = extra seconds of computing - seconds of communication saved, of either sign. It is a project selection, whose
minimum cut is a linear program with integral vertices: one variable for each maximum, bounded by each reader's row.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Tensor:
    """What one operation makes for others. `producer` None: every replica has it anyway. `seconds`: to broadcast it."""

    producer: int | None
    readers: tuple[int, ...]
    seconds: float


@dataclass(frozen=True)
class Choice:
    """Operations to duplicate, and what that changes in seconds (<= 0)."""

    duplicated: frozenset[int]
    seconds: float


def duplicate(weights: Sequence[float], tensors: Sequence[Tensor]) -> Choice:
    """Return the best set of operations, the smallest of equal ones. weights[i] as above."""
    from scipy.optimize import linprog

    sent = [t for t in tensors if t.producer is not None]  # what every replica has costs nothing
    pairs = [(number, t.producer, reader) for number, t in enumerate(sent) for reader in t.readers]
    readers = np.zeros((len(pairs), len(weights) + len(sent)))
    for row, (number, producer, reader) in zip(readers, pairs, strict=True):
        row[reader] += 1.0
        row[producer] -= 1.0
        row[len(weights) + number] = -1.0
    seconds = np.array([*weights, *(t.seconds for t in sent)])
    costs = seconds / (np.abs(weights).max() or 1.0)
    costs[: len(weights)] += 1e-6  # above the tolerance of the solver
    found = linprog(costs, A_ub=readers, b_ub=np.zeros(len(pairs)), bounds=(0, 1), method="highs-ds")
    chosen = frozenset(np.flatnonzero(found.x[: len(weights)] > 0.5).tolist())
    return Choice(chosen, cost(chosen, weights, tensors))


def cost(chosen: frozenset[int], weights: Sequence[float], tensors: Sequence[Tensor]) -> float:
    """The objective of a set."""
    total = sum(weights[i] for i in chosen)
    for t in tensors:
        if t.producer is not None and t.producer not in chosen and any(j in chosen for j in t.readers):
            total += t.seconds
    return total


def sufficient_factors(
    rows: float, width_in: int, width_out: int, *, replicas: int, rate: float, seconds_per_flop: float
) -> tuple[float, float]:
    """(seconds of sending the factors and multiplying them everywhere, seconds of the sum it replaces).

    rows: of each replica. All-gather of X and dZ, then (P - 1) rows more of dW = X^T dZ; against a ring sum of dW.
    """
    others = replicas - 1
    gathered = others * rows * (width_in + width_out) * 4 / rate
    computed = others * 2 * rows * width_in * width_out * seconds_per_flop
    reduced = 2 * others / replicas * width_in * width_out * 4 / rate
    return gathered + computed, reduced
