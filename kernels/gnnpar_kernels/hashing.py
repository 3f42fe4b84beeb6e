"""The keyed hash behind every random number: keys, constants, and its specification in int64 arithmetic.

keep(key, id, f) = signed32(entry(row(id) ^ column(f))) >= threshold(p), all arithmetic modulo 2^32:
    mix(x)    = entry(x ^ x >> 16)                          the two-multiply mix, compared by its high bits
    entry(x)  = (x * M1, ^ >> 15) * M2                      the rest of it, once per entry
    row(id)   = mix(mix(low(id) ^ k0), ^ >> 16, ^ high(id) ^ k1)
    column(f) = mix(f * GOLDEN + k2)                        (k0, k1, k2) = key_words(key)
Shifts are logical. x ^ x >> 16 is its own inverse and linear over ^: when full hashes (mix, then ^ >> 16) of row and
column are mixed together, two such shifts cancel, so both are omitted. The constants of the mix are the "lowbias32"
pair of C. Wellons' hash prospector (public domain).
"""

import torch
from torch import Tensor

Key = int | Tensor
"""64 bits, or their three words (`key_tensor`) on the device of the draw: a captured CUDA graph reads the words at each
replay."""

M1 = 0x7FEB352D
M2 = 0x846CA68B
GOLDEN = 0x9E3779B9
MASK32 = 0xFFFFFFFF
MASK64 = 0xFFFFFFFFFFFFFFFF


def _splitmix64(state: int) -> int:
    """Return one output of splitmix64, a bijection of 64-bit integers with every output bit a mix of all input bits."""
    z = (state + 0x9E3779B97F4A7C15) & MASK64
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & MASK64
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & MASK64
    return z ^ (z >> 31)


def fold_key(*ints: int) -> int:
    """Hash (seed, epoch, layer, call, ...) into one 64-bit key; order and count matter, any Python int is valid."""
    key = _splitmix64(len(ints))
    for value in ints:
        key = _splitmix64(key ^ (value & MASK64))
        rest = value >> 64
        while rest not in (0, -1):
            key = _splitmix64(~key ^ (rest & MASK64))
            rest >>= 64
    return key


def key_words(key: int) -> tuple[int, int, int]:
    """Return three 32-bit words, each a hash of all 64 bits of a key; words of neighbouring keys are unrelated."""
    first = _splitmix64(key & MASK64)
    second = _splitmix64(first)
    return first & MASK32, first >> 32, second & MASK32


def key_tensor(*keys: int) -> Tensor:
    """Return the words of keys. Shapes: -> [len(keys), 3] int32; a row of it is a Key."""
    return torch.tensor([[signed(word) for word in key_words(key)] for key in keys], dtype=torch.int32).reshape(-1, 3)


def signed_words(key: Key) -> tuple[int | Tensor, int | Tensor, int | Tensor]:
    """Return the words of a key as int32: numbers, or tensors without a dimension."""
    k0, k1, k2 = key.unbind() if isinstance(key, Tensor) else map(signed, key_words(key))
    return k0, k1, k2


def threshold(p: float) -> int:
    """Return the smallest signed 32-bit hash that is kept: a share 1 - p of all 2^32 values is at least this."""
    if not 0.0 <= p < 1.0:
        raise ValueError(f"dropout probability {p} is outside [0, 1): give the share of entries to drop, 0 for none")
    return min(round(p * 2**32), MASK32) - 2**31


def signed(word: int) -> int:
    """Return the int32 with the bits of a 32-bit word: torch has no arithmetic on uint32, int32 wraps the same way."""
    return word - 2**32 if word >= 2**31 else word


def _entry(x: Tensor) -> Tensor:
    x = (x * M1) & MASK32
    return ((x ^ (x >> 15)) * M2) & MASK32


def _mix(x: Tensor) -> Tensor:
    return _entry(x ^ (x >> 16))


def entry_hash(ids: Tensor, width: int, *, key: Key) -> Tensor:
    """Return 32 random bits per entry, as defined above. Shapes: ids [n] -> [n, width] int64."""
    k0, k1, k2 = (word & MASK32 for word in signed_words(key if isinstance(key, int) else key.long()))
    row = _mix((ids & MASK32) ^ k0)
    row = _mix(row ^ (row >> 16) ^ ((ids >> 32) & MASK32) ^ k1)
    column = _mix((torch.arange(width, device=ids.device) * GOLDEN + k2) & MASK32)
    return _entry(row[:, None] ^ column[None, :])
