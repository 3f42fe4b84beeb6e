"""Gradient of the GAT aggregation: weights recomputed from the scores, one gather per edge and operand, no atomics.

With alpha the weights, s' the slope of the activation, K the dropout mask, Delta_i = <dO_i, O_i>:
    dz_j   = sum_i alpha K dO_i
    del_j  = <z_j, sum_i alpha s' K dO_i> - sum_i alpha s' Delta_i         (reverse CSR)
    der_i  = <dO_i, sum_j alpha s' K z_j> - sum_j alpha s' Delta_i         (forward CSR)
GATv1 scores do not read the rows, so the products with z and dO are computed once per row, not per edge.
"""

# pyright: reportCallIssue=false, reportIndexIssue=false, reportAttributeAccessIssue=false, reportArgumentType=false
# pyright: reportAssignmentType=false, reportPossiblyUnboundVariable=false

import torch
import triton
import triton.language as tl
from torch import Tensor

from gnnpar_kernels.attend.naive import Drop, both_sides
from gnnpar_kernels.attend.triton_tiles import (
    RUNTIME,
    TILES,
    Dims,
    dropped,
    dropping,
    edges_per_step,
    pointers,
    rows_per_program,
    run_tasks,
    span,
    sum_score,
    tile_width,
)
from gnnpar_kernels.spmm.triton import spmm
from gnnpar_kernels.triton_tasks import tasks_of
from gnnpar_kernels.triton_tuning import Tuned


@triton.jit
def _ends(ends_ptr, index, head, mask, H: tl.constexpr):
    """Load (score, logsumexp, Delta) of destinations. Shapes: index int64, head and mask broadcast to the result."""
    at = ends_ptr + index * (3 * H) + head
    near = tl.load(at, mask=mask, other=0.0)
    return near, tl.load(at + H, mask=mask, other=0.0), tl.load(at + 2 * H, mask=mask, other=0.0)


@triton.jit(do_not_specialize=RUNTIME)
def pull(
    row_ptr,
    begin_ptr,
    end_ptr,
    first,
    last,
    rows_ptr,
    indices_ptr,
    ids_ptr,
    table_ptr,
    own_ptr,
    a_src_ptr,
    ends_ptr,
    grad_rows_ptr,
    grad_ptr,
    k0,
    k1,
    k2,
    limit,
    SCALE: tl.constexpr,
    SLOPE: tl.constexpr,
    H: tl.constexpr,
    D: tl.constexpr,
    HG: tl.constexpr,
    DP: tl.constexpr,
    BOUND: tl.constexpr,
    SPLIT: tl.constexpr,
    SOURCE: tl.constexpr,
    TILE: tl.constexpr,
):
    """Compute gradients of R sources from the destinations' dO (SOURCE), or of R destinations' scores from sources' z.

    Shapes: table [K, H, D] gathered, own [R, H, D] of this side; ends [N, 3, H] of the destinations, on both sides.
    """
    B: tl.constexpr = edges_per_step(TILE, tile_width(D, HG, DP), BOUND)
    R: tl.constexpr = rows_per_program(TILE, tile_width(D, HG, DP), BOUND)
    dtype: tl.constexpr = ends_ptr.dtype.element_ty
    piece, row, begin, end = span(row_ptr, begin_ptr, end_ptr, first, last, R, BOUND)
    name = (row.to(tl.int64) if rows_ptr is None else tl.load(rows_ptr + row))[:, None, None, None]
    head = (tl.program_id(1) * HG + tl.arange(0, HG))[None, None, :, None]
    column = tl.arange(0, DP)[None, None, None, :]
    if SOURCE:
        near = tl.load(a_src_ptr + name * H + head, mask=head < H, other=0.0).to(dtype)
    else:
        near, lse, delta = _ends(ends_ptr, name, head, head < H, H)
    total = tl.zeros([R, 1, HG, DP], dtype)
    sloped_total = tl.zeros([R, 1, HG, DP], dtype)
    lost = tl.zeros([R, 1, HG, 1], dtype)
    edge = begin[:, None] + tl.arange(0, B)[None, :]
    index = tl.load(indices_ptr + edge, mask=edge < end[:, None], other=0)
    for _ in range(0, tl.max(end - begin, 0), B):
        valid = edge < end[:, None]
        mask = valid[:, :, None, None] & (head < H)
        other = index.to(tl.int64)[:, :, None, None]
        index = tl.load(indices_ptr + edge + B, mask=edge + B < end[:, None], other=0)
        tile = tl.load(table_ptr + ((other * H + head) * D + column), mask=mask & (column < D), other=0.0).to(dtype)
        if SOURCE:
            far, lse, delta = _ends(ends_ptr, other, head, mask, H)
        else:
            far = tl.load(a_src_ptr + other * H + head, mask=mask, other=0.0).to(dtype)
        raw, activated = sum_score(far, near, None, SLOPE)
        alpha = tl.exp(tl.where(mask, activated - lse, float("-inf")))
        lost += tl.sum(tl.where(raw > 0, alpha, alpha * SLOPE) * delta, 1, keep_dims=True)
        kept = dropped(alpha, ids_ptr, edge, valid, head, k0, k1, k2, limit, SCALE)
        if SOURCE:
            total += tl.sum(kept * tile, 1, keep_dims=True)
        sloped_total += tl.sum(tl.where(raw > 0, kept, kept * SLOPE) * tile, 1, keep_dims=True)
        edge += B
    here = (piece < last)[:, None, None, None] & (head < H)
    wide = here & (column < D)
    own = tl.load(own_ptr + ((name * H + head) * D + column), mask=wide, other=0.0).to(dtype)
    at = (piece.to(tl.int64)[:, None, None, None] if SPLIT else name) * H + head
    tl.store(grad_ptr + at, tl.sum(sloped_total * own, 3, keep_dims=True) - lost, mask=here)
    if SOURCE:
        tl.store(grad_rows_ptr + (at * D + column), total, mask=wide)


_KEY = ["H", "D", "BOUND", "SPLIT", "SOURCE"]
_pull = Tuned(pull, TILES, key=_KEY, types=["table_ptr"], name="attend.triton_grad._pull")


@triton.jit
def _dots_kernel(a_ptr, b_ptr, dots_ptr, num, D: tl.constexpr, DP: tl.constexpr, R: tl.constexpr):
    row = tl.program_id(0) * R + tl.arange(0, R)
    column = tl.arange(0, DP)[None, :]
    mask = (row < num)[:, None] & (column < D)
    at = row.to(tl.int64)[:, None] * D + column
    dtype: tl.constexpr = dots_ptr.dtype.element_ty
    a, b = tl.load(a_ptr + at, mask=mask, other=0.0).to(dtype), tl.load(b_ptr + at, mask=mask, other=0.0).to(dtype)
    tl.store(dots_ptr + row, tl.sum(a * b, 1), mask=row < num)


def _dots_rows(width: int) -> int:
    return max(1, 1024 // triton.next_power_of_2(max(width, 1)))


def row_dots(a: Tensor, b: Tensor, *, dtype: torch.dtype) -> Tensor:
    """See `naive.row_dots`."""
    dots = torch.empty(a.shape[:2], dtype=dtype, device=a.device)
    if dots.numel() > 0:
        dims, rows = Dims.of(a), _dots_rows(a.shape[2])
        _dots_kernel[(triton.cdiv(dots.numel(), rows),)](
            a.contiguous(), b.contiguous(), dots, dots.numel(), D=dims.D, DP=dims.DP, R=rows, num_warps=1
        )
    return dots


def _destinations(a_dst: Tensor, out: Tensor, lse: Tensor, grad_out: Tensor, delta: Tensor | None) -> Tensor:
    """Return the scalars of a destination that its edges read. Shapes: -> [N, 3, H]."""
    delta = row_dots(out, grad_out, dtype=lse.dtype) if delta is None else delta
    return torch.stack([a_dst.to(lse.dtype), lse, delta.to(lse.dtype)], 1)


def run_pull(
    kernel: Tuned,
    indptr: Tensor,
    rows: Tensor | None,
    dims: Dims,
    whole: dict[str, Tensor],
    *,
    dtype: torch.dtype,
    **common: object,
) -> None:
    """Launch a gradient, and add up the parts of split rows. Shapes: whole: gradients [K, ...] by name."""
    tasks = tasks_of(indptr)
    parts = {name: t.new_empty((tasks.num_slots, *t.shape[1:]), dtype=dtype) for name, t in whole.items()}
    run_tasks(kernel, indptr, dims, whole=whole, parts=parts, rows_ptr=rows, **common)
    if tasks.num_slots:
        split = tasks.split_row if rows is None else rows.index_select(0, tasks.split_row)
        slots = torch.arange(tasks.num_slots, dtype=torch.int32, device=indptr.device)
        for name, t in whole.items():
            total = spmm(tasks.split_first, slots, parts[name], num_rows=split.shape[0])
            t.index_copy_(0, split.long(), total.to(t.dtype))


def attend_grad_src(
    indptr: Tensor,
    indices: Tensor,
    x: Tensor,
    a_src: Tensor,
    a_dst: Tensor,
    out: Tensor,
    lse: Tensor,
    grad_out: Tensor,
    *,
    slope: float,
    rows: Tensor | None = None,
    drop: Drop | None = None,
    edge_ids: Tensor | None = None,
    delta: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """See `naive.attend_grad_src`."""
    made = torch.empty if rows is None else torch.zeros
    grad_x, grad_a = (made(t.shape, dtype=t.dtype, device=t.device) for t in (x, a_src))
    operands = pointers(table=grad_out, own=x, a_src=a_src, ends=_destinations(a_dst, out, lse, grad_out, delta))
    operands |= {**pointers(indices=indices), **dropping(drop, edge_ids), "SOURCE": True, "SLOPE": slope}
    whole = {"grad_rows_ptr": grad_x, "grad_ptr": grad_a}
    run_pull(_pull, indptr.contiguous(), rows, Dims.of(x), whole, dtype=lse.dtype, **operands)
    return grad_x, grad_a


def attend_grad_dst(
    indptr: Tensor,
    indices: Tensor,
    x: Tensor,
    a_src: Tensor,
    a_dst: Tensor,
    out: Tensor,
    lse: Tensor,
    grad_out: Tensor,
    *,
    slope: float,
    rows: Tensor | None = None,
    drop: Drop | None = None,
    edge_ids: Tensor | None = None,
    delta: Tensor | None = None,
) -> Tensor:
    """See `naive.attend_grad_dst`."""
    grad_a = a_dst.new_empty(a_dst.shape) if rows is None else a_dst.new_zeros(a_dst.shape)
    operands = pointers(table=x, own=grad_out, a_src=a_src, ends=_destinations(a_dst, out, lse, grad_out, delta))
    operands |= {**pointers(indices=indices), **dropping(drop, edge_ids), "SOURCE": False, "SLOPE": slope}
    operands |= {"grad_rows_ptr": None}
    run_pull(_pull, indptr.contiguous(), rows, Dims.of(x), {"grad_ptr": grad_a}, dtype=lse.dtype, **operands)
    return grad_a


def attend_grad_dst_of(
    grad_out: Tensor, out: Tensor, pos: Tensor, mass_pos: Tensor, *, slope: float, delta: Tensor | None = None
) -> Tensor:
    """See `naive.attend_grad_dst_of`."""
    dtype = mass_pos.dtype
    delta = row_dots(grad_out, out, dtype=dtype) if delta is None else delta.to(dtype)
    return row_dots(grad_out, pos, dtype=dtype).sub_(mass_pos * delta).mul_(1.0 - slope)


attend_grad = both_sides(attend_grad_src, attend_grad_dst, row_dots)
