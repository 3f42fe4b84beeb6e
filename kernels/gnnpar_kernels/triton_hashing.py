"""The hash of `gnnpar_kernels.hashing` in Triton, on uint32: bit for bit the same."""

import triton
import triton.language as tl

from gnnpar_kernels.hashing import GOLDEN as _GOLDEN
from gnnpar_kernels.hashing import M1 as _M1
from gnnpar_kernels.hashing import M2 as _M2

M1: tl.constexpr = tl.constexpr(_M1)
M2: tl.constexpr = tl.constexpr(_M2)
GOLDEN: tl.constexpr = tl.constexpr(_GOLDEN)


@triton.jit
def entry_hash(x):
    """What the mix does for every entry, on uint32: x is row ^ column."""
    x = x * M1
    return (x ^ (x >> 15)) * M2


@triton.jit
def mix(x):
    return entry_hash(x ^ (x >> 16))


@triton.jit
def row_hash(ids, k0, k1):
    """Hash of int64 global ids; k0, k1 are the words of the key as uint32 (or int32 with the same bits)."""
    low, high = ids.to(tl.uint32), (ids >> 32).to(tl.uint32)
    row = mix(low ^ k0.to(tl.uint32))
    return mix(row ^ (row >> 16) ^ high ^ k1.to(tl.uint32))


@triton.jit
def column_hash(columns, k2):
    """Hash of column numbers."""
    return mix(columns.to(tl.uint32) * GOLDEN + k2.to(tl.uint32))


@triton.jit
def keep(rows, columns, limit):
    """Whether an entry survives dropout: rows and columns are hashes, limit the signed threshold of p."""
    return entry_hash(rows ^ columns).to(tl.int32, bitcast=True) >= limit
