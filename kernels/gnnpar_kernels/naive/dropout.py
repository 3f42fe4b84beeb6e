"""Dropout keyed by (key, global row id, column): the specification, in int64 arithmetic modulo 2^32."""

from math import prod

import torch
from torch import Tensor

from gnnpar_kernels.hashing import GOLDEN, M1, M2, MASK32, key_words, threshold


def _entry(x: Tensor) -> Tensor:
    x = (x * M1) & MASK32
    return ((x ^ (x >> 15)) * M2) & MASK32


def _mix(x: Tensor) -> Tensor:
    return _entry(x ^ (x >> 16))


def entry_hash(ids: Tensor, width: int, *, key: int) -> Tensor:
    """32 random bits of every entry, see `hashing`. Shapes: ids [n] -> [n, width] int64."""
    k0, k1, k2 = key_words(key)
    row = _mix((ids & MASK32) ^ k0)
    row = _mix(row ^ (row >> 16) ^ ((ids >> 32) & MASK32) ^ k1)
    column = _mix((torch.arange(width, device=ids.device) * GOLDEN + k2) & MASK32)
    return _entry(row[:, None] ^ column[None, :])


def keep_mask(ids: Tensor, width: int, *, p: float, key: int) -> Tensor:
    """True where entry (ids[n], f) survives; depends on nothing but (key, id, f, p). Shapes: ids [n] -> [n, width]."""
    hashed = entry_hash(ids, width, key=key)
    signed = torch.where(hashed >= 2**31, hashed - 2**32, hashed)
    return signed >= threshold(p)


def dropout(x: Tensor, ids: Tensor, *, p: float, key: int) -> Tensor:
    """x * keep / (1 - p); linear in x, so the gradient is the same call on the gradient.

    Shapes: x [n, ...] (columns counted over the flattened rest), ids [n] int64 global row ids -> [n, ...].
    """
    keep = keep_mask(ids, prod(x.shape[1:]), p=p, key=key).reshape(x.shape)
    return torch.where(keep, x * (1.0 / (1.0 - p)), torch.zeros((), dtype=x.dtype, device=x.device))


def apply_mask(x: Tensor, keep: Tensor, *, p: float) -> Tensor:
    """x * keep / (1 - p): dropout, and its gradient, with a mask that was kept.

    Shapes: x [n, w], keep [n, w] bool -> [n, w].
    """
    threshold(p)
    return torch.where(keep, x * (1.0 / (1.0 - p)), torch.zeros((), dtype=x.dtype, device=x.device))
