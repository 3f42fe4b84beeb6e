"""GATv2 aggregation on a CPU: one head at a time, over slices of whole CSR rows with edge rows that fit the cache.

The activation reads x_j + y_i, so every edge has its own row. It is gathered once per pass; other operations run in
place, in three buffers per slice. With z = x_j + y_i, s' the slope of the activation at z, K the dropout mask:
    ds_ij = alpha_ij (K <dO_i, x_j> - Delta_i)
    dy_i  = a sum_j ds s'(z)                          forward CSR
    dx_j  = a sum_i ds s'(z) + sum_i alpha K dO_i     reverse CSR
    da    = sum_ij ds s'(z) z = sum_i <y_i, dy_i / a> + sum_j <x_j, sum_i ds s'(z)>, by column
The weights and ds of one head, [E] each, are kept from the forward to the reverse pass.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from gnnpar_kernels.attend.cpu import Scores, Sums, softmax_rows
from gnnpar_kernels.attend.cpu_edges import Dropping, Edges, csr_rows, head_table, put
from gnnpar_kernels.attend.naive import Drop, State, empty_state
from gnnpar_kernels.cpu_bags import RowBlock, bag
from gnnpar_kernels.csr import Csr, accumulate_dtype

BYTES = 1 << 21  # of a buffer of edge rows of a slice
FEWEST = 1024  # edges of a slice


class _Slices(Edges):
    """The slices of one CSR, and buffers for the rows of a slice's edges."""

    def __init__(
        self, indptr: Tensor, indices: Tensor, *, width: int, dtype: torch.dtype, dropping: Dropping | None = None
    ) -> None:
        edges = max(BYTES // max(width * dtype.itemsize, 1), FEWEST)
        super().__init__(indptr, indices, edges=edges, dtype=dtype, dropping=dropping)
        self.wide = torch.empty((2, self.size, width), dtype=dtype)

    def gather(self, block: RowBlock, table: Tensor) -> Tensor:
        """Return the row of every edge's index. Shapes: table [M, D] -> [edges, D].

        A bag of one row each prefetches: 15 to 20 ns per row of 128 bytes, where `index_select` takes 11 to 35.
        """
        if table.dtype == torch.float64:  # an fp64 bag is a matrix product
            return torch.index_select(table, 0, block.indices)
        return bag(table, block.indices, self.places[: block.num_edges + 1])


def _own_slope_(z: Tensor, slope: float, one: Tensor) -> Tensor:
    """Return the slope of the activation, written over its argument."""
    return torch.ops.aten.leaky_relu_backward.grad_input(one, z, slope, False, grad_input=z)


def attend_v2(
    indptr: Tensor,
    indices: Tensor,
    x: Tensor,
    y: Tensor,
    a: Tensor,
    *,
    slope: float,
    num_rows: int,
    rows: Tensor | None = None,
    state: State | None = None,
    drop: Drop | None = None,
    edge_ids: Tensor | None = None,
) -> State:
    """See `naive.attend_v2`. A given state is updated in place."""
    dtype, width = accumulate_dtype(x.dtype), x.shape[2]
    dropping = Dropping(drop, edge_ids, x.shape[1])
    slices, a = _Slices(indptr, indices, width=width, dtype=dtype, dropping=dropping), a.to(dtype)
    if indices.shape[0] == 0:
        return empty_state(num_rows, x, dtype, False) if state is None else state
    near = csr_rows(y, rows)
    far_rows, near_rows = (torch.empty((t.shape[0], width), dtype=dtype) for t in (x, near))

    def head_of(head: int) -> tuple[Scores, Sums]:
        head_table(x, head, out=far_rows)
        head_table(near, head, out=near_rows)

        def scores(block: RowBlock, out: Tensor) -> Tensor:
            value = slices.gather(block, far_rows)
            z = slices.spread(block, near_rows, slices.wide[0, : block.num_edges]).add_(value)
            torch.mv(torch.ops.aten.leaky_relu.out(z, slope, out=z), a[head], out=out)
            return value

        return scores, slices.sums

    num_listed = indptr.shape[0] - 1
    return softmax_rows(slices, x, head_of, num_listed=num_listed, state=state, rows=rows, num_rows=num_rows)


def attend_v2_grad(
    forward: Csr,
    reverse: Csr,
    order: Tensor,
    x: Tensor,
    y: Tensor,
    a: Tensor,
    lse: Tensor,
    grad_out: Tensor,
    delta: Tensor,
    *,
    slope: float,
    drop: Drop | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """See `naive.attend_v2_grad`."""
    dtype, num_heads, width = lse.dtype, *x.shape[1:]
    grad_x, grad_y, grad_a = (torch.zeros(t.shape, dtype=dtype) for t in (x, y, a))
    num_edges = forward.indices.shape[0]
    if num_edges > 0:
        wide = a.to(dtype)
        lse_row, delta_row = (csr_rows(t.to(dtype), forward.rows).t().contiguous() for t in (lse, delta))
        dropping = Dropping(drop, forward.edge_ids, num_heads)
        ins = _Slices(forward.indptr, forward.indices, width=width, dtype=dtype, dropping=dropping)
        outs = _Slices(reverse.indptr, reverse.indices, width=width, dtype=dtype)
        far, near, pulled = (torch.empty((t.shape[0], width), dtype=dtype) for t in (x, y, grad_out))
        weights, ds = torch.empty(num_edges, dtype=dtype), torch.empty(num_edges, dtype=dtype)
        for head in range(num_heads):
            for table, whole in ((far, x), (near, y), (pulled, grad_out)):
                head_table(whole, head, out=table)
            own = csr_rows(near, forward.rows)
            ends = _Ends(own, csr_rows(pulled, forward.rows), lse_row[head], delta_row[head])
            rows = _by_destination(ins, far, ends, wide[head], slope, head, weights, ds)
            put(grad_y, head, forward.rows, rows * wide[head])
            grad_a[head] = rows.mul_(own).sum(0)
            own = csr_rows(far, reverse.rows)
            rows, values = _by_source(outs, near, pulled, own, slope, order, weights, ds)
            put(grad_x, head, reverse.rows, values.addcmul_(rows, wide[head]))
            grad_a[head] += rows.mul_(own).sum(0)
    return grad_x.to(x.dtype), grad_y.to(y.dtype), grad_a.to(a.dtype)


class _Ends(NamedTuple):
    """Operands of one head by CSR row. Shapes: near, pulled [R, D], lse, delta [R]."""

    near: Tensor
    pulled: Tensor
    lse: Tensor
    delta: Tensor


def _by_destination(
    slices: _Slices,
    far: Tensor,
    ends: _Ends,
    a: Tensor,
    slope: float,
    head: int,
    weights: Tensor,
    ds: Tensor,
) -> Tensor:
    """Return sum_j ds s'(z) [R, D]. Write alpha K and ds of every edge to `weights` and `ds`, [E]."""
    sums, one = torch.empty_like(ends.near), far.new_ones(())
    for block in slices.blocks:
        edges, span = block.num_edges, slice(block.begin, block.end)
        z, other = slices.wide[:, :edges]
        alpha, spare = slices.numbers[:, :edges]
        value = slices.gather(block, far)
        slices.spread(block, ends.near, z).add_(value)
        torch.ops.aten.leaky_relu.out(z, slope, out=other)
        torch.mv(other, a, out=alpha).sub_(slices.spread(block, ends.lse, spare)).exp_()
        kept, slope_of_score = weights[span], ds[span]
        slices.drop_(block, head, kept.copy_(alpha))
        torch.sum(slices.spread(block, ends.pulled, other).mul_(value), -1, out=slope_of_score)
        alpha.mul_(slices.spread(block, ends.delta, spare))
        slope_of_score.mul_(kept).sub_(alpha)
        _own_slope_(z, slope, one)
        sums[block.first : block.last] = slices.sums(block, z, slope_of_score)
    return sums


def _by_source(
    slices: _Slices, near: Tensor, pulled: Tensor, own: Tensor, slope: float, order: Tensor, weights: Tensor, ds: Tensor
) -> tuple[Tensor, Tensor]:
    """Return (sum_i ds s'(z), sum_i alpha K dO_i), each [R, D]."""
    sums, values, one = torch.empty_like(own), torch.empty_like(own), near.new_ones(())
    for block in slices.blocks:
        edges, places = block.num_edges, order[block.begin : block.end]
        here = slices.numbers[0, :edges]
        z = slices.gather(block, near).add_(slices.spread(block, own, slices.wide[0, :edges]))
        _own_slope_(z, slope, one)
        sums[block.first : block.last] = slices.sums(block, z, torch.index_select(ds, 0, places, out=here))
        torch.index_select(weights, 0, places, out=here)
        values[block.first : block.last] = bag(pulled, block.indices, block.offsets, here)
    return sums, values
