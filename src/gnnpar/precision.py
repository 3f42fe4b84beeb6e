"""The setting `precision`: the types of rows and of parameters, and how layers combine them (ADR 46)."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import NamedTuple

import torch
from torch import Tensor

from gnnpar_kernels.csr import accumulate_dtype


class Types(NamedTuple):
    """rows: type of features, of layers' outputs and stored rows, and of messages between ranks. parameters: type of
    weights, their gradients, the optimizer's state, sums over in-edges, statistics and the loss."""

    rows: torch.dtype
    parameters: torch.dtype


TYPES: dict[str, Types] = {
    "fp32": Types(torch.float32, torch.float32),
    "fp64": Types(torch.float64, torch.float64),
    "bf16": Types(torch.bfloat16, torch.float32),
}


def is_narrow(dtype: torch.dtype) -> bool:
    """Return True if sums of such numbers are kept in a wider type."""
    return accumulate_dtype(dtype) != dtype


def mixed(x: Tensor) -> AbstractContextManager[object]:
    """Context manager: for narrow x, matrix products read narrow operands and add up in fp32 (torch.autocast). Casts of
    parameters are not cached: they would outlive an optimizer's step, or lack a gradient after no_grad."""
    if not is_narrow(x.dtype):
        return nullcontext()
    return torch.autocast(x.device.type, x.dtype, cache_enabled=False)


def unmixed(device: torch.device) -> AbstractContextManager[object]:
    """Context manager: compute in the types of the operands, also inside `mixed`."""
    if not (torch.amp.is_autocast_available(device.type) and torch.is_autocast_enabled(device.type)):
        return nullcontext()
    return torch.autocast(device.type, enabled=False)
