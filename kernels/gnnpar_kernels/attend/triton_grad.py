"""Gradient of the GAT aggregation: weights recomputed from the scores, one gather per edge and operand, no atomics.

GATv1 scores do not read the rows, so the products with z and dO are computed once per row, not per edge: the sums of
kernels/README.md.
"""

# pyright: reportCallIssue=false, reportIndexIssue=false, reportAttributeAccessIssue=false, reportArgumentType=false
# pyright: reportAssignmentType=false, reportPossiblyUnboundVariable=false

import torch
import triton
import triton.language as tl
from torch import Tensor

from gnnpar_kernels.attend import naive
from gnnpar_kernels.attend import triton_tiles as tiles
from gnnpar_kernels.attend.naive import Drop
from gnnpar_kernels.csr import Csr
from gnnpar_kernels.dispatch import specified
from gnnpar_kernels.spmm.triton import spmm
from gnnpar_kernels.triton_tasks import tasks_of
from gnnpar_kernels.triton_tuning import Tuned


@triton.jit
def _ends(ends_ptr, index, head, mask, H: tl.constexpr):
    """Load (score, logsumexp, Delta) of destinations. Shapes: index int64, head and mask broadcast to the result."""
    at = ends_ptr + index * (3 * H) + head
    near = tl.load(at, mask=mask, other=0.0)
    return near, tl.load(at + H, mask=mask, other=0.0), tl.load(at + 2 * H, mask=mask, other=0.0)


@triton.jit(do_not_specialize=tiles.RUNTIME)
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
    B: tl.constexpr = tiles.edges_per_step(TILE, tiles.tile_width(D, HG, DP), BOUND)
    R: tl.constexpr = tiles.rows_per_program(TILE, tiles.tile_width(D, HG, DP), BOUND)
    dtype: tl.constexpr = ends_ptr.dtype.element_ty
    piece, row, begin, end = tiles.span(row_ptr, begin_ptr, end_ptr, first, last, R, BOUND)
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
        raw, activated = tiles.sum_score(far, near, None, SLOPE)
        alpha = tl.exp(tl.where(mask, activated - lse, float("-inf")))
        lost += tl.sum(tl.where(raw > 0, alpha, alpha * SLOPE) * delta, 1, keep_dims=True)
        kept = tiles.dropped(alpha, ids_ptr, edge, valid, head, k0, k1, k2, limit, SCALE)
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
_pull = Tuned(pull, tiles.TILES, key=_KEY, types=["table_ptr"], name="attend.triton_grad._pull")


@triton.jit
def _dots_kernel(a_ptr, b_ptr, dots_ptr, num, D: tl.constexpr, DP: tl.constexpr, R: tl.constexpr):
    row = tl.program_id(0) * R + tl.arange(0, R)
    column = tl.arange(0, DP)[None, :]
    mask = (row < num)[:, None] & (column < D)
    at = row.to(tl.int64)[:, None] * D + column
    dtype: tl.constexpr = dots_ptr.dtype.element_ty
    a, b = tl.load(a_ptr + at, mask=mask, other=0.0).to(dtype), tl.load(b_ptr + at, mask=mask, other=0.0).to(dtype)
    tl.store(dots_ptr + row, tl.sum(a * b, 1), mask=row < num)


@specified(naive.row_dots)
def row_dots(a: Tensor, b: Tensor, *, dtype: torch.dtype) -> Tensor:
    dots, dims = torch.empty(a.shape[:2], dtype=dtype, device=a.device), tiles.Dims.of(a)
    if dots.numel() > 0:
        rows = max(1, 1024 // dims.DP)
        _dots_kernel[(triton.cdiv(dots.numel(), rows),)](
            a.contiguous(), b.contiguous(), dots, dots.numel(), D=dims.D, DP=dims.DP, R=rows, num_warps=1
        )
    return dots


def run_pull(
    kernel: Tuned,
    csr: Csr,
    dims: tiles.Dims,
    drop: Drop | None,
    likes: dict[str, Tensor],
    *,
    dtype: torch.dtype,
    wide: bool = False,
    **arguments: object,
) -> list[Tensor]:
    """Launch a gradient over the rows of a CSR, and add up the parts of split rows.

    likes: argument of the kernel -> a tensor of the shape of its result, and of its type unless `wide`: then of
    `dtype`, as all sums are.
    """
    made = torch.empty if csr.rows is None else torch.zeros
    whole = {
        name: made(like.shape, dtype=dtype if wide else like.dtype, device=like.device) for name, like in likes.items()
    }
    indptr = csr.indptr.contiguous()
    tasks, rows = tasks_of(indptr), csr.rows
    parts = {name: t.new_empty((tasks.num_slots, *t.shape[1:]), dtype=dtype) for name, t in whole.items()}
    arguments |= tiles.pointers(indices=csr.indices, rows=rows) | tiles.dropping(drop, csr.edge_ids)
    tiles.run_tasks(kernel, indptr, dims, whole=whole, parts=parts, **arguments)
    if tasks.num_slots:
        split = tasks.split_row if rows is None else rows.index_select(0, tasks.split_row)
        slots = torch.arange(tasks.num_slots, dtype=torch.int32, device=indptr.device)
        for name, t in whole.items():
            total = spmm(tasks.split_first, slots, parts[name], num_rows=split.shape[0])
            t.index_copy_(0, split.long(), total.to(t.dtype))
    return list(whole.values())
