"""Encode and decode rows with unbiased stochastic rounding: the specification, in integers as wide as needed.

For a block of columns with b bits, L = 2^b - 1, all in fp32 and rounded to nearest unless said otherwise:

    zp   = bf16 rounded down of min(x)          step = max(2^-100, bf16 rounded up of (max(x) - zp) / L)
    q    = floor(t + u), t = (x - zp) / step    decoded: q * step + zp, where the product is exact
    u    = (k + 1/2) 2^-13                      k = top 13 bits of entry(row(id) ^ column(f)), see `hashing`

Both metadata are rounded before they are used, and outwards: 0 <= t <= L, and E[decoded] = x to 2^-14 of a step.
t is a fixed-point number: (x - zp) * (2^23 / step), truncated to an integer. Its error is at most 2^-15, half the
distance of u from 0 and 1: values on the grid are exact for every k, and 0 <= q <= L. Encoding adds to no
floating-point product and decoding only to exact ones, so a fused multiply-add changes nothing: every body gives the
same bytes on any machine.

FP8 does the same on the grid of e4m3, with zp = 0 and step from max |x| / 448. BF16 rounds to nearest even.
A block with a NaN, an infinity, or a range beyond 2^119 L decodes to all NaN. A constant row is exact if its value is a
bf16; else it is unbiased with an error below its step, about 2^-7 |x| / L at most.
"""

import torch
from torch import Tensor

from gnnpar_kernels import wire
from gnnpar_kernels.hashing import MASK32, entry_hash
from gnnpar_kernels.wire import BF16, E4M3_MAX, FP8, FP32, MAX_STEP, MIN_STEP, NAN, Codes


def random_bits(ids: Tensor, width: int, *, key: int) -> Tensor:
    """Return k of every entry: 13 bits that depend only on (key, id, column). Shapes: ids [n] -> [n, width] int64."""
    return entry_hash(ids, width, key=key) >> 19


def quantize_rows(
    x: Tensor,
    index: Tensor | None,
    bits: Codes,
    offsets: Tensor | None = None,
    *,
    ids: Tensor,
    key: int,
    block: int = 0,
    out: Tensor | None = None,
) -> Tensor:
    """Return rows x[index] (None: all) as one buffer in the format of `wire`. `block`: columns per step and zero point.

    bits is one code for all rows, or a code per row with offsets = row_offsets(bits, D, block=block); codes of `wire`.
    The noise depends only on (key, ids, column), never on the position of a row. Write to `out` if given.

    Shapes: x [N, D], index [n], bits [n] integer, offsets [n + 1] int64, ids [n] int64 -> [total] uint8.
    """
    buffer = wire.encoded(x, index, bits, offsets, ids=ids, block=block, out=out)
    rows = (x if index is None else x.index_select(0, index)).to(torch.float32)
    num_rows, width = rows.shape
    for code, chosen, place in _classes(bits, offsets, num_rows, width, block, x.device):
        random = random_bits(ids[chosen], width, key=key)
        buffer[place] = _encode(rows[chosen], random, code, block)
    return buffer


def dequantize_rows(
    buffer: Tensor,
    bits: Codes,
    offsets: Tensor | None = None,
    *,
    width: int,
    block: int = 0,
    index: Tensor | None = None,
    out: Tensor | None = None,
    add: bool = False,
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """Return the rows of a buffer as a new tensor of `dtype`, or write them (add: add them) to rows `index` of out;
    `index` is unique. Shapes: buffer [total] uint8, bits [n] integer, offsets [n + 1] int64, index [n], out [N, width]
    -> [n, width] or out."""
    how = {"width": width, "block": block, "index": index, "out": out, "add": add, "dtype": dtype}
    num_rows, out = wire.decoded(buffer, bits, offsets, **how)
    rows = torch.empty((num_rows, width), dtype=torch.float32, device=buffer.device)
    for code, chosen, place in _classes(bits, offsets, num_rows, width, block, buffer.device):
        rows[chosen] = _decode(buffer[place], code, width, block)
    where = torch.arange(num_rows, device=out.device) if index is None else index.to(torch.int64)
    if add:
        rows = out[where].to(torch.promote_types(out.dtype, torch.float32)) + rows
    out[where] = rows.to(out.dtype)
    return out


def _classes(bits: Codes, offsets: Tensor | None, num_rows: int, width: int, block: int, device: torch.device):
    """Yield each code, its rows [m], and the places [m, nbytes] of their bytes."""
    if width == 0:
        return
    if isinstance(bits, int):
        offsets = torch.arange(num_rows, device=device) * wire.row_nbytes(width, bits, block=block)
        bits = torch.full((num_rows,), bits, device=device)
    assert offsets is not None
    for code in bits.unique().tolist():
        chosen = torch.nonzero(bits == code)[:, 0]
        nbytes = wire.row_nbytes(width, code, block=block)
        yield code, chosen, offsets[chosen][:, None] + torch.arange(nbytes, device=device)


def _bits_of(x: Tensor) -> Tensor:
    """Return the bits of fp32 values as int64 in [0, 2^32)."""
    return x.contiguous().view(torch.int32).to(torch.int64) & MASK32


def _number(bits: Tensor) -> Tensor:
    """Return the fp32 values of 32-bit patterns."""
    return torch.where(bits >= 2**31, bits - 2**32, bits).to(torch.int32).view(torch.float32)


def ranges(x: Tensor, code: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return step and zero point of blocks, their metadata word, and if the range is finite (else step 1, zero 0).

    Shapes: [..., block] fp32 -> four of [..., 1]: fp32, fp32, int32, bool.
    """
    low, high = x.amin(-1, keepdim=True), x.amax(-1, keepdim=True)
    if code == FP8:
        low, high = torch.zeros_like(low), torch.maximum(low.abs(), high.abs())
    pattern = (low + 0.0).view(torch.int32)  # -0 becomes 0
    zero = (pattern + ((pattern >> 31) & 0xFFFF)) & -0x10000
    levels = torch.full_like(high, E4M3_MAX if code == FP8 else 2.0**code - 1)  # a scalar may divide by its reciprocal
    exact = ((high - zero.view(torch.float32)) / levels).clamp(min=MIN_STEP)
    step = (exact.view(torch.int32) + 0xFFFF) & -0x10000
    finite = exact <= MAX_STEP
    word = torch.where(finite, zero | (step >> 16), NAN << 16 | NAN)
    return (
        step.masked_fill(~finite, 0x3F800000).view(torch.float32),
        zero.masked_fill(~finite, 0).view(torch.float32),
        word,
        finite,
    )


def _fields(x: Tensor, random: Tensor, code: int) -> tuple[Tensor, Tensor]:
    """Return metadata words and fields of one block, for a code with metadata. Shapes: [m, w] -> [m, 1], [m, w] int."""
    step, zero, word, finite = ranges(x, code)
    x = torch.where(finite, x, 0.0)
    if code == FP8:
        return word, _to_e4m3(x * (1.0 / step), random)
    fixed = ((x - zero) * (2.0**23 / step)).to(torch.int64)
    return word, (fixed + (random << 10 | 1 << 9)) >> 23


def _to_e4m3(x: Tensor, random: Tensor) -> Tensor:
    """Round stochastically to e4m3: on the bits above 2^-6, in fixed point below."""
    sign, size = _bits_of(x) >> 31, x.abs()
    noise = random << 7 | 1 << 6
    normal = ((_bits_of(size) + noise) >> 20) - (120 << 3)
    small = ((size.clamp(max=2.0**-6) * 2.0**29).to(torch.int64) + noise) >> 20
    return sign << 7 | torch.where(size < 2.0**-6, small, normal)


def from_e4m3(field: Tensor) -> Tensor:
    """Return the values of e4m3 fields other than NaN: mantissa with hidden bit, times a power of two."""
    exponent = (field >> 3) & 15
    mantissa = (field & 7) | (exponent > 0).to(torch.int64) << 3
    size = mantissa.to(torch.float32) * _number((exponent.clamp(min=1) + 117) << 23)
    return torch.where(field >= 128, -size, size)


def _to_bf16(x: Tensor) -> Tensor:
    """Round to bf16, to nearest even, any NaN to NAN."""
    pattern = _bits_of(x)
    return torch.where(x.isnan(), NAN, (pattern + 0x7FFF + ((pattern >> 16) & 1)) >> 16)


def _encode(x: Tensor, random: Tensor, code: int, block: int) -> Tensor:
    """Encode rows with one code. Shapes: x [m, D] fp32, random [m, D] -> [m, row_nbytes] uint8."""
    if code == FP32:
        return _pack(_bits_of(x), 32)
    if code == BF16:
        return _pack(_to_bf16(x), 16)
    width = block or x.shape[1]
    parts = [_fields(*pair, code) for pair in zip(x.split(width, 1), random.split(width, 1), strict=True)]
    metadata, fields = (torch.cat(column, 1) for column in zip(*parts, strict=True))
    return torch.cat([_pack(metadata, 32), _pack(fields, wire.field_bits(code))], 1)


def _decode(data: Tensor, code: int, width: int, block: int) -> Tensor:
    """Decode rows of one code. Shapes: [m, row_nbytes] uint8 -> [m, width] fp32."""
    if code == FP32:
        return _number(_unpack(data, 32, width))
    if code == BF16:
        return _number(_unpack(data, 16, width) << 16)
    size = wire.metadata_nbytes(width, code, block=block)
    metadata, fields = _unpack(data, 32, size // 4), _unpack(data[:, size:], wire.field_bits(code), width)
    steps, zeros = _number((metadata & 0xFFFF) << 16), _number(metadata >> 16 << 16)
    spread = torch.arange(width, device=data.device) // (block or width)
    levels = from_e4m3(fields) if code == FP8 else fields.to(torch.float32)
    return levels * steps[:, spread] + zeros[:, spread]


def _pack(fields: Tensor, b: int) -> Tensor:
    """Pack fields of b bits into whole words. Shapes: [m, w] int64 -> [m, 4 * ceil(w * b / 32)] uint8."""
    shifts = torch.arange(b, device=fields.device)
    stream = ((fields[:, :, None] >> shifts) & 1).flatten(1)
    stream = torch.nn.functional.pad(stream, (0, -stream.shape[1] % 32))
    return (stream.unflatten(1, (-1, 8)) << torch.arange(8, device=fields.device)).sum(2).to(torch.uint8)


def _unpack(data: Tensor, b: int, width: int) -> Tensor:
    """Return the first `width` fields of b bits. Shapes: [m, nbytes] uint8 -> [m, width] int64."""
    stream = ((data[:, :, None].to(torch.int64) >> torch.arange(8, device=data.device)) & 1).flatten(1)
    fields = stream[:, : width * b].unflatten(1, (width, b))
    return (fields << torch.arange(b, device=data.device)).sum(2)
