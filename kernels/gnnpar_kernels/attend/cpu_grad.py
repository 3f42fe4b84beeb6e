"""Gradient of the GAT aggregation on a CPU: weighted bags over both orientations, no product per edge.

With alpha the weights, s' the slope of the activation, K the dropout mask, Delta_i = <dO_i, O_i>:
    dz_j   = sum_i alpha K dO_i
    del_j  = <z_j, sum_i alpha s' K dO_i> - sum_i alpha s' Delta_i         (reverse CSR)
    der_i  = <dO_i, sum_j alpha s' K z_j> - Delta_i sum_j alpha s'         (forward CSR)
alpha = exp(score) exp(-lse_i): if scores are small, exp(-lse) multiplies rows, not edges.
"""

import torch
from torch import Tensor

from gnnpar_kernels.attend.cpu_edges import PLAIN, Dropping, EdgeWeights, HeadRows, head_table, is_plain
from gnnpar_kernels.attend.naive import Drop, both_sides
from gnnpar_kernels.cpu_bags import bag, weighted_sums

ROWS = 2048  # rows of a temporary that stays in cache


def _delta(out: Tensor, lse: Tensor, grad_out: Tensor, delta: Tensor | None) -> Tensor:
    """Return <dO, O> per row and head, unless given. Shapes: out, grad_out [N, H, D] -> [N, H]."""
    return row_dots(out, grad_out, dtype=lse.dtype) if delta is None else delta.to(lse.dtype)


def row_dots(a: Tensor, b: Tensor, *, dtype: torch.dtype) -> Tensor:
    """See `naive.row_dots`. It handles as many rows at a time as fit the cache."""
    dots = torch.empty(a.shape[:2], dtype=dtype)
    for first in range(0, a.shape[0], ROWS):
        span = slice(first, first + ROWS)
        dots[span] = a[span].to(dtype).mul(b[span].to(dtype)).sum(-1)
    return dots


def _row_factor(lse: Tensor) -> Tensor:
    """Return exp(-lse), clamped: rows with lse below all scores have no edge here, and must not overflow."""
    return torch.exp(-lse.clamp(min=-PLAIN - 1.0))


def _dots_(pulled: Tensor, own: Tensor) -> Tensor:
    """Return <pulled, own> by row; pulled is overwritten. Shapes: [R, D] twice -> [R]."""
    return pulled.mul_(own).sum(-1)


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
    dtype, num_heads = lse.dtype, x.shape[1]
    if indices.shape[0] == 0:
        return torch.zeros(x.shape, dtype=x.dtype), torch.zeros(a_src.shape, dtype=a_src.dtype)
    result_dtype, num_src = a_src.dtype, x.shape[0]
    a_src, a_dst, delta = a_src.to(dtype), a_dst.to(dtype), _delta(out, lse, grad_out, delta)
    factor = _row_factor(lse) if is_plain(a_src, a_dst, slope) else None
    shift = (delta if factor is None else delta * factor).t().contiguous()
    own, a_row = (x, a_src) if rows is None else (x.index_select(0, rows), a_src.index_select(0, rows))
    a_row, a_col, lse_col = a_row.t().contiguous(), a_dst.t().contiguous(), lse.t().contiguous()
    dropping = Dropping(drop, edge_ids, num_heads)
    edges = EdgeWeights(indptr, indices, slope=slope, dtype=dtype, dropping=dropping)
    grad_x, grad_a = torch.empty(own.shape, dtype=dtype), torch.empty(own.shape[:2], dtype=dtype)
    table = torch.empty((grad_out.shape[0], x.shape[2]), dtype=dtype)
    for head in range(num_heads):
        head_table(grad_out, head, out=table, scale=factor)
        ends = HeadRows(a_row[head], a_col[head], col_shift=lse_col[head] if factor is None else None)
        for block in edges.blocks:
            span = slice(block.first, block.last)
            weights, sloped = edges.weights_and_sloped(block, ends)
            lost = weighted_sums(shift[head], block.indices, block.offsets, sloped)
            edges.drop_(block, head, weights, sloped)
            grad_x[span, head] = bag(table, block.indices, block.offsets, weights)
            pulled = bag(table, block.indices, block.offsets, sloped)
            grad_a[span, head] = _dots_(pulled, own[span, head]).sub_(lost)
    grad_x, grad_a = grad_x.to(x.dtype), grad_a.to(result_dtype)
    return _spread(grad_x, rows, num_src), _spread(grad_a, rows, num_src)


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
    dtype, num_heads = lse.dtype, x.shape[1]
    if indices.shape[0] == 0:
        return torch.zeros(a_dst.shape, dtype=a_dst.dtype)
    result_dtype, num_dst = a_dst.dtype, a_dst.shape[0]
    a_src, a_dst, delta = a_src.to(dtype), a_dst.to(dtype), _delta(out, lse, grad_out, delta)
    factor = _row_factor(lse) if is_plain(a_src, a_dst, slope) else None
    if rows is not None:
        a_dst, lse, delta, grad_out = (t.index_select(0, rows) for t in (a_dst, lse, delta, grad_out))
        factor = None if factor is None else factor.index_select(0, rows)
    a_row, a_col, lse_row = a_dst.t().contiguous(), a_src.t().contiguous(), lse.t().contiguous()
    dropping = Dropping(drop, edge_ids, num_heads)
    edges = EdgeWeights(indptr, indices, slope=slope, dtype=dtype, dropping=dropping)
    grad_a, mass = torch.empty(a_dst.shape, dtype=dtype), torch.empty(a_dst.shape, dtype=dtype)
    table, ones = torch.empty((x.shape[0], x.shape[2]), dtype=dtype), torch.ones(x.shape[0], dtype=dtype)
    for head in range(num_heads):
        head_table(x, head, out=table)
        ends = HeadRows(a_row[head], a_col[head], row_shift=lse_row[head] if factor is None else None)
        for block in edges.blocks:
            span = slice(block.first, block.last)
            _, sloped = edges.weights_and_sloped(block, ends)
            mass[span, head] = weighted_sums(ones, block.indices, block.offsets, sloped)
            edges.drop_(block, head, sloped)
            pulled = bag(table, block.indices, block.offsets, sloped)
            grad_a[span, head] = _dots_(pulled, grad_out[span, head])
    grad_a.sub_(mass.mul_(delta))
    if factor is not None:
        grad_a.mul_(factor)
    return _spread(grad_a.to(result_dtype), rows, num_dst)


def attend_grad_dst_of(
    grad_out: Tensor, out: Tensor, pos: Tensor, mass_pos: Tensor, *, slope: float, delta: Tensor | None = None
) -> Tensor:
    """See `naive.attend_grad_dst_of`."""
    delta = _delta(out, mass_pos, grad_out, delta)
    return row_dots(grad_out, pos, dtype=mass_pos.dtype).addcmul_(mass_pos, delta, value=-1.0).mul_(1.0 - slope)


def _spread(part: Tensor, rows: Tensor | None, num_rows: int) -> Tensor:
    """Scatter rows to their places among zeros. Shapes: part [R, ...], rows [R] -> [num_rows, ...]."""
    if rows is None:
        return part
    return part.new_zeros((num_rows, *part.shape[1:])).index_copy_(0, rows, part)


attend_grad = both_sides(attend_grad_src, attend_grad_dst, row_dots)
