"""GATv2 aggregation on a CPU: one head at a time, over slices of whole CSR rows whose edges' rows stay in cache.

The activation reads x_j + y_i, so every edge has a row of its own: it is gathered once a walk, and what follows runs in
place, in three buffers of a slice. With z = x_j + y_i, s' the slope of the activation at z, K the dropout mask:
    ds_ij = alpha_ij (K <dO_i, x_j> - Delta_i)
    dy_i  = a sum_j ds s'(z)                          forward CSR
    dx_j  = a sum_i ds s'(z) + sum_i alpha K dO_i     reverse CSR
    da    = sum_ij ds s'(z) z = sum_i <y_i, dy_i / a> + sum_j <x_j, sum_i ds s'(z)>, by column
The weights and ds of one head, [E] each, go from the forward walk to the reverse one.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from gnnpar_kernels.attend.cpu import chain
from gnnpar_kernels.attend.cpu_edges import PLAIN, Dropping, head_table, keep_
from gnnpar_kernels.attend.naive import Drop, State, empty_state
from gnnpar_kernels.cpu_bags import RowBlock, bag, row_blocks, weighted_sums
from gnnpar_kernels.cpu_hashing import keep_bits, row_hash
from gnnpar_kernels.csr import Csr, accumulate_dtype

BYTES = 1 << 21  # of a buffer: the rows of a slice's edges
FEWEST = 1024  # edges of a slice


class _Slices:
    """The slices of one CSR, and buffers for the rows and numbers of a slice's edges."""

    def __init__(self, indptr: Tensor, indices: Tensor, *, width: int, dtype: torch.dtype) -> None:
        self.blocks = row_blocks(indptr, indices, edges=max(BYTES // max(width * dtype.itemsize, 1), FEWEST))
        self._rows = {block.first: block.row_of_edge() for block in self.blocks}
        size = max((block.num_edges for block in self.blocks), default=0)
        self.wide = [torch.empty((size, width), dtype=dtype) for _ in range(2)]
        self.narrow = [torch.empty(size, dtype=dtype) for _ in range(2)]
        self.places = torch.arange(size + 1, dtype=indices.dtype)

    def gather(self, block: RowBlock, table: Tensor) -> Tensor:
        """Return the row of every edge's index. Shapes: table [M, D] -> [edges, D].

        A bag of one row each reads ahead: 15 to 20 ns a row of 128 bytes where `index_select` takes 11 to 35.
        """
        if table.dtype == torch.float64:  # a bag would be a product of matrices
            return torch.index_select(table, 0, block.indices)
        return bag(table, block.indices, self.places[: block.num_edges + 1])

    def spread(self, block: RowBlock, values: Tensor, out: Tensor) -> Tensor:
        """Return the value of its CSR row for every edge. Shapes: values [R, ...] of all rows -> out [edges, ...]."""
        return self.spread_own(block, values[block.first : block.last], out)

    def spread_own(self, block: RowBlock, values: Tensor, out: Tensor) -> Tensor:
        """Return the same for values of the block's rows. Shapes: values [rows of the block, ...]."""
        return torch.index_select(values, 0, self._rows[block.first], out=out)

    def sums(self, block: RowBlock, rows: Tensor, weights: Tensor) -> Tensor:
        """By CSR row. Shapes: rows [edges, D], weights [edges] -> [rows of the block, D]."""
        return bag(rows, self.places[: block.num_edges], block.offsets, weights)


class Mask:
    """Attention dropout of the edges of a CSR."""

    def __init__(self, drop: Drop | None, edge_ids: Tensor | None, num_heads: int) -> None:
        self.dropping = Dropping.of(drop, edge_ids, num_heads)
        if self.dropping is not None:
            self._hashes = row_hash(self.dropping.edge_ids, key=self.dropping.key)

    def apply_(self, block: RowBlock, head: int, weights: Tensor) -> Tensor:
        """weights * K, in place. Shapes: weights [edges of the block]."""
        if self.dropping is not None:
            p, hashes = self.dropping.p, self._hashes[block.begin : block.end]
            bits, scratch = torch.empty_like(hashes), torch.empty_like(hashes)
            keep_(
                weights.mul_(1.0 / (1.0 - p)),
                keep_bits(hashes, self.dropping.heads[head], p=p, out=bits, scratch=scratch),
            )
        return weights


def listed(values: Tensor, rows: Tensor | None) -> Tensor:
    """Of the rows of a CSR. Shapes: [N, ...] -> [R, ...]."""
    return values if rows is None else values.index_select(0, rows)


def _own_slope_(z: Tensor, slope: float, one: Tensor) -> Tensor:
    """Return the slope of the activation, over its argument."""
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
    dtype, num_heads, width = accumulate_dtype(x.dtype), *x.shape[1:]
    mask = Mask(drop, edge_ids, num_heads)
    if indices.shape[0] == 0:
        return empty_state(num_rows, x, dtype, False) if state is None else state
    near, a, num_listed = listed(y, rows), a.to(dtype), indptr.shape[0] - 1
    slices = _Slices(indptr, indices, width=width, dtype=dtype)
    m = torch.zeros((num_listed, num_heads), dtype=dtype)
    m[indptr[1:] == indptr[:-1]] = -torch.inf
    mass, acc = torch.empty_like(m), torch.empty((num_listed, num_heads, width), dtype=dtype)
    far_rows, near_rows = (torch.empty((t.shape[0], width), dtype=dtype) for t in (x, near))
    ones = torch.ones(slices.places.shape[0], dtype=dtype)
    for head in range(num_heads):
        head_table(x, head, out=far_rows)
        head_table(near, head, out=near_rows)
        for block in slices.blocks:
            span, edges = slice(block.first, block.last), block.num_edges
            score, spare = (t[:edges] for t in slices.narrow)
            value = slices.gather(block, far_rows)
            z = slices.spread(block, near_rows, slices.wide[0][:edges]).add_(value)
            torch.ops.aten.leaky_relu.out(z, slope, out=z)
            torch.mv(z, a[head], out=score)
            if edges and float(torch.abs(score, out=spare).max()) > PLAIN:
                top = torch.segment_reduce(score, "max", offsets=block.offsets.long(), initial=-torch.inf)
                m[span, head] = top
                score.sub_(slices.spread_own(block, top, spare))
            weights = score.exp_()
            mass[span, head] = weighted_sums(ones[:edges], slices.places[:edges], block.offsets, weights)
            acc[span, head] = slices.sums(block, value, mask.apply_(block, head, weights))
    return chain((m, mass, acc), x, state=state, rows=rows, num_rows=num_rows)


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
    mask = Mask(drop, forward.edge_ids, num_heads)
    grad_x, grad_y, grad_a = (torch.zeros(t.shape, dtype=dtype) for t in (x, y, a))
    num_edges = forward.indices.shape[0]
    if num_edges > 0:
        wide = a.to(dtype)
        lse_row, delta_row = (listed(t.to(dtype), forward.rows).t().contiguous() for t in (lse, delta))
        ins, outs = (_Slices(csr.indptr, csr.indices, width=width, dtype=dtype) for csr in (forward, reverse))
        far, near, pulled = (torch.empty((t.shape[0], width), dtype=dtype) for t in (x, y, grad_out))
        weights, ds = torch.empty(num_edges, dtype=dtype), torch.empty(num_edges, dtype=dtype)
        for head in range(num_heads):
            for table, whole in ((far, x), (near, y), (pulled, grad_out)):
                head_table(whole, head, out=table)
            own = listed(near, forward.rows)
            ends = _Ends(own, listed(pulled, forward.rows), lse_row[head], delta_row[head])
            rows = _by_destination(ins, far, ends, wide[head], slope, mask, head, weights, ds)
            put(grad_y, head, forward.rows, rows * wide[head])
            grad_a[head] = rows.mul_(own).sum(0)
            own = listed(far, reverse.rows)
            rows, values = _by_source(outs, near, pulled, own, slope, order, weights, ds)
            put(grad_x, head, reverse.rows, values.addcmul_(rows, wide[head]))
            grad_a[head] += rows.mul_(own).sum(0)
    return grad_x.to(x.dtype), grad_y.to(y.dtype), grad_a.to(a.dtype)


class _Ends(NamedTuple):
    """What one head reads of the CSR's rows. Shapes: near, pulled [R, D], lse, delta [R]."""

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
    mask: Mask,
    head: int,
    weights: Tensor,
    ds: Tensor,
) -> Tensor:
    """sum_j ds s'(z) [R, D]; alpha K and ds of every edge are written to `weights` and `ds`, [E]."""
    sums, one = torch.empty_like(ends.near), far.new_ones(())
    for block in slices.blocks:
        edges, span = block.num_edges, slice(block.begin, block.end)
        z, other = (t[:edges] for t in slices.wide)
        alpha, spare = (t[:edges] for t in slices.narrow)
        value = slices.gather(block, far)
        slices.spread(block, ends.near, z).add_(value)
        torch.ops.aten.leaky_relu.out(z, slope, out=other)
        torch.mv(other, a, out=alpha).sub_(slices.spread(block, ends.lse, spare)).exp_()
        kept, slope_of_score = weights[span], ds[span]
        mask.apply_(block, head, kept.copy_(alpha))
        torch.sum(slices.spread(block, ends.pulled, other).mul_(value), -1, out=slope_of_score)
        alpha.mul_(slices.spread(block, ends.delta, spare))
        slope_of_score.mul_(kept).sub_(alpha)
        _own_slope_(z, slope, one)
        sums[block.first : block.last] = slices.sums(block, z, slope_of_score)
    return sums


def _by_source(
    slices: _Slices, near: Tensor, pulled: Tensor, own: Tensor, slope: float, order: Tensor, weights: Tensor, ds: Tensor
) -> tuple[Tensor, Tensor]:
    """(sum_i ds s'(z), sum_i alpha K dO_i), each [R, D]."""
    sums, values, one = torch.empty_like(own), torch.empty_like(own), near.new_ones(())
    for block in slices.blocks:
        edges, places = block.num_edges, order[block.begin : block.end]
        here = slices.narrow[0][:edges]
        z = slices.gather(block, near).add_(slices.spread(block, own, slices.wide[0][:edges]))
        _own_slope_(z, slope, one)
        sums[block.first : block.last] = slices.sums(block, z, torch.index_select(ds, 0, places, out=here))
        torch.index_select(weights, 0, places, out=here)
        values[block.first : block.last] = bag(pulled, block.indices, block.offsets, here)
    return sums, values


def put(whole: Tensor, head: int, rows: Tensor | None, part: Tensor) -> None:
    """Shapes: whole [N, H, D], part [R, D]."""
    if rows is None:
        whole[:, head] = part
    else:
        whole[rows, head] = part
