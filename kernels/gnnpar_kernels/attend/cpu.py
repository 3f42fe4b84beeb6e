"""GAT aggregation and its gradients on a CPU: weighted embedding bags per head, no product per edge.

alpha = exp(score) exp(-lse_i): if scores are small, exp(-lse) multiplies rows, not edges. See kernels/README.md for the
sums that the gradients are.
"""

from typing import NamedTuple, Unpack

import torch
from torch import Tensor

from gnnpar_kernels.attend import naive
from gnnpar_kernels.attend.cpu_edges import PLAIN, Add, Edges, Weigh, csr_rows, fold_rows, head_table, top
from gnnpar_kernels.attend.naive import Drop, State, Where
from gnnpar_kernels.cpu_bags import RowBlock, bag, weighted_sums
from gnnpar_kernels.csr import accumulate_dtype
from gnnpar_kernels.dispatch import specified

ROWS = 2048  # rows of a temporary that stays in cache


class _Ends(NamedTuple):
    """Scores of both ends for one head, and shifts to subtract from the score before exp, if any.

    Shapes: row, row_shift [R] by CSR row; col, col_shift [M] by index.
    """

    row: Tensor
    col: Tensor
    row_shift: Tensor | None = None
    col_shift: Tensor | None = None


def _is_plain(a_src: Tensor, a_dst: Tensor, slope: float) -> bool:
    """Return True if the scores of all edges must be in [-PLAIN, PLAIN], so that exp needs no shift."""
    if a_src.numel() == 0 or a_dst.numel() == 0:
        return True
    return float(a_src.abs().max() + a_dst.abs().max()) * max(1.0, abs(slope)) <= PLAIN


class _Weights(Edges):
    """The edges of one CSR: weights of a head at a time, with the activation's slope."""

    def __init__(self, indptr: Tensor, indices: Tensor, dtype: torch.dtype, *, slope: float, **dropping) -> None:
        super().__init__(indptr, indices, dtype, **dropping)
        self.slope = slope
        self._score, self._spare = torch.empty_like(self.numbers)

    def top(self, block: RowBlock, ends: _Ends) -> Tensor:
        """Return the largest activated score of each row, -inf without an edge. Shapes: -> [rows of the block]."""
        score = self._score_of(block, ends)
        return top(block, torch.ops.aten.leaky_relu.out(score, self.slope, out=score))

    def weights(self, block: RowBlock, ends: _Ends, slope: float | None = None) -> tuple[Tensor, ...]:
        """Return exp(leaky_relu(score) - shift) of a block's edges, and with `slope` also the weights times the slope
        of an activation: 1 for positive scores, `slope` for others. Shapes: -> [edges of the block] each, buffers."""
        score, (weight, sloped) = self._score_of(block, ends), self.numbers[:, : block.num_edges]
        torch.ops.aten.leaky_relu.out(score, self.slope, out=weight)
        spare = self._spare[: block.num_edges]
        if ends.row_shift is not None:
            weight.sub_(self.spread(block, ends.row_shift, spare))
        if ends.col_shift is not None:
            weight.sub_(torch.index_select(ends.col_shift, 0, block.indices, out=spare))
        weight.exp_()
        if slope is None:
            return (weight,)
        return weight, torch.ops.aten.leaky_relu_backward.grad_input(weight, score, slope, False, grad_input=sloped)

    def _score_of(self, block: RowBlock, ends: _Ends) -> Tensor:
        score, spare = self._score[: block.num_edges], self._spare[: block.num_edges]
        torch.index_select(ends.col, 0, block.indices, out=score)
        return score.add_(self.spread(block, ends.row, spare))


@specified(naive.attend)
def attend(
    indptr: Tensor,
    indices: Tensor,
    x: Tensor,
    a_src: Tensor,
    a_dst: Tensor,
    *,
    slope: float,
    branch: bool,
    **where: Unpack[Where],
) -> State:
    dtype = accumulate_dtype(x.dtype)
    a_src, a_dst = a_src.to(dtype), a_dst.to(dtype)
    plain = _is_plain(a_src, a_dst, slope)
    a_row, a_col = csr_rows(a_dst, where["rows"]).t().contiguous(), a_src.t().contiguous()
    dropping = {"heads": x.shape[1], "drop": where["drop"], "edge_ids": where["edge_ids"]}
    edges = _Weights(indptr, indices, dtype, slope=slope, **dropping)
    table = torch.empty((x.shape[0], x.shape[2]), dtype=dtype)

    def head_of(head: int) -> tuple[Weigh, Add]:
        head_table(x, head, out=table)

        def weigh(block: RowBlock, m: Tensor) -> tuple[Tensor, ...]:
            ends = _Ends(a_row[head], a_col[head])
            if not plain:
                m[block.first : block.last] = edges.top(block, ends)
                ends = ends._replace(row_shift=m)
            return edges.weights(block, ends, 0.0 if branch else None)

        return weigh, lambda block, weights: bag(table, block.indices, block.offsets, weights)

    return fold_rows(edges, x, head_of, branch=branch, **where)


@specified(naive.attend_finish)
def attend_finish(state: State) -> tuple[Tensor, ...]:
    m, mass, acc, *positive = state  # the results overwrite the sums of rows
    empty = mass == 0
    inverse = mass.reciprocal().masked_fill_(empty, 0.0)
    lse = (m + mass.log()).masked_fill_(empty, torch.inf)
    acc.mul_(inverse[..., None])
    if not positive:
        return acc, lse
    mass_pos, pos = positive
    return acc, lse, mass_pos * inverse, pos.mul_(inverse[..., None])


@specified(naive.row_dots)
def row_dots(a: Tensor, b: Tensor, *, dtype: torch.dtype) -> Tensor:
    dots = torch.empty(a.shape[:2], dtype=dtype)
    for first in range(0, a.shape[0], ROWS):  # as many rows at a time as fit the cache
        span = slice(first, first + ROWS)
        dots[span] = a[span].to(dtype).mul(b[span].to(dtype)).sum(-1)
    return dots


def _gradients(
    indptr: Tensor,
    indices: Tensor,
    tensors: tuple[Tensor, ...],
    *,
    source: bool,
    slope: float,
    rows: Tensor | None,
    drop: Drop | None,
    edge_ids: Tensor | None,
    delta: Tensor,
) -> tuple[Tensor, ...]:
    """Return the gradients of one side, see `naive.sides`."""
    x, a_src, a_dst, _, lse, grad_out = tensors
    table, own, of_row, of_index = (grad_out, x, a_src, a_dst) if source else (x, grad_out, a_dst, a_src)
    dtype, own, near, far = lse.dtype, csr_rows(own, rows), of_row.to(lse.dtype), of_index.to(lse.dtype)
    # exp(-lse) for rows, if exp of scores needs no shift. Rows with lse below all scores have no edge here
    factor = torch.exp(-lse.clamp(min=-PLAIN - 1.0)) if _is_plain(near, far, slope) else None
    edges = _Weights(indptr, indices, dtype, slope=slope, heads=x.shape[1], drop=drop, edge_ids=edge_ids)
    near, far = csr_rows(near, rows).t().contiguous(), far.t().contiguous()
    shift = (lse if source else csr_rows(lse, rows)).t().contiguous()
    numbers = delta if factor is None else delta * factor
    numbers = numbers.t().contiguous() if source else torch.ones_like(far)
    sums = torch.empty(own.shape if source else 0, dtype=dtype)
    grad, lost = (torch.empty(own.shape[:2], dtype=dtype) for _ in range(2))
    of_head = torch.empty((table.shape[0], table.shape[2]), dtype=dtype)
    for head in range(x.shape[1]):
        head_table(table, head, out=of_head, scale=factor if source else None)
        ends = _Ends(near[head], far[head])
        if factor is None:
            ends = ends._replace(**{"col_shift" if source else "row_shift": shift[head]})
        for block in edges.blocks:
            span = slice(block.first, block.last)
            weights, sloped = edges.weights(block, ends, slope)
            lost[span, head] = weighted_sums(numbers[head], block.indices, block.offsets, sloped)
            edges.drop_(block, head, *(weights, sloped) if source else (sloped,))
            if source:
                sums[span, head] = bag(of_head, block.indices, block.offsets, weights)
            grad[span, head] = bag(of_head, block.indices, block.offsets, sloped).mul_(own[span, head]).sum(-1)
    if source:
        return _spread(sums, rows, x), _spread(grad.sub_(lost), rows, a_src)
    grad.sub_(lost.mul_(csr_rows(delta, rows)))
    return (_spread(grad if factor is None else grad.mul_(csr_rows(factor, rows)), rows, a_dst),)


def _spread(part: Tensor, rows: Tensor | None, like: Tensor) -> Tensor:
    """Scatter rows to their places among zeros. Shapes: part [R, ...], rows [R] -> as `like`, in its type."""
    part = part.to(like.dtype)
    return part if rows is None else part.new_zeros(like.shape).index_copy_(0, rows, part)


attend_grad_src, attend_grad_dst, attend_grad = naive.sides(_gradients, row_dots)


@specified(naive.attend_grad_dst_of)
def attend_grad_dst_of(
    grad_out: Tensor, out: Tensor, pos: Tensor, mass_pos: Tensor, *, slope: float, delta: Tensor | None
) -> Tensor:
    dtype = mass_pos.dtype
    delta = row_dots(out, grad_out, dtype=dtype) if delta is None else delta.to(dtype)
    return row_dots(grad_out, pos, dtype=dtype).addcmul_(mass_pos, delta, value=-1.0).mul_(1.0 - slope)
