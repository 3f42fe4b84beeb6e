"""Normalisation between layers: per row, or per column over all rows of the graph."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gnnpar.folds.block import widened
from gnnpar.graph import Graph, Moments

MomentsOf = Callable[[Tensor], Moments | None]
"""Mean and variance of rows [N, F] over all rows of a graph, or of one type: see Graph.moments."""
Norm = nn.LayerNorm | nn.BatchNorm1d
NormKind = Literal["none", "layer", "batch"]


def norm_of(kind: NormKind, width: int) -> Norm | None:
    return {"none": lambda _: None, "layer": nn.LayerNorm, "batch": nn.BatchNorm1d}[kind](width)


def normalized(norm: Norm | None, g: Graph, x: Tensor) -> Tensor:
    """Apply the norm, if any. Shapes: [N, F] -> [N, F]."""
    if norm is None:
        return x
    return batch_norm(norm, g.moments, x) if isinstance(norm, nn.BatchNorm1d) else norm(x).to(x.dtype)


def batch_norm(norm: nn.BatchNorm1d, moments_of: MomentsOf | None, x: Tensor, *, moves: int = 1) -> Tensor:
    """Return the module's output for all rows of the graph, as on one device, and update its running statistics.

    Training normalises by the moments of all rows and updates the running statistics `moves` times per epoch (not in a
    probe of the gradient). Evaluation, or moments_of=None, normalises by the running statistics.
    Shapes: [N, F] -> [N, F].
    """
    if norm.running_mean is None or norm.running_var is None:
        raise ValueError(
            "a BatchNorm1d has no running statistics (track_running_stats=False), by which an evaluation would "
            "normalise; leave them on"
        )
    rows, x = x, widened(x)
    moments = None if moments_of is None else moments_of(x)
    if moments is None:
        out = F.batch_norm(x, norm.running_mean, norm.running_var, norm.weight, norm.bias, eps=norm.eps)
        return out.to(rows.dtype)
    with torch.no_grad():
        for _ in range(0 if moments.probe else moves):
            assert norm.num_batches_tracked is not None
            norm.num_batches_tracked += 1
            share = norm.momentum if norm.momentum is not None else 1 / norm.num_batches_tracked.to(moments.mean.dtype)
            norm.running_mean.lerp_(moments.mean, share)
            norm.running_var.lerp_(moments.variance * (moments.rows / max(1, moments.rows - 1)), share)
    out = (x - moments.mean) * (moments.variance + norm.eps).rsqrt()
    return (out * norm.weight + norm.bias if norm.affine else out).to(rows.dtype)
