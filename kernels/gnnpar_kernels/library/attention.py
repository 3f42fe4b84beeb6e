"""Attention as torch ops: the fold, its end, and its gradient by side."""

from typing import Any

import torch
from torch import Tensor

from gnnpar_kernels.csr import Csr, accumulate_dtype
from gnnpar_kernels.dispatch import body_of
from gnnpar_kernels.library.register import CSR, DROP, Drop, define, flat_drop, public
from gnnpar_kernels.naive.attend import State

_SCORED = "Tensor x, Tensor a_src, Tensor a_dst"
_BLOCK = f"{CSR}, {_SCORED}, float slope, SymInt num_rows, Tensor? rows, {DROP}, Tensor? edge_ids, bool branch"
_GRAD = (
    f"{CSR}, {_SCORED}, Tensor out, Tensor lse, Tensor grad_out, float slope, Tensor? rows, {DROP}, Tensor? edge_ids, "
    "Tensor? delta"
)


def _fake_attend(indptr, indices, x, a_src, a_dst, slope, num_rows, rows, p, key, edge_ids, branch) -> list[Tensor]:
    dtype = accumulate_dtype(x.dtype)
    small, wide = (num_rows, x.shape[1]), (num_rows, *x.shape[1:])
    shapes = (small, small, wide, small, wide) if branch else (small, small, wide)
    return [x.new_empty(shape, dtype=dtype) for shape in shapes]


@define(f"attend({_BLOCK}) -> Tensor[]", fake=_fake_attend)
def _attend(indptr, indices, x, a_src, a_dst, slope, num_rows, rows, p, key, edge_ids, branch) -> list[Tensor]:
    state = body_of("attend", x.device)(
        indptr, indices, x, a_src, a_dst, slope=slope, num_rows=num_rows, rows=rows, drop=(p, key), edge_ids=edge_ids,
        branch=branch,
    )  # fmt: skip
    return list(state)


@define(f"attend_({_BLOCK}, Tensor(a!)[] state) -> ()")
def _attend_(indptr, indices, x, a_src, a_dst, slope, num_rows, rows, p, key, edge_ids, branch, state) -> None:
    after = body_of("attend", x.device)(
        indptr, indices, x, a_src, a_dst, slope=slope, num_rows=num_rows, rows=rows, state=tuple(state), drop=(p, key),
        edge_ids=edge_ids, branch=branch,
    )  # fmt: skip
    for old, new in zip(state, after, strict=True):
        if new is not old:
            old.copy_(new)


@public
def attend(
    indptr: Tensor,
    indices: Tensor,
    x: Tensor,
    a_src: Tensor,
    a_dst: Tensor,
    *,
    slope: float,
    num_rows: int,
    rows: Tensor | None = None,
    state: State | None = None,
    drop: Drop | None = None,
    edge_ids: Tensor | None = None,
    branch: bool = False,
) -> State:
    flat = (indptr, indices, x, a_src, a_dst, slope, num_rows, rows, *flat_drop(drop), edge_ids, branch)
    if state is None:
        return tuple(_attend(*flat))
    _attend_(*flat, list(state))
    return state


@define("attend_finish_(Tensor(a!) m, Tensor mass, Tensor(b!) acc, Tensor(c!)? mass_pos, Tensor(d!)? pos) -> ()")
def _attend_finish_(m: Tensor, mass: Tensor, acc: Tensor, mass_pos: Tensor | None, pos: Tensor | None) -> None:
    """Over the state: acc becomes the output, m the logsumexp."""
    state = (m, mass, acc) if mass_pos is None else (m, mass, acc, mass_pos, pos)
    places = (acc, m, mass_pos, pos)
    for place, result in zip(places, body_of("attend_finish", m.device)(state), strict=False):
        if place is not None and result is not place:
            place.copy_(result)


@public
def attend_finish(state: State) -> tuple[Tensor, ...]:
    m, mass, acc, *branch = state
    _attend_finish_(m, mass, acc, *(branch or (None, None)))
    return acc, m, *branch


@define(
    f"attend_grad_src({_GRAD}) -> (Tensor, Tensor)",
    fake=lambda indptr, indices, x, a_src, *rest: (x.new_empty(x.shape), a_src.new_empty(a_src.shape)),
)
def _attend_grad_src(
    indptr, indices, x, a_src, a_dst, out, lse, grad_out, slope, rows, p, key, edge_ids, delta
) -> tuple[Tensor, Tensor]:
    return body_of("attend_grad_src", x.device)(
        indptr, indices, x, a_src, a_dst, out, lse, grad_out, slope=slope, rows=rows, drop=(p, key), edge_ids=edge_ids,
        delta=delta,
    )  # fmt: skip


@define(
    f"attend_grad_dst({_GRAD}) -> Tensor",
    fake=lambda indptr, indices, x, a_src, a_dst, *rest: a_dst.new_empty(a_dst.shape),
)
def _attend_grad_dst(
    indptr, indices, x, a_src, a_dst, out, lse, grad_out, slope, rows, p, key, edge_ids, delta
) -> Tensor:
    return body_of("attend_grad_dst", x.device)(
        indptr, indices, x, a_src, a_dst, out, lse, grad_out, slope=slope, rows=rows, drop=(p, key), edge_ids=edge_ids,
        delta=delta,
    )  # fmt: skip


def _per_side(op: Any, name: str) -> Any:
    """The public op of one side's gradient: both sides take the same arguments."""

    def host(
        *tensors: Tensor,
        slope: float,
        rows: Tensor | None = None,
        drop: Drop | None = None,
        edge_ids: Tensor | None = None,
        delta: Tensor | None = None,
    ) -> Any:
        return op(*tensors, slope, rows, *flat_drop(drop), edge_ids, delta)

    host.__name__ = name
    return public(host)


attend_grad_src = _per_side(_attend_grad_src, "attend_grad_src")
attend_grad_dst = _per_side(_attend_grad_dst, "attend_grad_dst")


_BOTH = (
    f"{CSR}, Tensor? rows, Tensor? edge_ids, Tensor back_indptr, Tensor back_indices, Tensor? back_rows, "
    f"Tensor? back_edge_ids, {_SCORED}, Tensor out, Tensor lse, Tensor grad_out, float slope, {DROP}, Tensor? delta"
)


@define(
    f"attend_grad({_BOTH}) -> (Tensor, Tensor, Tensor)",
    fake=lambda *args: tuple(t.new_empty(t.shape) for t in args[8:11]),
)
def _attend_grad(*args: Any) -> tuple[Tensor, Tensor, Tensor]:
    indptr, indices, rows, edge_ids, back_indptr, back_indices, back_rows, back_edge_ids, *tensors = args[:14]
    slope, p, key, delta = args[14:]
    forward, reverse = Csr(indptr, indices, rows, edge_ids), Csr(back_indptr, back_indices, back_rows, back_edge_ids)
    body = body_of("attend_grad", indptr.device)
    return body(forward, reverse, *tensors, slope=slope, drop=(p, key), delta=delta)


@public
def attend_grad(
    forward: Csr, reverse: Csr, *tensors: Tensor, slope: float, drop: Drop | None = None, delta: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    sides = (side for csr in (forward, reverse) for side in (csr.indptr, csr.indices, csr.rows, csr.edge_ids))
    return _attend_grad(*sides, *tensors, slope, *flat_drop(drop), delta)


@define(
    "attend_grad_dst_of(Tensor grad_out, Tensor out, Tensor pos, Tensor mass_pos, float slope, Tensor? delta)"
    " -> Tensor",
    fake=lambda grad_out, out, pos, mass_pos, slope, delta: torch.empty_like(mass_pos),
)
def _attend_grad_dst_of(
    grad_out: Tensor, out: Tensor, pos: Tensor, mass_pos: Tensor, slope: float, delta: Tensor | None
) -> Tensor:
    return body_of("attend_grad_dst_of", out.device)(grad_out, out, pos, mass_pos, slope=slope, delta=delta)


@public
def attend_grad_dst_of(
    grad_out: Tensor, out: Tensor, pos: Tensor, mass_pos: Tensor, *, slope: float, delta: Tensor | None = None
) -> Tensor:
    return _attend_grad_dst_of(grad_out, out, pos, mass_pos, slope, delta)


@define(
    "row_dots(Tensor a, Tensor b, ScalarType dtype) -> Tensor",
    fake=lambda a, b, dtype: a.new_empty(a.shape[:-1], dtype=dtype),
)
def _row_dots(a: Tensor, b: Tensor, dtype: torch.dtype) -> Tensor:
    return body_of("row_dots", a.device)(a, b, dtype=dtype)


@public
def row_dots(a: Tensor, b: Tensor, *, dtype: torch.dtype) -> Tensor:
    return _row_dots(a, b, dtype)
