"""Maximum over in-edges with the global id of its winner: the specification, scatter_reduce over all edges.

Ties go to the smallest id, in a block and across blocks, so any order of blocks gives the same result.
"""

import torch
from torch import Tensor

from gnnpar_kernels.csr import edge_rows

State = tuple[Tensor, Tensor]
NO_WINNER = torch.iinfo(torch.int64).max


def extremum(
    indptr: Tensor,
    indices: Tensor,
    x: Tensor,
    src_ids: Tensor,
    *,
    num_rows: int,
    rows: Tensor | None = None,
    state: State | None = None,
) -> State:
    """Fold one block of in-edges into (best, arg); without edges, best is -inf and arg is -1.

    Shapes: x [M, ...], src_ids [M] int64 ascending -> best [num_rows, ...], arg [num_rows, ...] int64.
    """
    shape = (num_rows, *x.shape[1:])
    if state is None:
        state = x.new_full(shape, -torch.inf), torch.full(shape, -1, dtype=torch.int64, device=x.device)
    before, arg_before = state
    i = edge_rows(indptr, rows)
    values = x.index_select(0, indices)
    where = i.view(-1, *[1] * (x.dim() - 1)).expand_as(values)
    best = before.scatter_reduce(0, where, values, "amax")
    ids = src_ids.index_select(0, indices).view(-1, *[1] * (x.dim() - 1)).expand_as(values)
    ids = torch.where(values == best.index_select(0, i), ids, NO_WINNER)
    candidates = torch.where((before == best) & (arg_before >= 0), arg_before, NO_WINNER)
    arg = candidates.scatter_reduce(0, where, ids, "amin")
    return best, torch.where(arg == NO_WINNER, -1, arg)


def extremum_finish(state: State) -> Tensor:
    """Return the maximum, 0 without edges. Shapes: state of `extremum` -> [N, ...]."""
    best, arg = state
    return torch.where(arg >= 0, best, torch.zeros((), dtype=best.dtype, device=best.device))


def extremum_grad(arg: Tensor, src_ids: Tensor, grad_out: Tensor) -> Tensor:
    """Return the gradient of the winners in this block. Shapes: arg, grad_out [N, ...], src_ids [M] -> [M, ...]."""
    num_src = src_ids.shape[0]
    grad_x = grad_out.new_zeros((num_src, *grad_out.shape[1:]))
    if num_src == 0 or grad_out.numel() == 0:
        return grad_x
    place = torch.searchsorted(src_ids, arg.contiguous()).clamp_(max=num_src - 1)
    here = src_ids[place] == arg
    return grad_x.scatter_add_(0, place, torch.where(here, grad_out, torch.zeros_like(grad_out)))
