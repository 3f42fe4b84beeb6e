"""GATv2 aggregation in one pass over in-edges, and its gradients in one pass from either side: no edge tensor.

An edge's score needs the rows of both ends. A program holds the rows of its side and gathers rows of the other side;
on the source side also the gradient of the result. With z = x_j + y_i, s' the slope of the activation at z, K the
dropout mask, ds_ij = alpha_ij (K <dO_i, x_j> - Delta_i):
    dy_i = a sum_j ds s'(z)                          forward CSR
    dx_j = a sum_i ds s'(z) + sum_i alpha K dO_i     reverse CSR
    da   = sum_i <y_i, dy_i / a> + sum_j <x_j, sum_i ds s'(z)>, by column, without edge tensors or atomics
"""

# pyright: reportCallIssue=false, reportIndexIssue=false, reportAttributeAccessIssue=false, reportArgumentType=false
# pyright: reportAssignmentType=false, reportPossiblyUnboundVariable=false, reportOperatorIssue=false

from typing import Unpack

import torch
import triton
import triton.language as tl
from torch import Tensor

from gnnpar_kernels.attend import triton_tiles as tiles
from gnnpar_kernels.attend.naive import Drop, State, Where
from gnnpar_kernels.attend.triton import STATE, fold, fold_rows
from gnnpar_kernels.attend.triton_grad import run_pull
from gnnpar_kernels.attend_v2 import naive
from gnnpar_kernels.csr import Csr
from gnnpar_kernels.dispatch import specified
from gnnpar_kernels.triton_tuning import Tuned


@triton.jit
def weighed_grad(far, near, ds, SLOPE: tl.constexpr, SOURCE: tl.constexpr):
    """Return ds times the slope of the activation: the gradient of either end without the factor `a`."""
    return tl.where(far + near > 0, ds, ds * SLOPE)


@triton.jit
def dot_grad(far, near, ds, SLOPE: tl.constexpr, SOURCE: tl.constexpr):
    """Return ds times the row of the other end, which is `near` for sources."""
    if SOURCE:
        return ds * near
    else:
        return ds * far


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
    x_ptr,
    key_ptr,
    y_ptr,
    a_ptr,
    edge_ptr,
    edge_query_ptr,
    grad_out_ptr,
    ends_ptr,
    sums_ptr,
    values_ptr,
    edge_sums_ptr,
    edge_grad_ptr,
    num_edges,
    k0,
    k1,
    k2,
    limit,
    SCORE: tl.constexpr,
    GRAD: tl.constexpr,
    SCALE: tl.constexpr,
    SLOPE: tl.constexpr,
    H: tl.constexpr,
    D: tl.constexpr,
    HG: tl.constexpr,
    DP: tl.constexpr,
    A: tl.constexpr,
    AP: tl.constexpr,
    BOUND: tl.constexpr,
    SPLIT: tl.constexpr,
    SOURCE: tl.constexpr,
    TILE: tl.constexpr,
):
    """Sum GRAD(ds) over the edges of R rows: destinations, also ds e_ij, or sources (SOURCE), also alpha K dO.

    Shapes: x, key [M, H, D], y [N, H, D], grad_out [N, H, D + A], ends [N, 2, H] (logsumexp, Delta), sums, values
    [rows, H, D], edge [E, A] in this CSR's order, edge_query [N, H, A], edge_sums [N, H, A], edge_grad
    [groups of heads, E, A].
    """
    B: tl.constexpr = tiles.edges_per_step(TILE, tiles.tile_width(D, HG, DP), BOUND)
    R: tl.constexpr = tiles.rows_per_program(TILE, tiles.tile_width(D, HG, DP), BOUND)
    dtype: tl.constexpr = ends_ptr.dtype.element_ty
    piece, row, begin, end = tiles.span(row_ptr, begin_ptr, end_ptr, first, last, R, BOUND)
    name = (row.to(tl.int64) if rows_ptr is None else tl.load(rows_ptr + row))[:, None, None, None]
    head = (tl.program_id(1) * HG + tl.arange(0, HG))[None, None, :, None]
    column = tl.arange(0, DP)[None, None, None, :]
    wide = (head < H) & (column < D)
    own = (name * H + head) * D + column
    weigh = None if a_ptr is None else tl.load(a_ptr + (head * D + column), mask=wide, other=0.0).to(dtype)
    if edge_ptr is not None:
        attribute = tl.arange(0, AP)[None, None, None, :]
        beside = (head < H) & (attribute < A)
        edge_sums = tl.zeros([R, 1, HG, AP], dtype)
    if SOURCE:
        value = tl.load(x_ptr + own, mask=wide, other=0.0).to(dtype)
        far = value
        if key_ptr is not None:
            far = tl.load(key_ptr + own, mask=wide, other=0.0).to(dtype)
    else:
        near = tl.load(y_ptr + own, mask=wide, other=0.0).to(dtype)
        own_out = (name * H + head) * (D + A) + column
        pulled = tl.load(grad_out_ptr + own_out, mask=wide, other=0.0).to(dtype)
        if edge_ptr is not None:
            own_beside = (name * H + head) * A + attribute
            edge_near = tl.load(edge_query_ptr + own_beside, mask=beside, other=0.0).to(dtype)
            at_beside = (name * H + head) * (D + A) + D + attribute
            edge_pulled = tl.load(grad_out_ptr + at_beside, mask=beside, other=0.0).to(dtype)
        lse = tl.load(ends_ptr + name * (2 * H) + head, mask=head < H, other=0.0)
        delta = tl.load(ends_ptr + name * (2 * H) + H + head, mask=head < H, other=0.0)
    sums = tl.zeros([R, 1, HG, DP], dtype)
    values = tl.zeros([R, 1, HG, DP], dtype)
    edge = begin[:, None] + tl.arange(0, B)[None, :]
    index = tl.load(indices_ptr + edge, mask=edge < end[:, None], other=0)
    for _ in range(0, tl.max(end - begin, 0), B):
        valid = edge < end[:, None]
        mask = valid[:, :, None, None] & (head < H)
        other = index.to(tl.int64)[:, :, None, None]
        index = tl.load(indices_ptr + edge + B, mask=edge + B < end[:, None], other=0)
        at = (other * H + head) * D + column
        if SOURCE:
            near = tl.load(y_ptr + at, mask=mask & (column < D), other=0.0).to(dtype)
            at_out = (other * H + head) * (D + A) + column
            pulled = tl.load(grad_out_ptr + at_out, mask=mask & (column < D), other=0.0).to(dtype)
            if edge_ptr is not None:
                here_beside, there = mask & (attribute < A), (other * H + head) * A + attribute
                edge_near = tl.load(edge_query_ptr + there, mask=here_beside, other=0.0).to(dtype)
                there = (other * H + head) * (D + A) + D + attribute
                edge_pulled = tl.load(grad_out_ptr + there, mask=here_beside, other=0.0).to(dtype)
            lse = tl.load(ends_ptr + other * (2 * H) + head, mask=mask, other=0.0)
            delta = tl.load(ends_ptr + other * (2 * H) + H + head, mask=mask, other=0.0)
        else:
            value = tl.load(x_ptr + at, mask=mask & (column < D), other=0.0).to(dtype)
            far = value
            if key_ptr is not None:
                far = tl.load(key_ptr + at, mask=mask & (column < D), other=0.0).to(dtype)
        _, score = SCORE(far, near, weigh, SLOPE)
        if edge_ptr is not None:
            row_mask = valid[:, :, None, None] & (attribute < A)
            at_edge = edge.to(tl.int64)[:, :, None, None] * A + attribute
            edge_row = tl.load(edge_ptr + at_edge, mask=row_mask, other=0.0).to(dtype)
            score += tl.sum(edge_row * edge_near, 3, keep_dims=True)
        alpha = tl.exp(tl.where(mask, score - lse, float("-inf")))
        kept = tiles.dropped(alpha, ids_ptr, edge, valid, head, k0, k1, k2, limit, SCALE)
        along = tl.sum(pulled * value, 3, keep_dims=True)
        if edge_ptr is not None:
            along += tl.sum(edge_row * edge_pulled, 3, keep_dims=True)
        ds = kept * along - alpha * delta
        sums += tl.sum(GRAD(far, near, ds, SLOPE, SOURCE), 1, keep_dims=True)
        if SOURCE:
            values += tl.sum(kept * pulled, 1, keep_dims=True)
        elif edge_ptr is not None:
            edge_sums += tl.sum(ds * edge_row, 1, keep_dims=True)
            if edge_grad_ptr is not None:  # sum of this program's heads; an edge may have several programs
                of_row = tl.sum(tl.where(mask, ds * edge_near + kept * edge_pulled, 0.0), 2, keep_dims=True)
                tl.store(
                    edge_grad_ptr + (tl.program_id(1).to(tl.int64) * num_edges * A + at_edge), of_row, mask=row_mask
                )
        edge += B
    to = ((piece.to(tl.int64)[:, None, None, None] if SPLIT else name) * H + head) * D + column
    here = (piece < last)[:, None, None, None] & wide
    tl.store(sums_ptr + to, sums, mask=here)
    if SOURCE:
        tl.store(values_ptr + to, values, mask=here)
    elif edge_ptr is not None:
        to = ((piece.to(tl.int64)[:, None, None, None] if SPLIT else name) * H + head) * A + attribute
        tl.store(edge_sums_ptr + to, edge_sums, mask=(piece < last)[:, None, None, None] & beside)


KEY = ["H", "D", "BOUND", "SPLIT"]
NAMES = ("attend_v2.triton._fold", "attend_v2.triton._pull")  # in tables of tiles
_fold = Tuned(fold, tiles.TILES, key=KEY, types=["x_ptr"], restores=STATE, name=NAMES[0])
_pull = Tuned(pull, tiles.TILES, key=[*KEY, "SOURCE"], types=["x_ptr"], name=NAMES[1])


def ends_of(lse: Tensor, delta: Tensor) -> Tensor:
    """Return the scalars of a destination that its edges read. Shapes: lse, delta [N, H] -> [N, 2, H]."""
    return torch.stack([lse, delta.to(lse.dtype)], 1)


@specified(naive.attend_v2)
def attend_v2(
    indptr: Tensor, indices: Tensor, x: Tensor, y: Tensor, a: Tensor, *, slope: float, **where: Unpack[Where]
) -> State:
    score = {"SCORE": tiles.weighed_score, "SLOPE": slope, "near": y, "operands": {"a": a}}
    return fold_rows(_fold, indptr, indices, x, **score, **where)


@specified(naive.attend_v2_grad)
def attend_v2_grad(
    forward: Csr, reverse: Csr, order: Tensor, *tensors: Tensor, slope: float, drop: Drop | None
) -> tuple[Tensor, Tensor, Tensor]:
    x, y, a, lse, grad_out, delta = tensors  # `order` is not read: weights are recomputed on the source side
    how = {"dtype": lse.dtype, "wide": True, "SCORE": tiles.weighed_score, "GRAD": weighed_grad, "SLOPE": slope}
    how |= tiles.pointers(x=x, y=y, a=a, grad_out=grad_out, ends=ends_of(lse, delta))
    how |= {"num_edges": 0, **tiles.padded("A", 0)}
    dims, factor = tiles.Dims.of(x), a.to(lse.dtype)
    (by_destination,) = run_pull(_pull, forward, dims, drop, {"sums_ptr": y}, SOURCE=False, **how)
    by_source, values = run_pull(_pull, reverse, dims, drop, {"sums_ptr": x, "values_ptr": x}, SOURCE=True, **how)
    grad_a = (by_destination * y).sum(0) + (by_source * x).sum(0)
    grad_x, grad_y = values.addcmul_(by_source, factor), by_destination.mul_(factor)
    return grad_x.to(x.dtype), grad_y.to(y.dtype), grad_a.to(a.dtype)
