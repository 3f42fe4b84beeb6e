"""Dropout keyed by (key, global row id, column): the specification, in int64 arithmetic modulo 2^32."""

from math import prod

import torch
from torch import Tensor

from gnnpar_kernels.hashing import Key, entry_hash, threshold


def keep_mask(ids: Tensor, width: int, *, p: float, key: Key) -> Tensor:
    """Return True where entry (ids[n], f) survives; depends only on (key, id, f, p). Shapes: ids [n] -> [n, width]."""
    hashed = entry_hash(ids, width, key=key)
    signed = torch.where(hashed >= 2**31, hashed - 2**32, hashed)
    return signed >= threshold(p)


def dropout(x: Tensor, ids: Tensor, *, p: float, key: Key) -> Tensor:
    """Return x * keep / (1 - p). It is linear in x, so the gradient is the same call on the gradient.

    Shapes: x [n, ...] (columns counted over the flattened rest), ids [n] int64 global row ids -> [n, ...].
    """
    keep = keep_mask(ids, prod(x.shape[1:]), p=p, key=key).reshape(x.shape)
    return torch.where(keep, x * (1.0 / (1.0 - p)), torch.zeros((), dtype=x.dtype, device=x.device))


def apply_mask(x: Tensor, keep: Tensor, *, p: float) -> Tensor:
    """Return x * keep / (1 - p): dropout, or its gradient, with a saved mask.

    Shapes: x [n, w], keep [n, w] bool -> [n, w].
    """
    threshold(p)
    return torch.where(keep, x * (1.0 / (1.0 - p)), torch.zeros((), dtype=x.dtype, device=x.device))
