"""Traces: a row's variance under stochastic rounding at every width of a menu.

With step S_b and p_i the fraction of (x_i - zero) / S_b, the variance of the decoded row is exactly S_b^2 sum p(1 - p).
AdaQP traces D/6 (max - min)^2 / (2^b - 1)^2 instead, which assumes uniform p. Rows with many exact zeros, as after a
ReLU, have about half of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

from gnnpar_kernels.quantize.naive import ranges

Trace = Literal["exact", "range"]
_CHUNK = 1 << 18  # entries at a time: they stay in cache


def row_variances(x: Tensor, menu: Sequence[int], *, trace: Trace) -> Tensor:
    """Return the variance of each row's quantization error, summed over entries. x [n, D] -> [n, len(menu)] fp32."""
    if not x.numel():
        return torch.zeros(len(x), len(menu), device=x.device)
    of = _exact if trace == "exact" else _range
    return torch.cat([of(part.float(), menu) for part in torch.split(x, max(1, _CHUNK // x.shape[1]))])


def _exact(x: Tensor, menu: Sequence[int]) -> Tensor:
    columns: list[Tensor] = []
    for bits in menu:
        step, zero, _, _ = ranges(x, bits)
        share = (x - zero).div_(step)
        share = share.sub_(share.floor())
        columns.append(share.addcmul_(share, share, value=-1).sum(1, keepdim=True) * step.square())
    return torch.cat(columns, 1)


def _range(x: Tensor, menu: Sequence[int]) -> Tensor:
    spread = x.amax(1, keepdim=True) - x.amin(1, keepdim=True)
    levels = torch.tensor([2.0**bits - 1 for bits in menu], device=x.device)
    return x.shape[1] / 6 * (spread / levels).square()
