"""The hash of `hashing` for the CPU bodies, in int32 arithmetic: bit for bit the same.

int32 wraps modulo 2^32 and its right shift is arithmetic, hence a mask after each shift.
"""

import torch
from torch import Tensor

from gnnpar_kernels.hashing import GOLDEN, M1, M2, MASK32, Key, signed, signed_words, threshold


def word(value: int) -> Tensor:
    """Return an int32 constant. A tensor operand costs 1 us per call, a Python number 2 us for its conversion."""
    return torch.tensor(signed(value), dtype=torch.int32)


_M1, _M2, _15, _17_BITS = word(M1), word(M2), word(15), word(MASK32 >> 15)


def entry_hash(rows: Tensor, columns: Tensor, *, out: Tensor, scratch: Tensor) -> Tensor:
    """Return entry(rows ^ columns) of `hashing`. Shapes: int32, broadcasting to the shape of out and scratch."""
    torch.bitwise_xor(rows, columns, out=out).mul_(_M1)
    torch.bitwise_right_shift(out, _15, out=scratch).bitwise_and_(_17_BITS)
    return out.bitwise_xor_(scratch).mul_(_M2)


def _shifted(x: Tensor) -> Tensor:
    """x ^ x >> 16."""
    return (x >> 16).bitwise_and_(MASK32 >> 16).bitwise_xor_(x)


def _mix(x: Tensor) -> Tensor:
    return entry_hash(_shifted(x), torch.zeros_like(x), out=torch.empty_like(x), scratch=torch.empty_like(x))


def row_hash(ids: Tensor, *, key: Key) -> Tensor:
    """Return the row's part of the hash. Shapes: ids [n] int64 -> [n] int32."""
    k0, k1, _ = signed_words(key)
    row = _shifted(_mix(ids.to(torch.int32).bitwise_xor_(k0)))
    return _mix(row.bitwise_xor_((ids >> 32).to(torch.int32)).bitwise_xor_(k1))


def column_hash(width: int, *, key: Key) -> Tensor:
    """Return the column's part of the hash. Shapes: -> [width] int32."""
    _, _, k2 = signed_words(key)
    return _mix(((torch.arange(width) * GOLDEN + k2) & MASK32).to(torch.int32))


def keep_bits(rows: Tensor, columns: Tensor, *, p: float, out: Tensor, scratch: Tensor) -> Tensor:
    """Write -1 (all bits set) to `out` where the entry is kept, else 0.

    Shapes: rows and columns int32, broadcasting to the shape of out and scratch.
    """
    return entry_hash(rows, columns, out=out, scratch=scratch).ge_(threshold(p)).neg_()
