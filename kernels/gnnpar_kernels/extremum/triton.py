"""Maximum over in-edges with its winner: value and source compared in registers, ties to the smaller source.

Ids ascend with sources, so local numbers decide the winners within a block; an id is read once per winner, to compare
it with the state.
"""

# pyright: reportCallIssue=false, reportIndexIssue=false, reportAttributeAccessIssue=false, reportArgumentType=false
# pyright: reportGeneralTypeIssues=false

import torch
import triton
import triton.language as tl
from torch import Tensor

from gnnpar_kernels.csr import accumulate_dtype
from gnnpar_kernels.extremum import naive
from gnnpar_kernels.extremum.naive import State
from gnnpar_kernels.triton_rows import NO_SOURCE, Reduction, reduce_rows
from gnnpar_kernels.triton_tasks import LOW


@triton.jit
def _larger(best, source, value, other, TILE: tl.constexpr):
    """Return the larger of two values with its source, the smaller source if they are equal."""
    other = other.to(tl.int32)
    if TILE:
        top = tl.max(value, 0)
        other = tl.min(tl.where(value == top[None, :], other, NO_SOURCE), 0)
        value = top
    top = tl.maximum(best, value)
    return top, tl.minimum(tl.where(best == top, source, NO_SOURCE), tl.where(value == top, other, NO_SOURCE))


@triton.jit
def _write(best, arg, ids, place, mask, top, source, FRESH: tl.constexpr):
    """Merge the winners of this block into the state."""
    won = mask & (source != NO_SOURCE)
    if FRESH:
        winner = tl.load(ids + source, mask=won, other=-1)
    else:  # load ids of possible winners only
        best_before, arg_before = tl.load(best + place, mask=won, other=0.0), tl.load(arg + place, mask=won, other=0)
        won &= (top >= best_before) | (arg_before < 0)
        winner = tl.load(ids + source, mask=won, other=-1)
        mask = won & ((top != best_before) | (winner < arg_before) | (arg_before < 0))
    tl.store(best + place, top, mask=mask)
    tl.store(arg + place, winner, mask=mask)


MAXIMUM = Reduction(_larger, _write, empty=-float("inf"), slots=4, bound=LOW[-1])


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
    assert rows is not None or indptr.shape[0] == num_rows + 1, f"{indptr.shape[0] - 1} CSR rows, {num_rows} of output"
    shape, empty = (num_rows, *x.shape[1:]), indices.shape[0] == 0 or x[:1].numel() == 0
    fresh = state is None and rows is None and not empty
    if fresh:
        best, arg = x.new_empty(shape), src_ids.new_empty(shape)
    elif state is None:
        best, arg = x.new_full(shape, -torch.inf), src_ids.new_full(shape, -1)
    else:
        best, arg = state[0].contiguous(), state[1].contiguous()
    if not empty:
        ids = src_ids.contiguous()
        reduce_rows(MAXIMUM, indptr, indices, x, best, fresh=fresh, rows=rows, arg=arg, ids=ids)
    if state is None:
        return best, arg
    for given, updated in zip(state, (best, arg), strict=True):
        if given is not updated:
            given.copy_(updated)
    return state


def extremum_grad(arg: Tensor, src_ids: Tensor, grad_out: Tensor) -> Tensor:
    """See `naive.extremum_grad`; sums in at least fp32. Order of torch's atomics, so the last bits, may vary."""
    grad_x = naive.extremum_grad(arg, src_ids, grad_out.to(accumulate_dtype(grad_out.dtype)))
    return grad_x.to(grad_out.dtype)
