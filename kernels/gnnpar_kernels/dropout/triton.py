"""Keyed dropout in one pass: masks computed in registers, the same bits as the specification; 16 bytes per load."""

# pyright: reportCallIssue=false, reportIndexIssue=false, reportAttributeAccessIssue=false, reportArgumentType=false

from math import prod

import torch
import triton
import triton.language as tl
from torch import Tensor

from gnnpar_kernels.hashing import Key, threshold
from gnnpar_kernels.triton_hashing import column_hash, keep, key_arguments, row_hash

WARPS = 4
FLAT = WARPS * 32 * 16  # entries of a program of `_apply_kernel`
RUNTIME = ["num_rows", "k0", "k1", "k2", "limit"]  # integers that a kernel is not specialised for


def _tile(width: int, itemsize: int) -> tuple[int, int]:
    """Return (rows, columns) of a program: 16 entries per lane, or four 16-byte loads if that is more."""
    entries = WARPS * 32 * max(16, 64 // itemsize if width * itemsize % 16 == 0 else 0)
    columns = min(triton.next_power_of_2(width), 512)
    return entries // columns, columns


@triton.jit
def _draw(ids, num_rows, k0, k1, k2, limit, W: tl.constexpr, R: tl.constexpr, BW: tl.constexpr):
    """Return offsets of the program's entries, masks of valid and of kept ones. Shapes: ids [num_rows] -> [R, BW]."""
    row = tl.program_id(0) * R + tl.arange(0, R)
    column = tl.program_id(1) * BW + tl.arange(0, BW)
    inside = row < num_rows
    rows = row_hash(tl.load(ids + row, mask=inside, other=0), k0, k1)
    kept = keep(rows[:, None], column_hash(column, k2)[None, :], limit)
    return row.to(tl.int64)[:, None] * W + column[None, :], inside[:, None] & (column < W)[None, :], kept


@triton.jit
def _scaled(x, kept, SCALE: tl.constexpr):
    """Return x * kept * SCALE, with the product of 16-bit entries in fp32."""
    if x.dtype == tl.bfloat16 or x.dtype == tl.float16:
        x = x.to(tl.float32)
    return tl.where(kept, x * SCALE, 0.0)


@triton.jit(do_not_specialize=RUNTIME)
def _dropout_kernel(
    x, ids, num_rows, y, k0, k1, k2, limit, SCALE: tl.constexpr, W: tl.constexpr, R: tl.constexpr, BW: tl.constexpr
):
    at, mask, kept = _draw(ids, num_rows, k0, k1, k2, limit, W, R, BW)
    tl.store(y + at, _scaled(tl.load(x + at, mask=mask), kept, SCALE), mask=mask)


@triton.jit(do_not_specialize=RUNTIME)
def _keep_kernel(ids, num_rows, y, k0, k1, k2, limit, W: tl.constexpr, R: tl.constexpr, BW: tl.constexpr):
    at, mask, kept = _draw(ids, num_rows, k0, k1, k2, limit, W, R, BW)
    tl.store(y + at, kept.to(tl.int8), mask=mask)


@triton.jit(do_not_specialize=["num"])
def _apply_kernel(x, mask, num, y, SCALE: tl.constexpr, BLOCK: tl.constexpr):
    """Apply the mask to one block of entries. Only the last block masks its loads; others load 16 bytes at once."""
    first = tl.program_id(0).to(tl.int64) * BLOCK
    at = first + tl.arange(0, BLOCK)
    if first + BLOCK <= num:
        tl.store(y + at, _scaled(tl.load(x + at), tl.load(mask + at) != 0, SCALE))
    else:
        inside = at < num
        kept = tl.load(mask + at, mask=inside, other=0) != 0
        tl.store(y + at, _scaled(tl.load(x + at, mask=inside), kept, SCALE), mask=inside)


def _words(p: float, key: Key) -> dict[str, object]:
    """Return a key and a probability as the arguments of a kernel."""
    return {**key_arguments(key), "limit": threshold(p)}


def _grid(num_rows: int, width: int, itemsize: int) -> tuple[tuple[int, int], dict[str, int]]:
    """Return the grid of programs, and the constants of their tiles."""
    rows, columns = _tile(width, itemsize)
    return (triton.cdiv(num_rows, rows), triton.cdiv(width, columns)), {"W": width, "R": rows, "BW": columns}


def keep_mask(ids: Tensor, width: int, *, p: float, key: Key) -> Tensor:
    """See `naive.keep_mask`."""
    words = _words(p, key)
    kept = torch.empty((ids.shape[0], width), dtype=torch.bool, device=ids.device)
    if kept.numel() > 0:
        grid, tile = _grid(ids.shape[0], width, 1)
        _keep_kernel[grid](ids.contiguous(), ids.shape[0], kept.view(torch.int8), **words, **tile, num_warps=WARPS)
    return kept


def dropout(x: Tensor, ids: Tensor, *, p: float, key: Key) -> Tensor:
    """See `naive.dropout`."""
    words, width = _words(p, key), prod(x.shape[1:])
    y = torch.empty_like(x, memory_format=torch.contiguous_format)
    if y.numel() > 0:
        grid, tile = _grid(x.shape[0], width, x.element_size())
        _dropout_kernel[grid](
            x.contiguous(), ids.contiguous(), x.shape[0], y, **words, SCALE=1.0 / (1.0 - p), **tile, num_warps=WARPS
        )
    return y


def apply_mask(x: Tensor, keep: Tensor, *, p: float) -> Tensor:
    """See `naive.apply_mask`."""
    threshold(p)  # refuses p = 1, where the scale is infinite
    y = torch.empty_like(x, memory_format=torch.contiguous_format)
    if y.numel() > 0:
        mask = keep.contiguous().view(torch.int8)
        _apply_kernel[(triton.cdiv(x.numel(), FLAT),)](
            x.contiguous(), mask, x.numel(), y, SCALE=1.0 / (1.0 - p), BLOCK=FLAT, num_warps=WARPS
        )
    return y
