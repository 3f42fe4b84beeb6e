"""The hash of `gnnpar_kernels.hashing` in Triton, on uint32: bit for bit the same."""

import triton
import triton.language as tl

from gnnpar_kernels.hashing import GOLDEN as _GOLDEN
from gnnpar_kernels.hashing import M1 as _M1
from gnnpar_kernels.hashing import M2 as _M2
from gnnpar_kernels.hashing import Key, signed_words

M1: tl.constexpr = tl.constexpr(_M1)
M2: tl.constexpr = tl.constexpr(_M2)
GOLDEN: tl.constexpr = tl.constexpr(_GOLDEN)


@triton.jit
def entry_hash(x):
    """Mix the hash of every entry, on uint32: x is row ^ column."""
    x = x * M1
    return (x ^ (x >> 15)) * M2


@triton.jit
def mix(x):
    return entry_hash(x ^ (x >> 16))


@triton.jit
def word(k):
    """Return a word of a key as uint32. k: int32 with its bits, or their address for a captured launch."""
    if k.dtype.is_ptr():
        k = tl.load(k)
    return k.to(tl.uint32)


@triton.jit
def row_hash(ids, k0, k1):
    """Hash int64 global ids. k0, k1: see `word`."""
    low, high = ids.to(tl.uint32), (ids >> 32).to(tl.uint32)
    row = mix(low ^ word(k0))
    return mix(row ^ (row >> 16) ^ high ^ word(k1))


@triton.jit
def column_hash(columns, k2):
    """Hash column numbers. k2: see `word`."""
    return mix(columns.to(tl.uint32) * GOLDEN + word(k2))


@triton.jit
def keep(rows, columns, limit):
    """Return True where an entry survives dropout. rows, columns: hashes; limit: signed threshold of p."""
    return entry_hash(rows ^ columns).to(tl.int32, bitcast=True) >= limit


def key_arguments(key: Key) -> dict[str, object]:
    """Return a key as the arguments k0, k1, k2 of a kernel."""
    words = signed_words(key) if isinstance(key, int) else (key, key[1:], key[2:])
    return dict(zip(("k0", "k1", "k2"), words, strict=True))
