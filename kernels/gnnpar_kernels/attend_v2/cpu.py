"""GATv2 aggregation on a CPU: one head at a time, over slices of whole CSR rows with edge rows that fit the cache.

The activation reads x_j + y_i, so every edge has its own row. It is gathered once per pass; other operations run in
place, in three buffers per slice. With z = x_j + y_i, s' the slope of the activation at z, ds as in `walk_back`:
    dy_i  = a sum_j ds s'(z)                          forward CSR
    dx_j  = a sum_i ds s'(z) + sum_i alpha K dO_i     reverse CSR
    da    = sum_ij ds s'(z) z = sum_i <y_i, dy_i / a> + sum_j <x_j, sum_i ds s'(z)>, by column
"""

from typing import Unpack

import torch
from torch import Tensor

from gnnpar_kernels.attend.cpu_edges import Add, Back, Edges, Weigh, csr_rows, fold_rows, head_table, put, walk_back
from gnnpar_kernels.attend.naive import Drop, State, Where
from gnnpar_kernels.attend_v2 import naive
from gnnpar_kernels.cpu_bags import RowBlock, bag
from gnnpar_kernels.csr import Csr, accumulate_dtype
from gnnpar_kernels.dispatch import specified

BYTES = 1 << 21  # of a buffer of edge rows of a slice
FEWEST = 1024  # edges of a slice


class _Slices(Edges):
    """The slices of one CSR, and buffers for two rows of each of a slice's edges: z, and another."""

    def __init__(self, indptr: Tensor, indices: Tensor, dtype: torch.dtype, *, width: int, **dropping) -> None:
        super().__init__(indptr, indices, dtype, edges=max(BYTES // max(width * dtype.itemsize, 1), FEWEST), **dropping)
        self.wide = torch.empty((2, self.size, width), dtype=dtype)
        self.value = self.wide[0]

    def gather(self, block: RowBlock, table: Tensor) -> Tensor:
        """Return the row of every edge's index. Shapes: table [M, D] -> [edges, D].

        A bag of one row each prefetches: 15 to 20 ns per row of 128 bytes, where `index_select` takes 11 to 35.
        """
        if table.dtype == torch.float64:  # an fp64 bag is a matrix product
            return torch.index_select(table, 0, block.indices)
        return bag(table, block.indices, self.places[: block.num_edges + 1])

    def both_ends(self, block: RowBlock, far: Tensor, near: Tensor) -> Tensor:
        """Return x_j + y_i of every edge, and keep x_j as `value`. Shapes: far [M, D], near [R, D] -> [edges, D]."""
        self.value = self.gather(block, far)
        return self.spread(block, near, self.wide[0, : block.num_edges]).add_(self.value)


@specified(naive.attend_v2)
def attend_v2(
    indptr: Tensor, indices: Tensor, x: Tensor, y: Tensor, a: Tensor, *, slope: float, **where: Unpack[Where]
) -> State:
    dtype, (heads, width), near = accumulate_dtype(x.dtype), x.shape[1:], csr_rows(y, where["rows"])
    dropping = {"heads": heads, "drop": where["drop"], "edge_ids": where["edge_ids"]}
    slices, a = _Slices(indptr, indices, dtype, width=width, **dropping), a.to(dtype)
    far_rows, near_rows = (torch.empty((t.shape[0], width), dtype=dtype) for t in (x, near))

    def head_of(head: int) -> tuple[Weigh, Add]:
        head_table(x, head, out=far_rows)
        head_table(near, head, out=near_rows)

        def weigh(block: RowBlock, m: Tensor) -> tuple[Tensor, ...]:
            z, score = slices.both_ends(block, far_rows, near_rows), slices.numbers[0, : block.num_edges]
            torch.mv(torch.ops.aten.leaky_relu.out(z, slope, out=z), a[head], out=score)
            return (slices.exp_(block, score, m),)

        return weigh, lambda block, weights: slices.sums(block, slices.value, weights)

    return fold_rows(slices, x, head_of, **where)


@specified(naive.attend_v2_grad)
def attend_v2_grad(
    forward: Csr, reverse: Csr, order: Tensor, *tensors: Tensor, slope: float, drop: Drop | None
) -> tuple[Tensor, Tensor, Tensor]:
    x, y, a, lse, grad_out, delta = tensors
    dtype, (heads, width) = lse.dtype, x.shape[1:]
    grad_x, grad_y, grad_a = (torch.zeros(t.shape, dtype=dtype) for t in (x, y, a))
    dropping = {"heads": heads, "drop": drop, "edge_ids": forward.edge_ids}
    ins = _Slices(forward.indptr, forward.indices, dtype, width=width, **dropping)
    outs = _Slices(reverse.indptr, reverse.indices, dtype, width=width)
    far, near, pulled = (torch.empty((t.shape[0], width), dtype=dtype) for t in (x, y, grad_out))
    wide, one = a.to(dtype), lse.new_ones(())

    def own_slope_(z: Tensor) -> Tensor:
        """Return the slope of the activation, written over its argument."""
        return torch.ops.aten.leaky_relu_backward.grad_input(one, z, slope, False, grad_input=z)

    def head_of(head: int) -> Back:
        for table, whole in ((far, x), (near, y), (pulled, grad_out)):
            head_table(whole, head, out=table)
        own_near, own_pulled = csr_rows(near, forward.rows), csr_rows(pulled, forward.rows)
        own_far = csr_rows(far, reverse.rows)

        def score(block: RowBlock, out: Tensor) -> None:
            z, other = ins.both_ends(block, far, own_near), ins.wide[1, : block.num_edges]
            torch.mv(torch.ops.aten.leaky_relu.out(z, slope, out=other), wide[head], out=out)

        def along(block: RowBlock, out: Tensor) -> None:
            torch.sum(ins.spread(block, own_pulled, ins.wide[1, : block.num_edges]).mul_(ins.value), -1, out=out)

        def by_destination(block: RowBlock, ds: Tensor, weights: Tensor) -> Tensor:
            return ins.sums(block, own_slope_(ins.wide[0, : block.num_edges]), ds)

        def by_source(block: RowBlock, ds: Tensor) -> Tensor:
            return outs.sums(block, own_slope_(outs.both_ends(block, near, own_far)), ds)

        def finish(near_sums: Tensor, far_sums: Tensor, values: Tensor) -> None:
            put(grad_y, head, forward.rows, near_sums * wide[head])
            put(grad_x, head, reverse.rows, values.addcmul_(far_sums, wide[head]))
            grad_a[head] = near_sums.mul_(own_near).sum(0) + far_sums.mul_(own_far).sum(0)

        return Back(score, along, by_destination, by_source, finish, pulled)

    lse_row, delta_row = (csr_rows(t.to(dtype), forward.rows) for t in (lse, delta))
    walk_back(ins, outs, order, lse_row, delta_row, (width, width), head_of)
    return grad_x.to(x.dtype), grad_y.to(y.dtype), grad_a.to(a.dtype)
