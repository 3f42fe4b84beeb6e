"""How far tensors are from those expected, relative to the largest entry."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

TOLERANCE = 1e-9
"""Largest difference allowed, per tensor, relative to the reference's largest entry."""
ROUNDING = 1e-6
"""A gradient whose largest entry is below this share of the model's largest is compared with that share: what is 0 by
its mathematics, as that of the bias of keys under a softmax, is rounding alone."""


def rounding(gradients: Iterable[Tensor], rows: int) -> float:
    """What the entries of a gradient are at least compared with. One that is 0 because the `rows` that it sums cancel,
    as that of a bias in front of a batch norm, is off by a rounding of each of them."""
    listed = [g for g in gradients if g.numel()]
    largest = max((float(g.abs().max()) for g in listed), default=0.0)
    eps = max((torch.finfo(g.dtype).eps for g in listed if g.dtype == torch.float64), default=0.0)
    return max(ROUNDING, rows * eps / TOLERANCE) * largest


def relative_error(got: Tensor | None, expected: Tensor, *, least: float = 0.0) -> float:
    """Largest difference over the largest entry expected, or over `least`; infinite where something is missing or not a
    number."""
    if got is None or got.shape != expected.shape:
        return float("inf")
    if not expected.numel():
        return 0.0
    scale = expected.abs().max().clamp_min(max(least, torch.finfo(expected.dtype).tiny))
    error = float((got - expected).abs().max() / scale)
    return error if error == error else float("inf")
