"""How far tensors are from those expected, relative to the largest entry."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

ROUNDING = 1e-6
"""A gradient whose largest entry is below this share of the model's largest is compared with that share: what is 0 by
its mathematics, as that of the bias of keys under a softmax, is rounding alone."""


def rounding(gradients: Iterable[Tensor]) -> float:
    """What the entries of a gradient are at least compared with."""
    return ROUNDING * max((float(g.abs().max()) for g in gradients if g.numel()), default=0.0)


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
