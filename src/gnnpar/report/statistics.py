"""Estimates with intervals, as the protocol asks (rules 5 and 12): paired by seed and split, ratios inside blocks."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from scipy import stats

Verdict = Literal["not inferior", "inferior", "inconclusive"]


@dataclass(frozen=True)
class Estimate:
    """A value with its two-sided interval; low and high are NaN where one sample allows none."""

    value: float
    low: float
    high: float
    n: int


def mean(values: Sequence[float], *, level: float = 0.95) -> Estimate:
    """Mean with Student's interval. Of differences paired by seed: the paired difference."""
    x = _samples(values)
    half = math.nan
    if len(x) > 1:
        half = float(stats.t.ppf((1 + level) / 2, len(x) - 1) * x.std(ddof=1) / math.sqrt(len(x)))
    centre = float(x.mean())
    return Estimate(centre, centre - half, centre + half, len(x))


def geometric_mean(ratios: Sequence[float], *, level: float = 0.95, draws: int = 10_000, seed: int = 0) -> Estimate:
    """Geometric mean of positive ratios, one a block, with a bootstrap interval over blocks (percentiles)."""
    logs = np.log(_samples(ratios))
    low = high = math.nan
    if len(logs) > 1:
        picks = np.random.default_rng(seed).integers(len(logs), size=(draws, len(logs)))
        low, high = np.exp(np.quantile(logs[picks].mean(1), [(1 - level) / 2, (1 + level) / 2]))
    return Estimate(float(np.exp(logs.mean())), float(low), float(high), len(logs))


def non_inferiority(differences: Sequence[float], margin: float, *, level: float = 0.95) -> Verdict:
    """Of paired differences ours - theirs, higher is better: is ours worse by less than `margin`?

    'not inferior' where the one-sided lower bound lies above -margin, 'inferior' where the upper one lies below it.
    """
    if margin <= 0:
        raise ValueError(f"the margin is {margin:g}; it must be positive, in the unit of the differences")
    x = _samples(differences)
    if len(x) < 2:
        return "inconclusive"
    half = stats.t.ppf(level, len(x) - 1) * x.std(ddof=1) / math.sqrt(len(x))
    if x.mean() - half > -margin:
        return "not inferior"
    return "inferior" if x.mean() + half < -margin else "inconclusive"


def _samples(values: Sequence[float]) -> np.ndarray:
    x = np.asarray(values, dtype=float)
    if x.ndim != 1 or not len(x) or not np.isfinite(x).all():
        raise ValueError(f"an estimate needs at least one number and only finite ones; these are {values}")
    return x
