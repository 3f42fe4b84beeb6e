"""Gradient of the GAT aggregation: weights recomputed from the scores, one gather per edge and operand, no atomics.

With alpha the weights, s' the slope of the activation, K the dropout mask, Delta_i = <dO_i, O_i>:
    dz_j   = sum_i alpha K dO_i
    del_j  = <z_j, sum_i alpha s' K dO_i> - sum_i alpha s' Delta_i         (reverse CSR)
    der_i  = <dO_i, sum_j alpha s' K z_j> - sum_j alpha s' Delta_i         (forward CSR)
GATv1 scores do not read the rows, so the products with z and dO are taken once per row, not per edge.
"""

# pyright: reportCallIssue=false, reportIndexIssue=false, reportAttributeAccessIssue=false, reportArgumentType=false
# pyright: reportAssignmentType=false, reportPossiblyUnboundVariable=false

import itertools

import torch
import triton
import triton.language as tl
from torch import Tensor

from gnnpar_kernels.attend.naive import Drop, both_sides
from gnnpar_kernels.attend.triton_tiles import (
    LAUNCHES,
    RUNTIME,
    SHAPES,
    TILES,
    Dims,
    Shape,
    dropped,
    dropping,
    edges_per_step,
    rows_per_program,
    run_tasks,
    score,
    span,
    tile_width,
    trained,
)
from gnnpar_kernels.csr import Csr
from gnnpar_kernels.spmm.triton import spmm
from gnnpar_kernels.triton_tasks import LOW, tasks_of
from gnnpar_kernels.triton_tuning import Tuned, Variant, distinct, tuned


@triton.jit
def _ends(ends_ptr, index, head, mask, H: tl.constexpr):
    """(score, logsumexp, Delta) of destinations. Shapes: index int64, head and mask broadcast to the result."""
    at = ends_ptr + index * (3 * H) + head
    near = tl.load(at, mask=mask, other=0.0)
    return near, tl.load(at + H, mask=mask, other=0.0), tl.load(at + 2 * H, mask=mask, other=0.0)


@tuned(TILES, key=["H", "D", "BOUND", "SPLIT", "SOURCE"], types=["table_ptr"])
@triton.jit(do_not_specialize=RUNTIME)
def _pull(
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
    """Gradients of R sources from the destinations' dO (SOURCE), or of R destinations' scores from the sources' z.

    Shapes: table [K, H, D] gathered, own [R, H, D] of this side; ends [N, 3, H] of the destinations, whichever side.
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
        raw, activated = score(far, near, SLOPE)
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
    """Return the values that every edge reads of its destination, side by side. Shapes: -> [N, 3, H]."""
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
    """Launch a gradient; parts of split rows are written apart and added. Shapes: whole: gradients [K, ...] by name."""
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
    if rows is None:
        grad_x, grad_a = x.new_empty(x.shape), a_src.new_empty(a_src.shape)
    else:
        grad_x, grad_a = x.new_zeros(x.shape), a_src.new_zeros(a_src.shape)
    run_pull(
        _pull,
        indptr.contiguous(),
        rows,
        Dims.of(x),
        {"grad_rows_ptr": grad_x, "grad_ptr": grad_a},
        SOURCE=True,
        SLOPE=slope,
        indices_ptr=indices.contiguous(),
        table_ptr=grad_out.contiguous(),
        own_ptr=x.contiguous(),
        a_src_ptr=a_src.contiguous(),
        ends_ptr=_destinations(a_dst, out, lse, grad_out, delta),
        dtype=lse.dtype,
        **dropping(drop, edge_ids),
    )
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
    run_pull(
        _pull,
        indptr.contiguous(),
        rows,
        Dims.of(x),
        {"grad_ptr": grad_a},
        SOURCE=False,
        SLOPE=slope,
        grad_rows_ptr=None,
        indices_ptr=indices.contiguous(),
        table_ptr=x.contiguous(),
        own_ptr=grad_out.contiguous(),
        a_src_ptr=a_src.contiguous(),
        ends_ptr=_destinations(a_dst, out, lse, grad_out, delta),
        dtype=lse.dtype,
        **dropping(drop, edge_ids),
    )
    return grad_a


def attend_grad_dst_of(
    grad_out: Tensor, out: Tensor, pos: Tensor, mass_pos: Tensor, *, slope: float, delta: Tensor | None = None
) -> Tensor:
    """See `naive.attend_grad_dst_of`."""
    dtype = mass_pos.dtype
    delta = row_dots(grad_out, out, dtype=dtype) if delta is None else delta.to(dtype)
    return row_dots(grad_out, pos, dtype=dtype).sub_(mass_pos * delta).mul_(1.0 - slope)


def attend_grad(
    forward: Csr,
    reverse: Csr,
    x: Tensor,
    a_src: Tensor,
    a_dst: Tensor,
    out: Tensor,
    lse: Tensor,
    grad_out: Tensor,
    *,
    slope: float,
    drop: Drop | None = None,
    delta: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """See `naive.attend_grad`."""
    delta = row_dots(out, grad_out, dtype=lse.dtype) if delta is None else delta
    tensors = (x, a_src, a_dst, out, lse, grad_out)
    return both_sides(attend_grad_src, attend_grad_dst, forward, reverse, *tensors, slope=slope, drop=drop, delta=delta)


def variants() -> list[Variant]:
    """Return the variants of the ahead-of-time test: main shapes, and all shapes of training, with all tiles."""
    cases = []
    for shape in SHAPES:
        for config, bound, source in itertools.product(TILES, (0, *LOW), (True, False)):
            cases.append(_pulled(shape, config, (bound, False), source=source))
        types = {"a_ptr": "*fp32", "b_ptr": "*" + shape.dtype, "dots_ptr": "*fp32", "num": "i32"}
        cases.append(shape.variant("dots", _dots_kernel, types, {"R": _dots_rows(shape.width)}, None))
    for shape, launch, source in itertools.product(trained(branches=False, mixed=True), LAUNCHES, (True, False)):
        cases += [_pulled(shape, config, launch, source=source) for config in TILES]
    for a, b in itertools.product(("fp32", "bf16"), repeat=2):
        types = {"a_ptr": "*" + a, "b_ptr": "*" + b, "dots_ptr": "*fp32", "num": "i32"}
        name = f"dots of {a} and" if a == "bf16" else "dots"
        cases.append(Shape(4, 64, b).variant(name, _dots_kernel, types, {"R": _dots_rows(64)}, None))
    return distinct(cases)


def _pulled(shape: Shape, config: triton.Config, launch: tuple[int, bool], *, source: bool) -> Variant:
    (bound, split), rows, grad = launch, "*" + shape.dtype, "*" + (shape.grad or shape.dtype)
    table, own = (grad, rows) if source else (rows, grad)
    types = {"table_ptr": table, "own_ptr": own, "a_src_ptr": "*fp32", "ends_ptr": "*fp32"}
    types |= {"grad_ptr": "*fp32", "grad_rows_ptr": "*fp32" if split else rows}
    how: dict[str, object] = {"BOUND": bound, "SPLIT": split, "SOURCE": source}
    how |= {} if source else {"grad_rows_ptr": None}
    name = "source" if source else "destination"
    return shape.variant(name, _pull.fn, types, how, config, " split" * split)
