"""Recompute instead of communicating, decided exactly by a minimum cut. Source: TAG (arXiv 2302.06126), lossless
gradient aggregation.

An operation may be duplicated: every replica runs it in full, which costs compute and saves the sum of its outputs. A
tensor read by a duplicated operation and made by one that is not duplicated must be broadcast, once for all readers:

min  sum_i w_i x_i  +  sum_t beta_t max over readers j of t of (x_j - x_producer)+

w_i = extra compute seconds - communication seconds saved, of either sign. It is a project selection: its minimum cut is
a linear program with integral vertices, with one variable per maximum, bounded by a row per reader.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Tensor:
    """The output of an operation. producer=None: every replica has it. seconds: to broadcast it."""

    producer: int | None
    readers: tuple[int, ...]
    seconds: float


@dataclass(frozen=True)
class Choice:
    """Operations to duplicate, and the change in seconds (<= 0)."""

    duplicated: frozenset[int]
    seconds: float


def duplicate(weights: Sequence[float], tensors: Sequence[Tensor]) -> Choice:
    """Return the best set of operations, the smallest of equal ones. weights[i]: w_i above."""
    from scipy.optimize import linprog

    sent = [t for t in tensors if t.producer is not None]  # a tensor of every replica costs nothing
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
    """Return the objective of a set."""
    total = sum(weights[i] for i in chosen)
    for t in tensors:
        if t.producer is not None and t.producer not in chosen and any(j in chosen for j in t.readers):
            total += t.seconds
    return total


def sufficient_factors(
    rows: float, width_in: int, width_out: int, *, replicas: int, rate: float, seconds_per_flop: float
) -> tuple[float, float]:
    """Return seconds to send the factors and multiply them everywhere, and seconds of the sum that this replaces.

    Sending is an all-gather of X and dZ, then (P - 1) rows more of dW = X^T dZ, against a ring sum of dW. rows: per
    replica.
    """
    others = replicas - 1
    gathered = others * rows * (width_in + width_out) * 4 / rate
    computed = others * 2 * rows * width_in * width_out * seconds_per_flop
    reduced = 2 * others / replicas * width_in * width_out * 4 / rate
    return gathered + computed, reduced
