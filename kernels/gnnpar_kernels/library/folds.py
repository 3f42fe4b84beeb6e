"""Sums and maxima over in-edges as torch ops."""

import torch
from torch import Tensor

from gnnpar_kernels.dispatch import body_of
from gnnpar_kernels.library.register import CSR, define, public


@define(
    f"spmm({CSR}, Tensor x, SymInt num_rows, Tensor? rows) -> Tensor",
    fake=lambda indptr, indices, x, num_rows, rows: x.new_empty((num_rows, *x.shape[1:])),
)
def _spmm(indptr: Tensor, indices: Tensor, x: Tensor, num_rows: int, rows: Tensor | None) -> Tensor:
    return body_of("spmm", x.device)(indptr, indices, x, num_rows=num_rows, rows=rows)


@define(f"spmm_({CSR}, Tensor x, SymInt num_rows, Tensor? rows, Tensor(a!) out) -> ()")
def _spmm_(indptr: Tensor, indices: Tensor, x: Tensor, num_rows: int, rows: Tensor | None, out: Tensor) -> None:
    body_of("spmm", x.device)(indptr, indices, x, num_rows=num_rows, rows=rows, out=out)


@public
def spmm(
    indptr: Tensor, indices: Tensor, x: Tensor, *, num_rows: int, rows: Tensor | None = None, out: Tensor | None = None
) -> Tensor:
    if out is None:
        return _spmm(indptr, indices, x, num_rows, rows)
    _spmm_(indptr, indices, x, num_rows, rows, out)
    return out


_IDS = f"{CSR}, Tensor x, Tensor src_ids, SymInt num_rows, Tensor? rows"


def _fake_extremum(indptr, indices, x, src_ids, num_rows, rows) -> tuple[Tensor, Tensor]:
    shape = (num_rows, *x.shape[1:])
    return x.new_empty(shape), x.new_empty(shape, dtype=torch.int64)


@define(f"extremum({_IDS}) -> (Tensor, Tensor)", fake=_fake_extremum)
def _extremum(indptr, indices, x, src_ids, num_rows, rows) -> tuple[Tensor, Tensor]:
    return body_of("extremum", x.device)(indptr, indices, x, src_ids, num_rows=num_rows, rows=rows)


@define(f"extremum_({_IDS}, Tensor(a!) best, Tensor(b!) arg) -> ()")
def _extremum_(indptr, indices, x, src_ids, num_rows, rows, best, arg) -> None:
    after = body_of("extremum", x.device)(
        indptr, indices, x, src_ids, num_rows=num_rows, rows=rows, state=(best, arg)
    )  # fmt: skip
    for old, new in zip((best, arg), after, strict=True):
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
    state: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor]:
    if state is None:
        return _extremum(indptr, indices, x, src_ids, num_rows, rows)
    _extremum_(indptr, indices, x, src_ids, num_rows, rows, *state)
    return state


@define("extremum_finish(Tensor best, Tensor arg) -> Tensor", fake=lambda best, arg: torch.empty_like(best))
def _extremum_finish(best: Tensor, arg: Tensor) -> Tensor:
    return body_of("extremum_finish", best.device)((best, arg))


@public
def extremum_finish(state: tuple[Tensor, Tensor]) -> Tensor:
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
