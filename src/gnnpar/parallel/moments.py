"""Mean and variance of columns over the rows of all ranks: two sums over ranks forwards, one backwards."""

from __future__ import annotations

import torch
from torch import Tensor

from gnnpar.comm import Communicator, Site
from gnnpar.folds.block import Rows
from gnnpar.parallel.torch_types import Context, apply_to_rows


def moments_of(x: Tensor, rows: int, comm: Communicator | None, site: Site | None) -> Rows:
    """(mean, variance) over the `rows` rows of all ranks together. Collective, as is its gradient.

    The variance is the mean of squares of centred rows: it loses no digits where the mean is large. `comm` None: x has
    all rows. `site` None: not counted. Shapes: x [N, F] -> [F], [F].
    """
    return apply_to_rows(_Moments, x, rows, comm, site)


class _Kept(Context):
    rows: int
    comm: Communicator | None
    site: Site | None


class _Moments(torch.autograd.Function):
    @staticmethod
    def forward(ctx: _Kept, x: Tensor, rows: int, comm: Communicator | None, site: Site | None) -> Rows:
        mean = _over_ranks(x.sum(0), comm, site) / rows
        variance = _over_ranks((x - mean).square_().sum(0), comm, site) / rows
        ctx.rows, ctx.comm, ctx.site = rows, comm, site
        ctx.save_for_backward(x, mean)
        return mean, variance

    @staticmethod
    def backward(ctx: _Kept, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, mean = ctx.saved_tensors
        of_mean, of_variance = _over_ranks(torch.stack(grads), ctx.comm, ctx.site) / ctx.rows
        return ((x - mean) * (2 * of_variance) + of_mean, None, None, None)


def _over_ranks(total: Tensor, comm: Communicator | None, site: Site | None) -> Tensor:
    return total if comm is None else comm.all_reduce(total, site)
