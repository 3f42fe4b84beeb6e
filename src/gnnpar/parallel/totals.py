"""Sums over the rows of all ranks: totals, and the mean and variance of columns.

A total takes one sum over ranks forward and one backward; moments take two and one, of twice the size.
"""

from __future__ import annotations

import torch
from torch import Tensor

from gnnpar.comm import Communicator, MessageTag
from gnnpar.folds.block import Rows, widened
from gnnpar.parallel.torch_types import Context, apply, apply_to_rows


def total_of(part: Tensor, comm: Communicator | None, tag: MessageTag | None) -> Tensor:
    """Sum `part` over ranks, in fp32 at least. Collective, like its gradient: every rank reads the sum, so the
    gradients of all ranks are added. `comm` None: `part` is the total. `tag` None: not counted. Shapes: [...] ->
    [...]."""
    return widened(part) if comm is None else apply(_Total, widened(part), comm, tag)


@torch.no_grad()
def largest_of(part: Tensor, comm: Communicator | None, tag: MessageTag | None) -> Tensor:
    """Return the entrywise maximum over ranks, by a sum of a table with one row per rank. Shapes: [...] -> [...]."""
    if comm is None:
        return part.detach()
    slots = part.new_zeros(comm.size, *part.shape)
    slots[comm.rank] = part
    return comm.all_reduce(slots, tag).amax(0)


def moments_of(x: Tensor, rows: int, comm: Communicator | None, tag: MessageTag | None) -> Rows:
    """Return (mean, variance) over the `rows` rows of all ranks. Collective, like its gradient.

    The variance is the mean of squares of centred rows, which keeps its digits if the mean is large. `comm` None: x has
    all rows. `tag` None: not counted. Shapes: x [N, F] -> [F], [F].
    """
    return apply_to_rows(_Moments, x, rows, comm, tag)


class _Summed(Context):
    comm: Communicator
    tag: MessageTag | None


class _Total(torch.autograd.Function):
    @staticmethod
    def forward(ctx: _Summed, part: Tensor, comm: Communicator, tag: MessageTag | None) -> Tensor:
        ctx.comm, ctx.tag = comm, tag
        return comm.all_reduce(part.contiguous(), tag)

    @staticmethod
    def backward(ctx: _Summed, *grads: Tensor) -> tuple[Tensor, None, None]:
        return ctx.comm.all_reduce(grads[0].contiguous(), ctx.tag), None, None


class _Kept(Context):
    rows: int
    comm: Communicator | None
    tag: MessageTag | None


class _Moments(torch.autograd.Function):
    @staticmethod
    def forward(ctx: _Kept, x: Tensor, rows: int, comm: Communicator | None, tag: MessageTag | None) -> Rows:
        mean = _over_ranks(x.sum(0), comm, tag) / rows
        variance = _over_ranks((x - mean).square_().sum(0), comm, tag) / rows
        ctx.rows, ctx.comm, ctx.tag = rows, comm, tag
        ctx.save_for_backward(x, mean)
        return mean, variance

    @staticmethod
    def backward(ctx: _Kept, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, mean = ctx.saved_tensors
        of_mean, of_variance = _over_ranks(torch.stack(grads), ctx.comm, ctx.tag) / ctx.rows
        return ((x - mean) * (2 * of_variance) + of_mean, None, None, None)


def _over_ranks(total: Tensor, comm: Communicator | None, tag: MessageTag | None) -> Tensor:
    return total if comm is None else comm.all_reduce(total, tag)
