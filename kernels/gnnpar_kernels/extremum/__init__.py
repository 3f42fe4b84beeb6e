"""Maximum over in-edges with the global id of its one winner, the smallest id among equals, and its gradient.

Shapes: x [M, ...], src_ids [M] int64 ascending -> best [N, ...], arg [N, ...] int64; the gradient is again [M, ...].
Floor of fp32 rows of F entries: E (4 F + 4) + N (12 F + 8) bytes, as the winners are int64.
"""

import torch
from torch import Tensor

from gnnpar_kernels.dispatch import body_of
from gnnpar_kernels.extremum.naive import State
from gnnpar_kernels.registration import CSR, define, public

_BLOCK = f"{CSR}, Tensor x, Tensor src_ids, SymInt num_rows, Tensor? rows"


def _fake_extremum(
    indptr: Tensor, indices: Tensor, x: Tensor, src_ids: Tensor, num_rows: int, rows: Tensor | None
) -> State:
    shape = (num_rows, *x.shape[1:])
    return x.new_empty(shape), x.new_empty(shape, dtype=torch.int64)


@define(f"extremum({_BLOCK}) -> (Tensor, Tensor)", fake=_fake_extremum)
def _extremum(indptr: Tensor, indices: Tensor, x: Tensor, src_ids: Tensor, num_rows: int, rows: Tensor | None) -> State:
    return body_of("extremum", x.device)(indptr, indices, x, src_ids, num_rows=num_rows, rows=rows)


@define(f"extremum_({_BLOCK}, Tensor(a!) best, Tensor(b!) arg) -> ()")
def _extremum_(
    indptr: Tensor,
    indices: Tensor,
    x: Tensor,
    src_ids: Tensor,
    num_rows: int,
    rows: Tensor | None,
    best: Tensor,
    arg: Tensor,
) -> None:
    state = (best, arg)
    after = body_of("extremum", x.device)(indptr, indices, x, src_ids, num_rows=num_rows, rows=rows, state=state)
    for old, new in zip(state, after, strict=True):
        if new is not old:
            old.copy_(new)


@public
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
    if state is None:
        return _extremum(indptr, indices, x, src_ids, num_rows, rows)
    _extremum_(indptr, indices, x, src_ids, num_rows, rows, *state)
    return state


@define("extremum_finish(Tensor best, Tensor arg) -> Tensor", fake=lambda best, arg: torch.empty_like(best))
def _extremum_finish(best: Tensor, arg: Tensor) -> Tensor:
    return body_of("extremum_finish", best.device)((best, arg))


@public
def extremum_finish(state: State) -> Tensor:
    return _extremum_finish(*state)


@define(
    "extremum_grad(Tensor arg, Tensor src_ids, Tensor grad_out) -> Tensor",
    fake=lambda arg, src_ids, grad_out: grad_out.new_empty((src_ids.shape[0], *grad_out.shape[1:])),
)
def _extremum_grad(arg: Tensor, src_ids: Tensor, grad_out: Tensor) -> Tensor:
    return body_of("extremum_grad", arg.device)(arg, src_ids, grad_out)


@public
def extremum_grad(arg: Tensor, src_ids: Tensor, grad_out: Tensor) -> Tensor:
    return _extremum_grad(arg, src_ids, grad_out)
