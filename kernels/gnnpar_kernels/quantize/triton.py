"""Encode and decode rows in one launch each: gather, range, rounding and packing of all peers and codes in registers.

A program handles several blocks of columns. Rows of up to 1024 columns are read once, wider rows again from cache.
Codes per row cost a packing pass for every field width in a program, so rows sorted by code are fastest.
"""

# pyright: reportCallIssue=false, reportIndexIssue=false, reportAttributeAccessIssue=false, reportArgumentType=false
# pyright: reportGeneralTypeIssues=false, reportOperatorIssue=false, reportPossiblyUnboundVariable=false, reportAssignmentType=false

from typing import Unpack

import torch
import triton
import triton.language as tl
from torch import Tensor

from gnnpar_kernels import wire
from gnnpar_kernels.dispatch import specified
from gnnpar_kernels.quantize import naive
from gnnpar_kernels.triton_hashing import column_hash, entry_hash, key_arguments, row_hash
from gnnpar_kernels.wire import Codes, Decoding, Encoding

MIXED = 0  # value of CODE if codes are read per row
ENTRIES = 512  # of a program, one warp
WIDEST = 1024
FP8: tl.constexpr = tl.constexpr(wire.FP8)
BF16: tl.constexpr = tl.constexpr(wire.BF16)
FP32: tl.constexpr = tl.constexpr(wire.FP32)
E4M3_MAX: tl.constexpr = tl.constexpr(wire.E4M3_MAX)
MIN_STEP: tl.constexpr = tl.constexpr(wire.MIN_STEP)
MAX_STEP: tl.constexpr = tl.constexpr(wire.MAX_STEP)
NAN: tl.constexpr = tl.constexpr(wire.NAN)
LOWEST: tl.constexpr = tl.constexpr(-(2**31))
HIGHEST: tl.constexpr = tl.constexpr(2**31 - 1)


@triton.jit
def _bits(x):
    return x.to(tl.uint32, bitcast=True)


@triton.jit
def _number(bits):
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def _ordered(bits):
    """Map bits of fp32 to int32 of the same order, NaNs outermost, and back."""
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def _lowest(x, mask):
    return tl.min(tl.where(mask, _ordered(x.to(tl.int32, bitcast=True)), HIGHEST), 1)


@triton.jit
def _highest(x, mask):
    return tl.max(tl.where(mask, _ordered(x.to(tl.int32, bitcast=True)), LOWEST), 1)


@triton.jit
def _levels(code):
    """Return the steps of a uniform grid; a positive number for the other codes."""
    return tl.where(code <= 8, (1 << (code & 15)) - 1, 1)


@triton.jit
def _metadata(low, high, code):
    """Return step and zero point of blocks, if the range is finite, and the word to send. Shapes: ordered bits, [R]."""
    low, high = _ordered(low), _ordered(high)
    size = tl.maximum(low & 0x7FFFFFFF, high & 0x7FFFFFFF)
    float8 = code == FP8
    low, high = _bits(tl.where(float8, 0, low)), _bits(tl.where(float8, size, high))
    low = tl.where(low == 0x80000000, 0, low)
    zero = tl.where(low >> 31 == 1, low + 0xFFFF, low) & 0xFFFF0000
    levels = tl.where(float8, E4M3_MAX, _levels(code).to(tl.float32))
    exact = tl.div_rn(_number(high) - _number(zero), levels)
    exact = tl.where(exact < MIN_STEP, MIN_STEP, exact)
    finite = exact <= MAX_STEP
    step = tl.where(finite, (_bits(exact) + 0xFFFF) & 0xFFFF0000, 0x3F800000)
    zero = tl.where(finite, zero, 0)
    return _number(step), _number(zero), finite, tl.where(finite, zero | (step >> 16), NAN << 16 | NAN)


@triton.jit
def _to_grid(x, step, zero, noise):
    """Round stochastically in fixed point, with 23 bits after the point."""
    fixed = ((x - zero[:, None]) * tl.div_rn(8388608.0, step)[:, None]).to(tl.int32)
    return (_bits(fixed) + ((noise >> 9) & 0x7FFC00 | 0x200)) >> 23


@triton.jit
def _to_e4m3(x, step, noise):
    """Round stochastically to e4m3: on the bits above 2^-6, in fixed point below."""
    noise = (noise >> 12) & 0xFFF80 | 0x40
    x = x * tl.div_rn(1.0, step)[:, None]
    size = tl.abs(x)
    normal = ((_bits(size) + noise) >> 20) - 960
    small = (_bits((tl.minimum(size, 0.015625) * 536870912.0).to(tl.int32)) + noise) >> 20
    return ((_bits(x) >> 31) << 7) | tl.where(size < 0.015625, small, normal)


@triton.jit
def _from_e4m3(field):
    exponent = (field >> 3) & 15
    mantissa = (field & 7) | tl.where(exponent > 0, 8, 0).to(tl.uint32)
    size = mantissa.to(tl.float32) * _number((tl.maximum(exponent, 1) + 117) << 23)
    return tl.where(field >= 128, -size, size)


@triton.jit
def _to_bf16(x):
    """Round to nearest even on the bits, any NaN to NAN."""
    bits = _bits(x)
    return tl.where((bits & 0x7FFFFFFF) > 0x7F800000, NAN, (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16)


@triton.jit
def _any(rows):
    return tl.max(rows.to(tl.int32), 0) > 0


@triton.jit
def _fields(x, mask, step, zero, finite, code, noise, CODE: tl.constexpr):
    """Return the fields of a tile as uint32, zero outside the mask."""
    if CODE == FP32:
        return _bits(x)
    elif CODE == BF16:
        return _to_bf16(x)
    else:
        clean = tl.where(mask & finite[:, None], x, zero[:, None])
        if CODE == FP8:
            return _to_e4m3(clean, step, noise)
        field = _to_grid(clean, step, zero, noise)
        if CODE == 0:
            if _any(code == FP8):
                field = tl.where((code == FP8)[:, None], _to_e4m3(clean, step, noise), field)
            if _any(code >= BF16):
                exact = tl.where((code == FP32)[:, None], _bits(x), _to_bf16(x))
                field = tl.where((code >= BF16)[:, None], exact, field)
        return field


@triton.jit
def _store(fields, words, start, left, rows, B: tl.constexpr):
    """Pack fields of B bits of `left` columns into words from `start` on. Shapes: [R, BW], [R] each."""
    R: tl.constexpr = fields.shape[0]
    PER_WORD: tl.constexpr = 32 // B
    COUNT: tl.constexpr = fields.shape[1] // PER_WORD
    if B == 32:
        packed = fields
    else:
        shifts = (tl.arange(0, PER_WORD) * B).to(tl.uint32)
        packed = tl.sum(tl.reshape(fields, [R, COUNT, PER_WORD]) << shifts[None, None, :], 2)
    word = tl.arange(0, COUNT)
    mask = rows[:, None] & (word * PER_WORD < left[:, None])
    tl.store(words + start[:, None] + word[None, :], packed.to(tl.int32, bitcast=True), mask=mask)


@triton.jit
def _place(
    bits,
    offsets,
    num_units,
    W: tl.constexpr,
    CODE: tl.constexpr,
    BLOCKS: tl.constexpr,
    UNIT: tl.constexpr,
    PITCH: tl.constexpr,
    R: tl.constexpr,
):
    """Return the blocks of this program: row of the message, code, first column, metadata and payload in words."""
    unit = tl.program_id(0) * R + tl.arange(0, R)
    inside = unit < num_units
    slot = unit // BLOCKS
    part = unit - slot * BLOCKS
    first = part * UNIT
    if CODE == 0:
        code = tl.load(bits + slot, mask=inside, other=8).to(tl.int32)
        base = tl.load(offsets + slot, mask=inside, other=0) >> 2
        b = tl.where(code == FP8, 8, code)
        payload = base + tl.where(code < BF16, BLOCKS, 0) + (first * b >> 5)
    else:
        code = tl.full([R], CODE, tl.int32)
        base = slot.to(tl.int64) * PITCH
        B: tl.constexpr = 8 if CODE == FP8 else CODE
        payload = base + (BLOCKS if CODE < BF16 else 0) + (first * B >> 5)
    return slot, inside, code, first, base + part, payload


@triton.jit(do_not_specialize=["num_units", "k0", "k1", "k2"])
def _quantize_kernel(
    x,
    index,
    ids,
    bits,
    offsets,
    words,
    num_units,
    k0,
    k1,
    k2,
    W: tl.constexpr,
    CODE: tl.constexpr,
    BLOCKS: tl.constexpr,
    UNIT: tl.constexpr,
    PITCH: tl.constexpr,
    R: tl.constexpr,
    BW: tl.constexpr,
):
    slot, inside, code, first, metadata, payload = _place(bits, offsets, num_units, W, CODE, BLOCKS, UNIT, PITCH, R)
    if index is None:
        row = slot.to(tl.int64)
    else:
        row = tl.load(index + slot, mask=inside, other=0).to(tl.int64)
    row_key = row_hash(tl.load(ids + slot, mask=inside, other=0), k0, k1)
    end = tl.minimum(first + UNIT, W)
    columns = first[:, None] + tl.arange(0, BW)[None, :]
    mask = inside[:, None] & (columns < end[:, None])
    source = x + row[:, None] * W
    values = tl.load(source + columns, mask=mask, other=0.0).to(tl.float32)
    if CODE < BF16:
        low, high = _lowest(values, mask), _highest(values, mask)
        for begin in range(BW, UNIT, BW):
            here = inside[:, None] & (columns + begin < end[:, None])
            more = tl.load(source + columns + begin, mask=here, other=0.0).to(tl.float32)
            low, high = tl.minimum(low, _lowest(more, here)), tl.maximum(high, _highest(more, here))
        step, zero, finite, word = _metadata(low, high, code)
        tl.store(words + metadata, word.to(tl.int32, bitcast=True), mask=inside & (code < BF16))
    else:
        step, zero, finite = 1.0, 0.0, True
    for begin in range(0, UNIT, BW):
        here = inside[:, None] & (columns + begin < end[:, None])
        if UNIT > BW:
            values = tl.load(source + columns + begin, mask=here, other=0.0).to(tl.float32)
        noise = entry_hash(row_key[:, None] ^ column_hash(columns + begin, k2))
        fields = _fields(values, here, step, zero, finite, code, noise, CODE)
        left = end - first - begin
        if CODE == 0:
            for LOG in tl.static_range(6):
                rows = inside & (tl.where(code == FP8, 8, code) == 1 << LOG)
                if _any(rows):
                    _store(fields, words, payload + (begin >> (5 - LOG)), left, rows, 1 << LOG)
        else:
            B: tl.constexpr = 8 if CODE == FP8 else CODE
            _store(fields, words, payload + (begin * B >> 5), left, inside, B)


@triton.jit
def _load_fields(words, payload, code, columns, mask, CODE: tl.constexpr):
    """Load the fields of a tile; columns count from the start of its blocks."""
    if CODE == 0:
        b = tl.where(code == FP8, 8, code)[:, None]
        place = columns * b
        field = tl.load(words + payload[:, None] + (place >> 5), mask=mask, other=0).to(tl.uint32, bitcast=True)
        above = 32 - b
        return (field << (above - (place & 31)).to(tl.uint32)) >> above.to(tl.uint32)
    else:
        B: tl.constexpr = 8 if CODE == FP8 else CODE
        if B == 32:
            return tl.load(words + payload[:, None] + columns, mask=mask, other=0).to(tl.uint32, bitcast=True)
        elif B == 16:
            halves = words.to(tl.pointer_type(tl.uint16)) + payload[:, None] * 2
            return tl.load(halves + columns, mask=mask, other=0).to(tl.uint32)
        else:
            cells = words.to(tl.pointer_type(tl.uint8)) + payload[:, None] * 4
            if B == 8:
                return tl.load(cells + columns, mask=mask, other=0).to(tl.uint32)
            place = columns * B
            field = tl.load(cells + (place >> 3), mask=mask, other=0).to(tl.uint32) >> (place & 7).to(tl.uint32)
            return field & ((1 << B) - 1)


@triton.jit
def _decode(field, word, code, CODE: tl.constexpr):
    """Decode a tile. Shapes: field [R, BW], metadata word [R]."""
    if CODE == FP32:
        return _number(field)
    elif CODE == BF16:
        return _number(field << 16)
    else:
        step, zero = _number(word << 16)[:, None], _number(word & 0xFFFF0000)[:, None]
        if CODE == FP8:
            return _from_e4m3(field) * step + zero
        elif CODE != 0:
            return field.to(tl.float32) * step + zero
        else:
            level = tl.where((code == FP8)[:, None], _from_e4m3(field & 255), (field & 255).to(tl.float32))
            exact = _number(field << tl.where(code == BF16, 16, 0).to(tl.uint32)[:, None])
            return tl.where((code >= BF16)[:, None], exact, level * step + zero)


@triton.jit(do_not_specialize=["num_units"])
def _dequantize_kernel(
    words,
    index,
    bits,
    offsets,
    out,
    num_units,
    W: tl.constexpr,
    CODE: tl.constexpr,
    BLOCKS: tl.constexpr,
    UNIT: tl.constexpr,
    PITCH: tl.constexpr,
    R: tl.constexpr,
    BW: tl.constexpr,
    ADD: tl.constexpr,
):
    slot, inside, code, first, metadata, payload = _place(bits, offsets, num_units, W, CODE, BLOCKS, UNIT, PITCH, R)
    if index is None:
        row = slot.to(tl.int64)
    else:
        row = tl.load(index + slot, mask=inside, other=0).to(tl.int64)
    word = tl.load(words + metadata, mask=inside & (code < BF16), other=0).to(tl.uint32, bitcast=True)
    target = out + (row * W + first)[:, None]
    for begin in range(0, UNIT, BW):
        columns = begin + tl.arange(0, BW)[None, :]
        mask = inside[:, None] & (columns < UNIT) & (first[:, None] + columns < W)
        field = _load_fields(words, payload, code, columns, mask, CODE)
        values = _decode(field, word, code, CODE)
        if ADD:
            before = tl.load(target + columns, mask=mask)
            if before.dtype == tl.float64:
                values = before + values.to(tl.float64)
            else:
                values = before.to(tl.float32) + values
        tl.store(target + columns, values.to(out.dtype.element_ty), mask=mask)


def _tile(width: int, bits: Codes, block: int) -> dict[str, int]:
    """Return the constants of both kernels."""
    code = bits if isinstance(bits, int) else MIXED
    unit = min(block or width, width)
    columns = min(WIDEST, max(32, triton.next_power_of_2(unit)))
    row = {"BLOCKS": wire.num_blocks(width, block), "UNIT": unit, "R": max(1, ENTRIES // columns), "BW": columns}
    return {"W": width, "CODE": code, "PITCH": wire.row_nbytes(width, code, block=block) // 4 if code else 0, **row}


def _pointers(index: Tensor | None, bits: Codes, offsets: Tensor | None) -> dict[str, Tensor | None]:
    codes = (None, None) if isinstance(bits, int) else (bits, offsets)
    given = zip(("index", "bits", "offsets"), (index, *codes), strict=True)
    return {name: None if t is None else t.contiguous() for name, t in given}


@specified(naive.quantize_rows)
def quantize_rows(
    x: Tensor, index: Tensor | None, bits: Codes, offsets: Tensor | None = None, *, key: int, **how: Unpack[Encoding]
) -> Tensor:
    out, ids = wire.encoded(x, index, bits, offsets, **how), how["ids"]
    if ids.shape[0] > 0 and x.shape[1] > 0:
        tile = _tile(x.shape[1], bits, how["block"])
        units = ids.shape[0] * tile["BLOCKS"]
        given = {**_pointers(index, bits, offsets), **key_arguments(key), **tile, "num_units": units}
        _quantize_kernel[(triton.cdiv(units, tile["R"]),)](
            x=x.contiguous(), ids=ids.contiguous(), words=out.view(torch.int32), **given, num_warps=1
        )
    return out


@specified(naive.dequantize_rows)
def dequantize_rows(buffer: Tensor, bits: Codes, offsets: Tensor | None = None, **how: Unpack[Decoding]) -> Tensor:
    num_rows, result = wire.decoded(buffer, bits, offsets, **how)
    rows = result.contiguous()
    if num_rows > 0 and how["width"] > 0:
        tile = _tile(how["width"], bits, how["block"])
        units = num_rows * tile["BLOCKS"]
        given = {**_pointers(how["index"], bits, offsets), **tile, "ADD": how["add"], "num_units": units}
        _dequantize_kernel[(triton.cdiv(units, tile["R"]),)](
            words=buffer.view(torch.int32), out=rows, **given, num_warps=1
        )
    return result if rows is result else result.copy_(rows)
