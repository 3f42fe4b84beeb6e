"""Row moves in one launch each: several rows per program, 16 bytes per load."""

# pyright: reportCallIssue=false, reportIndexIssue=false, reportAttributeAccessIssue=false, reportArgumentType=false

import triton
import triton.language as tl
from torch import Tensor

from gnnpar_kernels.csr import flat_rows

WARPS = 4


def _tile(width: int, itemsize: int) -> tuple[int, int]:
    """Return (rows, columns) of a program: four 16-byte loads per lane, or 16 loads if rows do not fill 16 bytes."""
    entries = WARPS * 32 * (64 // itemsize if width * itemsize % 16 == 0 else 16)
    columns = min(triton.next_power_of_2(width), entries)
    return min(256, entries // columns), columns


@triton.jit
def _place(index, num_index, W: tl.constexpr, R: tl.constexpr, BW: tl.constexpr):
    """Return offsets of this program's entries in the table of `index` and in the packed rows, and a mask."""
    packed = tl.program_id(0) * R + tl.arange(0, R)
    columns = tl.program_id(1) * BW + tl.arange(0, BW)
    inside = packed < num_index
    row = tl.load(index + packed, mask=inside, other=0).to(tl.int64)
    table = row[:, None] * W + columns[None, :]
    return table, packed.to(tl.int64)[:, None] * W + columns[None, :], inside[:, None] & (columns < W)[None, :]


@triton.jit(do_not_specialize=["num_index"])
def _gather_kernel(x, index, num_index, out, W: tl.constexpr, R: tl.constexpr, BW: tl.constexpr):
    table, packed, mask = _place(index, num_index, W, R, BW)
    tl.store(out + packed, tl.load(x + table, mask=mask), mask=mask)


@triton.jit(do_not_specialize=["num_index"])
def _scatter_kernel(out, index, num_index, x, W: tl.constexpr, R: tl.constexpr, BW: tl.constexpr):
    table, packed, mask = _place(index, num_index, W, R, BW)
    before, added = tl.load(out + table, mask=mask), tl.load(x + packed, mask=mask)
    if before.dtype == tl.bfloat16 or before.dtype == tl.float16:
        before = before.to(tl.float32)
    tl.store(out + table, before + added, mask=mask)


def gather_rows(x: Tensor, index: Tensor, *, out: Tensor | None = None) -> Tensor:
    """See `naive.gather_rows`."""
    result = x.new_empty((index.shape[0], *x.shape[1:])) if out is None else out
    assert result.shape == (index.shape[0], *x.shape[1:]) and result.dtype == x.dtype
    if result.numel() == 0:
        return result
    table, packed = flat_rows(x), result.contiguous()
    r, columns = _tile(table.shape[1], table.element_size())
    grid = triton.cdiv(index.shape[0], r), triton.cdiv(table.shape[1], columns)
    _gather_kernel[grid](
        table, index.contiguous(), index.shape[0], packed, W=table.shape[1], R=r, BW=columns, num_warps=WARPS
    )
    return result if packed is result else result.copy_(packed)


def scatter_add_rows_(out: Tensor, index: Tensor, x: Tensor) -> Tensor:
    """See `naive.scatter_add_rows_`. Rows of 16 bits are added in fp32 and rounded once."""
    if x.numel() == 0:
        return out
    table, packed = out.contiguous(), flat_rows(x)
    r, columns = _tile(packed.shape[1], packed.element_size())
    grid = triton.cdiv(index.shape[0], r), triton.cdiv(packed.shape[1], columns)
    _scatter_kernel[grid](
        table, index.contiguous(), index.shape[0], packed, W=packed.shape[1], R=r, BW=columns, num_warps=WARPS
    )
    return out if table is out else out.copy_(table)
