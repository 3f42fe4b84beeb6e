"""Maximum over in-edges with its winner, by torch's CSR reduction, which is parallel over rows and returns the edge.

It keeps the first of equal values: the smallest id if a row's indices ascend; other rows are sorted first.
"""

from math import prod

import torch
from torch import Tensor

from gnnpar_kernels.cpu_bags import refuse_outside
from gnnpar_kernels.csr import accumulate_dtype, edge_rows, flat_rows
from gnnpar_kernels.extremum.naive import State


def _ascending(indptr: Tensor, indices: Tensor) -> Tensor:
    """Return the indices, sorted within each row. Shapes: [E] -> [E]."""
    steps = indices[1:] >= indices[:-1]
    starts = indptr[1:-1].long()
    starts = starts[(starts > 0) & (starts < indices.shape[0])]
    steps[starts - 1] = True
    if bool(steps.all()):
        return indices
    width = int(indices.max()) + 1
    return ((edge_rows(indptr) * width + indices).sort().values % width).to(indices.dtype)


def _reduce(indptr: Tensor, indices: Tensor, table: Tensor) -> tuple[Tensor, Tensor]:
    """Return (maximum, winning edge) of every row; -inf never wins. Shapes: table [M, W] -> [R, W] twice."""
    size = (indptr.shape[0] - 1, table.shape[0])
    with torch.inference_mode(False), torch.enable_grad():  # torch returns the winners only if a gradient can follow
        indptr, indices, table = (t.clone() if t.is_inference() else t.detach() for t in (indptr, indices, table))
        ones = torch.ones(indices.shape[0], dtype=table.dtype)
        adjacency = torch.sparse_csr_tensor(indptr, indices, ones, size, check_invariants=False)
        best, edge = torch.ops.aten._sparse_mm_reduce_impl(adjacency, table.requires_grad_(), "amax")
    return best.detach(), edge.detach()


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
    """See `naive.extremum`. A given state is updated in place."""
    width = prod(x.shape[1:])
    if state is None:
        shape = (num_rows, *x.shape[1:])
        state = x.new_full(shape, -torch.inf), torch.full(shape, -1, dtype=torch.int64)
    if indices.shape[0] == 0 or width == 0:
        return state
    refuse_outside(indices, x.shape[0])
    indices = _ascending(indptr, indices)
    best, edge = _reduce(indptr, indices, flat_rows(x))
    first = indptr[:-1]
    used = torch.nonzero(indptr[1:] > first)[:, 0]
    if used.shape[0] < best.shape[0]:
        best, edge, first = (t.index_select(0, used) for t in (best, edge, first))
        rows = used if rows is None else rows.index_select(0, used)
    no_winner = edge >= indices.shape[0]
    if bool(no_winner.any()):  # all values of the row are -inf: the first edge has the smallest id
        edge = torch.where(no_winner, first[:, None].to(edge.dtype), edge)
    winner = src_ids.index_select(0, indices).index_select(0, edge.reshape(-1)).view(-1, width)
    where = slice(None) if rows is None else rows
    _merge_(state, best.view(-1, *x.shape[1:]), winner.view(-1, *x.shape[1:]), where)
    return state


def _merge_(state: State, best: Tensor, winner: Tensor, where: slice | Tensor) -> None:
    """Fold winners of some rows into the state. Of equal values the smaller id wins; -1: no winner."""
    best_before, arg_before = state[0][where], state[1][where]
    wins = (best > best_before) | ((best == best_before) & (winner < arg_before)) | (arg_before < 0)
    state[0][where] = torch.maximum(best, best_before)
    state[1][where] = torch.where(wins, winner, arg_before)


def extremum_grad(arg: Tensor, src_ids: Tensor, grad_out: Tensor) -> Tensor:
    """See `naive.extremum_grad`. Consecutive ids are located by subtraction, others by search."""
    num_src = src_ids.shape[0]
    if num_src == 0 or grad_out.numel() == 0:
        return grad_out.new_zeros((num_src, *grad_out.shape[1:]))
    first = int(src_ids[0])
    if int(src_ids[-1]) - first + 1 != num_src:
        place = torch.searchsorted(src_ids, arg.contiguous()).clamp_(max=num_src - 1)
        here = src_ids.take(place) == arg
    else:
        place = arg - first
        here = (place >= 0) & (place < num_src)
        place.clamp_(0, num_src - 1)
    width = prod(grad_out.shape[1:])
    flat = place.view(-1, width).mul_(width).add_(torch.arange(width))
    grad_x = torch.zeros(num_src * width, dtype=accumulate_dtype(grad_out.dtype))
    grad_x.scatter_add_(0, flat.view(-1), (grad_out * here).reshape(-1).to(grad_x.dtype))
    return grad_x.view(num_src, *grad_out.shape[1:]).to(grad_out.dtype)
