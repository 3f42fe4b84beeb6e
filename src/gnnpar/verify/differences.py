"""Differences of tensors from expected ones, relative to the largest entry."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

TOLERANCE = 1e-9
"""Largest difference allowed, per tensor, relative to the reference's largest entry."""
ROUNDING = 1e-6
"""Smallest scale of a gradient, relative to the model's largest entry: gradients that are 0 mathematically, such as of
the bias of keys under a softmax, contain only rounding."""


def rounding(gradients: Iterable[Tensor], rows: int) -> float:
    """Return a lower bound for the scale of a gradient. A gradient that is 0 because the `rows` in its sum cancel, such
    as of a bias before a batch norm, has one rounding error per row."""
    listed = [g for g in gradients if g.numel()]
    largest = max((float(g.abs().max()) for g in listed), default=0.0)
    eps = max((torch.finfo(g.dtype).eps for g in listed if g.dtype == torch.float64), default=0.0)
    return max(ROUNDING, rows * eps / TOLERANCE) * largest


def relative_error(got: Tensor | None, expected: Tensor, *, least: float = 0.0) -> float:
    """Return the largest difference over the largest expected entry, or over `least`; infinite for missing or
    non-finite entries."""
    if got is None or got.shape != expected.shape:
        return float("inf")
    if not expected.numel():
        return 0.0
    scale = expected.abs().max().clamp_min(max(least, torch.finfo(expected.dtype).tiny))
    error = float((got - expected).abs().max() / scale)
    return error if error == error else float("inf")
