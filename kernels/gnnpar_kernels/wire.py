"""Wire format of quantized rows, shared by every body of `quantize_rows`: codes, sizes, offsets, argument checks.

A code is the format of a row: 1, 2, 4 or 8 bits on a uniform grid, FP8 (e4m3, scaled), BF16, or unchanged FP32.
A row is its metadata, then its payload, each of whole 4-byte words, all little-endian:

    metadata    one word per block of columns: step in the low 16 bits, zero point in the high 16, both bf16;
                none for BF16 and FP32
    payload     column f in bits f * b to f * b + b - 1, with b = field_bits(code); zero bits up to the word

so row_nbytes = 4 * blocks * [has metadata] + 4 * ceil(width * b / 32), and rows follow each other without gaps.
"""

from typing import TypedDict

import torch
from torch import Tensor

GRID = (1, 2, 4, 8)
FP8, BF16, FP32 = 9, 16, 32
CODES = (*GRID, FP8, BF16, FP32)
E4M3_MAX = 448.0
MIN_STEP = 2.0**-100  # also for smaller ranges: 2^23 / step is finite, and a constant row needs no special case
MAX_STEP = 255 * 2.0**111  # the largest bf16 below 2^119: a block with a larger or NaN step has no finite range
NAN = 0x7FC0  # bf16 bits of the step and the zero point of such a block

Codes = int | Tensor


class Encoding(TypedDict):
    """Keyword arguments of `quantize_rows` beside `key`."""

    ids: Tensor
    block: int
    out: Tensor | None


class Decoding(TypedDict):
    """Keyword arguments of `dequantize_rows`."""

    width: int
    block: int
    index: Tensor | None
    out: Tensor | None
    add: bool
    dtype: torch.dtype


def field_bits(code: int) -> int:
    """Return the bits per column."""
    return 8 if code == FP8 else code


def has_metadata(code: int) -> bool:
    """Return True if rows of this code have a step and a zero point per block."""
    return code in GRID or code == FP8


def num_blocks(width: int, block: int = 0) -> int:
    """Return the number of blocks of columns, each with its own step; block = 0: the row is one block."""
    return -(-width // block) if block else min(width, 1)


def row_nbytes(width: int, code: int, *, block: int = 0) -> int:
    """Return the bytes of a row of `width` columns on the wire, metadata included."""
    return metadata_nbytes(width, code, block=block) + 4 * -(-width * field_bits(code) // 32)


def metadata_nbytes(width: int, code: int, *, block: int = 0) -> int:
    """Return the bytes of metadata of a row."""
    check_format(code, block)
    return 4 * num_blocks(width, block) * has_metadata(code)


def row_offsets(codes: Tensor, width: int, *, block: int = 0) -> Tensor:
    """Return the byte offset of each row, and the total. It reads the codes, so call it once per assignment of codes.

    Shapes: codes [n] of any integer type -> [n + 1] int64.
    """
    sizes = torch.zeros(codes.shape[0], dtype=torch.int64, device=codes.device)
    known = torch.zeros_like(sizes, dtype=torch.bool)
    for code in CODES:
        chosen = codes == code
        sizes.masked_fill_(chosen, row_nbytes(width, code, block=block))
        known |= chosen
    if not bool(known.all()):
        raise ValueError(f"codes hold {int(codes[~known][0])}, which is none of {CODES}")
    return torch.cat([sizes.new_zeros(1), sizes.cumsum(0)])


def check_format(code: int, block: int) -> None:
    """Raise ValueError unless code and block are valid."""
    if code not in CODES:
        raise ValueError(f"code {code} is none of {CODES}: give bits of a uniform grid, {FP8} for fp8, 16 or 32")
    if block and (block < 32 or block & (block - 1)):
        raise ValueError(
            f"block {block} is no power of two from 32 on: give 32, 64, 128, ... columns, or 0 for the row"
        )


def buffer_nbytes(num_rows: int, width: int, bits: Codes, offsets: Tensor | None, block: int) -> int:
    """Return the bytes of all rows. With codes per row it reads the last offset, which synchronizes with a GPU."""
    if isinstance(bits, int):
        return num_rows * row_nbytes(width, bits, block=block)
    assert offsets is not None
    return int(offsets[-1])


def check_codes(bits: Codes, offsets: Tensor | None, num_rows: int | None, block: int) -> None:
    """Raise ValueError unless codes and offsets match, for `num_rows` rows (None: any number)."""
    if isinstance(bits, int):
        check_format(bits, block)
        if offsets is not None:
            raise ValueError("offsets given with one code for all rows: leave them out, they follow from the code")
        return
    check_format(FP32, block)
    if bits.ndim != 1 or bits.dtype.is_floating_point or num_rows not in (None, bits.shape[0]):
        raise ValueError(f"bits {bits.dtype} {list(bits.shape)} are not one integer code for each of {num_rows} rows")
    if offsets is None:
        raise ValueError("codes per row need offsets: give row_offsets(bits, width, block=block)")
    if offsets.dtype != torch.int64 or offsets.shape != (bits.shape[0] + 1,):
        raise ValueError(f"offsets {offsets.dtype} {list(offsets.shape)} are not int64 [{bits.shape[0] + 1}]")


def check_buffer(buffer: Tensor, nbytes: int | None) -> None:
    """Raise ValueError unless this is a flat byte buffer, aligned to words, of `nbytes` bytes (None: any)."""
    if buffer.dtype != torch.uint8 or buffer.ndim != 1 or not buffer.is_contiguous():
        raise ValueError(f"a buffer is flat, contiguous uint8, not {buffer.dtype} {list(buffer.shape)}")
    aligned = torch.compiler.is_compiling() or buffer.data_ptr() % 4 == 0  # a traced tensor has no address yet
    if not aligned or buffer.shape[0] % 4:
        raise ValueError("a buffer starts and ends at a multiple of 4 bytes: rows are made of 4-byte words")
    if nbytes is not None and buffer.shape[0] != nbytes:
        raise ValueError(f"buffer of {buffer.shape[0]} bytes, but these rows take {nbytes}")


def encoded(
    x: Tensor,
    index: Tensor | None,
    bits: Codes,
    offsets: Tensor | None,
    *,
    ids: Tensor,
    block: int,
    out: Tensor | None,
) -> Tensor:
    """Return the buffer to write, `out` or a new one. ValueError unless the arguments of `quantize_rows` match."""
    if x.ndim != 2 or not x.dtype.is_floating_point:
        raise ValueError(f"x {x.dtype} {list(x.shape)} is not [N, D] of floating-point numbers: flatten its rows")
    num_rows = x.shape[0] if index is None else index.shape[0]
    if ids.dtype != torch.int64 or ids.shape != (num_rows,):
        raise ValueError(f"ids {ids.dtype} {list(ids.shape)} are not int64 [{num_rows}], one for each row sent")
    check_codes(bits, offsets, num_rows, block)
    if out is None:
        nbytes = buffer_nbytes(num_rows, x.shape[1], bits, offsets, block)
        return torch.empty(nbytes, dtype=torch.uint8, device=x.device)
    check_buffer(out, buffer_nbytes(num_rows, x.shape[1], bits, None, block) if isinstance(bits, int) else None)
    return out


def decoded(
    buffer: Tensor,
    bits: Codes,
    offsets: Tensor | None,
    *,
    width: int,
    block: int,
    index: Tensor | None,
    out: Tensor | None,
    add: bool,
    dtype: torch.dtype,
) -> tuple[int, Tensor]:
    """Return the number of rows of a buffer, and the tensor to write, `out` or a new one. ValueError unless the
    arguments of `dequantize_rows` match."""
    check_codes(bits, offsets, None, block)
    if isinstance(bits, Tensor):
        check_buffer(buffer, None)
        num_rows = bits.shape[0]
    else:
        size = row_nbytes(width, bits, block=block)
        given = index if index is not None else out
        num_rows = given.shape[0] if given is not None else buffer.shape[0] // max(size, 1)
        check_buffer(buffer, num_rows * size)
    if out is None and (index is not None or add):
        raise ValueError("index and add place rows in a tensor: give it as out")
    if out is not None and (out.ndim != 2 or out.shape[1] != width or not out.dtype.is_floating_point):
        raise ValueError(f"out {out.dtype} {list(out.shape)} is not [N, {width}] of floating-point numbers")
    if index is not None and index.shape != (num_rows,):
        raise ValueError(f"index {list(index.shape)} does not name one row of out for each of {num_rows} rows")
    if index is None and out is not None and out.shape[0] != num_rows:
        raise ValueError(f"out has {out.shape[0]} rows for {num_rows} received: give index to place them")
    return num_rows, torch.empty((num_rows, width), dtype=dtype, device=buffer.device) if out is None else out
