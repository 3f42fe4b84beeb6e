"""Encode and decode rows in int32 arithmetic, rows of one code at a time in blocks that fit the cache."""

from collections.abc import Iterator
from typing import NamedTuple, Unpack

import torch
from torch import Tensor

from gnnpar_kernels import wire
from gnnpar_kernels.cpu_hashing import column_hash, entry_hash, row_hash, word
from gnnpar_kernels.dispatch import specified
from gnnpar_kernels.quantize import naive
from gnnpar_kernels.quantize.naive import from_e4m3, ranges
from gnnpar_kernels.wire import BF16, FP8, FP32, NAN, Codes, Decoding, Encoding

BLOCK = 1 << 18  # entries to gather and compute ranges of at once: on short tensors, calls cost most
NOISE_BLOCK = 1 << 16  # entries that fit the cache together with their noise


NOISE = {bits: tuple(map(word, (32 - bits, (2**13 - 1) << (bits - 13), 1 << (bits - 14)))) for bits in (23, 20)}
POINT = word(23)
LANES = {1: torch.int64, 2: torch.int32, 4: torch.int16}  # integers with one byte per field of a packed byte
FOLD = {1: 0x0102040810204080, 2: 0x01041040, 4: 0x0110}  # factors that pack these fields into the top byte
SPREAD = {  # shifts and masks that unpack the fields
    1: ((28, 0x0000000F0000000F), (14, 0x0003000300030003), (7, 0x0101010101010101)),
    2: ((12, 0x000F000F), (6, 0x03030303)),
    4: ((4, 0x0F0F),),
}


class _Space(NamedTuple):
    """Buffers reused by every block: allocating costs more than the arithmetic.

    Shapes: numbers [rows of BLOCK, blocks * block] fp32, noise and spare [rows of NOISE_BLOCK, D] int32.
    """

    numbers: Tensor
    noise: Tensor
    spare: Tensor

    @staticmethod
    def of(num_rows: int, width: int, block: int) -> "_Space":
        padded = wire.num_blocks(width, block) * block if block else width
        noise = torch.empty((min(num_rows, _rows_of(NOISE_BLOCK, width)), width), dtype=torch.int32)
        return _Space(torch.empty(min(num_rows, _rows_of(BLOCK, width)), padded), noise, torch.empty_like(noise))


@specified(naive.quantize_rows)
def quantize_rows(
    x: Tensor, index: Tensor | None, bits: Codes, offsets: Tensor | None = None, *, key: int, **how: Unpack[Encoding]
) -> Tensor:
    buffer, ids, block = wire.encoded(x, index, bits, offsets, **how), how["ids"], how["block"]
    num_rows, width = ids.shape[0], x.shape[1]
    hashes, columns, space = row_hash(ids, key=key), column_hash(width, key=key), _Space.of(num_rows, width, block)
    for code, part, words, place in _blocks(buffer, bits, offsets, num_rows, width, block):
        rows = hashes[part]
        each = space._replace(numbers=space.numbers[: len(rows)])
        _load(x, part if index is None else index[part], each.numbers)
        inside = words[place] if isinstance(place, slice) else words.new_empty(place.shape)
        _encode(each, rows, columns, code, block, inside)
        if not isinstance(place, slice):
            words[place] = inside
    return buffer


@specified(naive.dequantize_rows)
def dequantize_rows(buffer: Tensor, bits: Codes, offsets: Tensor | None = None, **how: Unpack[Decoding]) -> Tensor:
    num_rows, result = wire.decoded(buffer, bits, offsets, **how)
    width, block, index = how["width"], how["block"], how["index"]
    space = _Space.of(num_rows, width, block)
    for code, part, words, place in _blocks(buffer, bits, offsets, num_rows, width, block):
        inside = words[place]
        rows = _decode(inside, code, width, block, space.numbers[: len(inside)])
        _put(result, part if index is None else index[part], rows, add=how["add"])
    return result


def _load(x: Tensor, chosen: slice | Tensor, numbers: Tensor) -> None:
    """Copy rows to the buffer. Columns that fill the last block repeat the last column, which keeps ranges."""
    width = x.shape[1]
    if isinstance(chosen, Tensor) and x.dtype == torch.float32 and numbers.shape[1] == width:
        torch.index_select(x, 0, chosen, out=numbers)
        return
    numbers[:, :width] = x[chosen] if isinstance(chosen, slice) else x.index_select(0, chosen)
    numbers[:, width:] = numbers[:, width - 1 : width]


def _put(result: Tensor, where: slice | Tensor, rows: Tensor, *, add: bool) -> None:
    """Write or add rows to the result; 16-bit sums are rounded once."""
    if add and isinstance(where, Tensor) and result.dtype in (torch.float32, torch.float64):
        result.index_add_(0, where, rows.to(result.dtype))
    elif add:
        result[where] = (result[where] + rows).to(result.dtype)  # in the wider of both types
    else:
        result[where] = rows.to(result.dtype)


def _rows_of(entries: int, width: int) -> int:
    return max(1, entries // max(1, width))


def _blocks(
    buffer: Tensor, bits: Codes, offsets: Tensor | None, num_rows: int, width: int, block: int
) -> Iterator[tuple[int, slice | Tensor, Tensor, slice | Tensor]]:
    """Yield (code, rows, words, place): the bytes of rows of one code are words[place], int32 [m, row_nbytes / 4]."""
    if num_rows == 0 or width == 0:
        return
    step, words = _rows_of(BLOCK, width), buffer.view(torch.int32)
    if isinstance(bits, int):
        for begin in range(0, num_rows, step):
            part = slice(begin, min(begin + step, num_rows))
            yield bits, part, words.view(num_rows, -1), part
        return
    assert offsets is not None
    for code in bits.unique().tolist():
        row = torch.arange(wire.row_nbytes(width, code, block=block) // 4)
        for part in torch.nonzero(bits == code)[:, 0].split(step):
            yield code, part, words, (offsets[part] >> 2)[:, None] + row


def _encode(space: _Space, rows: Tensor, columns: Tensor, code: int, block: int, words: Tensor) -> None:
    """Encode rows of one code into words; overwrites the space. Shapes: hashes [m], [D], words [m, row_nbytes / 4]."""
    x, width = space.numbers, columns.shape[0]
    words[:, -1] = 0  # bits after the last field
    if code == FP32:
        words.copy_(x.view(torch.int32)[:, :width])
        return
    if code == BF16:
        number = x[:, :width].to(torch.bfloat16)
        words.view(torch.int16)[:, :width] = number.view(torch.int16).masked_fill_(number.isnan(), NAN)
        return
    parts = x.view(len(x), -1, block or width)
    step, zero, word, finite = ranges(parts, code)
    if not bool(finite.all()):
        parts.masked_fill_(~finite, 0.0)
    blocks = word.shape[1]
    words[:, :blocks] = word[..., 0]
    factor = (1.0 if code == FP8 else 2.0**23) / step
    payload = words.view(torch.uint8)[:, 4 * blocks :]
    for begin in range(0, len(x), len(space.noise)):
        some = slice(begin, min(begin + len(space.noise), len(x)))
        noise, spare = space.noise[: some.stop - begin], space.spare[: some.stop - begin]
        entry_hash(rows[some, None], columns, out=noise, scratch=spare)
        scaled = parts[some].sub_(zero[some]).mul_(factor[some]).view(len(noise), -1)[:, :width]
        if code == FP8:
            spare = _to_e4m3(scaled, noise)
        else:
            spare.copy_(scaled).add_(_noise_(noise, 23)).bitwise_right_shift_(POINT)
        _pack(spare, code, payload[some])


def _noise_(mixed: Tensor, bits: int) -> Tensor:
    """Compute (k + 1/2) 2^(bits - 13) in place, with k the top 13 bits."""
    shift, mask, half = NOISE[bits]
    return mixed.bitwise_right_shift_(shift).bitwise_and_(mask).bitwise_or_(half)


def _to_e4m3(x: Tensor, noise: Tensor) -> Tensor:
    """Round scaled values stochastically to e4m3, as `naive._to_e4m3`. Noise is overwritten. Shapes: [m, D]."""
    _noise_(noise, 20)
    size = x.abs()
    field = (size.view(torch.int32) + noise).bitwise_right_shift_(20).sub_(120 << 3)
    small = (size.clamp(max=2.0**-6) * 2.0**29).to(torch.int32).add_(noise).bitwise_right_shift_(20)
    torch.where(size < 2.0**-6, small, field, out=field)
    return field.add_(torch.signbit(x).to(torch.int32), alpha=128)


def _pack(fields: Tensor, code: int, data: Tensor) -> None:
    """Pack fields into the payload; its tail is zero. Shapes: fields [m, D] int32, data [m, nbytes] uint8."""
    width = fields.shape[1]
    if code in (8, FP8):
        data[:, :width] = fields
        return
    per_byte = 8 // code
    nbytes = -(-width // per_byte)
    lanes = torch.zeros((fields.shape[0], nbytes * per_byte), dtype=torch.uint8)
    lanes[:, :width] = fields
    packed = lanes.view(LANES[code]).mul_(FOLD[code]).bitwise_right_shift_(8 * per_byte - 8)
    data[:, :nbytes] = packed


def _decode(words: Tensor, code: int, width: int, block: int, numbers: Tensor) -> Tensor:
    """Decode rows of one code, into `numbers` or as a view of `words`. Shapes: [m, row_nbytes / 4] -> [m, width]."""
    if code == FP32:
        return words.view(torch.float32)
    y, data = numbers[:, :width], words.view(torch.uint8)
    if code == BF16:
        return y.copy_(data.view(torch.bfloat16)[:, :width])
    blocks = wire.num_blocks(width, block)
    metadata = words[:, :blocks, None]
    step, zero = (metadata << 16).view(torch.float32), (metadata & -65536).view(torch.float32)
    _unpack(data[:, 4 * blocks :], code, y)
    numbers.view(len(numbers), blocks, -1).mul_(step).add_(zero)
    return y


def _unpack(data: Tensor, code: int, levels: Tensor) -> None:
    """Write the fields of the payload to `levels`. Shapes: data [m, nbytes] uint8, levels [m, D] fp32."""
    if code == FP8:
        table = from_e4m3(torch.arange(256))
        levels.copy_(table[data[:, : levels.shape[1]].to(torch.int32)])
        return
    if code < 8:
        lanes = data[:, : -(-levels.shape[1] * code // 8)].to(LANES[code])
        for shift, mask in SPREAD[code]:
            lanes = (lanes << shift).bitwise_or_(lanes).bitwise_and_(mask)
        data = lanes.view(torch.uint8)
    levels.copy_(data[:, : levels.shape[1]])
