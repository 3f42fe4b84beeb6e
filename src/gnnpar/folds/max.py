"""Maximum over in-edges, element by element, with one winner per element. GraphSAGE-max."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from gnnpar.folds.aggregator import ByBlock, Separates
from gnnpar.folds.block import Block, Operands, Rows, refuse_short, widened
from gnnpar.folds.mergeable import Merging
from gnnpar_kernels import extremum, extremum_finish, extremum_grad


class MergingMax(Merging):
    """Maxima merge by the ids of their winners. Of equal values of several ranks, the smallest id wins."""

    def partial(self, out: Tensor, saved: Rows, dtype: torch.dtype) -> Rows:
        """Return maxima and ids. Ids have 32 bits unless values have more, so that values are aligned in a message."""
        return out.to(dtype), saved[0] if dtype == torch.float64 else saved[0].int()

    def exact_numbers(self, shape: Sequence[int]) -> tuple[int, int]:
        return math.prod(shape), 0

    def merge(self, state: Rows, at: Tensor, partial: Rows) -> Rows:
        best, arg = (each.index_select(0, at) for each in state)
        values, ids = partial[0].to(best.dtype), partial[1].long()
        wins = (values > best) | (values == best) & ((ids < arg) | (arg < 0))
        state[0].index_copy_(0, at, torch.where(wins, values, best))
        state[1].index_copy_(0, at, torch.where(wins, ids, arg))
        return state

    def grad_partial(self, exact: Rows, at: Tensor, prepared: Rows, grad_out: Tensor) -> Rows:
        return (grad_out.index_select(0, at) * (prepared[0].index_select(0, at) == exact[0]),)


@dataclass(frozen=True)
class Max(ByBlock):
    """out_i = max_j x_j (0 without in-edges). Ties go to the smallest global id, so any split of the edges agrees.

    A block must hold all edges between its rows and its columns: the winner's id then identifies its edge.

    Shapes: src (x [M, F],) -> out [N, F]; the gradient goes to the winner alone.
    """

    needs_src = False  # the winner's id is saved, not its value
    linear = False
    summed = False
    merging = MergingMax()

    @property
    def separates(self) -> Separates:
        return "columns"

    def update(self, state: Rows, block: Block, x: Operands) -> Rows:
        refuse_short(block, x.src)
        if not block.ascends:
            block, order = block.by_id
            x = x._replace(src=(x.src[0][order],))
        assert block.src_ids is not None
        best, arg = extremum(
            block.indptr,
            block.indices,
            x.src[0],
            block.src_ids,
            num_rows=block.num_dst,
            rows=block.rows,
            state=(state[0], state[1]) if state else None,
        )
        return best, arg

    def finish(self, state: Rows) -> tuple[Tensor, Rows]:
        best, arg = state
        return widened(extremum_finish((best, arg))), (arg,)

    def grad(self, block: Block, x: Operands, prepared: Rows, grad_out: Tensor) -> Operands:
        if not block.ascends:
            block, order = block.by_id
            (grad,) = self.grad(block, x, prepared, grad_out).src
            return Operands(src=(torch.empty_like(grad).index_copy_(0, order, grad),))
        assert block.src_ids is not None
        arg, rows, columns = prepared[0], block.destinations, block.columns
        if rows is not None:
            arg, grad_out = arg[rows], grad_out[rows]
        if columns is None:
            return Operands(src=(extremum_grad(arg, block.src_ids, grad_out),))
        grad = grad_out.new_zeros(block.num_src, *grad_out.shape[1:])
        grad[columns] = extremum_grad(arg, block.src_ids[columns], grad_out)
        return Operands(src=(grad,))
