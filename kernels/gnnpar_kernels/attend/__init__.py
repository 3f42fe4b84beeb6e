"""GAT aggregation over in-edges with online softmax: the fold, its end, and its gradient by side.

    e_ij = leaky_relu(a_src_j + a_dst_i)        out_i = sum_j softmax_j(e_ij) K_ij x_j, K the dropout mask over 1 - p

Shapes: x [M, H, D], a_src [M, H], a_dst [N, H] -> state (m, l [N, H], acc [N, H, D]) -> out [N, H, D], lse [N, H].
Floor, F = H D entries of b bytes: forward E (F b + 4 H + 4) + N (F b + 12 H + 8) bytes, backward
E (F b + 12 H + 4) + N (4 F b + 8 H + 8) with one gather per edge, which `attend_grad_src` with `attend_grad_dst_of`
reaches; `attend_grad` gathers for both sides.
"""

import torch
from torch import Tensor

from gnnpar_kernels.attend.naive import Drop, State, uninitialised_state
from gnnpar_kernels.csr import Csr
from gnnpar_kernels.dispatch import body_of
from gnnpar_kernels.registration import CSR, DROP, define, flat_key, key_of, public

_SCORED = "Tensor x, Tensor a_src, Tensor a_dst"
_BLOCK = f"{CSR}, {_SCORED}, float slope, SymInt num_rows, Tensor? rows, {DROP}, Tensor? edge_ids, bool branch"


def flat_drop(drop: Drop | None) -> tuple[float, int, Tensor | None]:
    """Probability and key as a schema takes them."""
    return (0.0, 0, None) if drop is None else (drop[0], *flat_key(drop[1]))


def _fake_attend(indptr, indices, x, a_src, a_dst, slope, num_rows, *rest) -> list[Tensor]:
    return list(uninitialised_state(num_rows, x, rest[-1]))


@define(f"attend({_BLOCK}) -> Tensor[]", fake=_fake_attend)
def _attend(
    indptr: Tensor,
    indices: Tensor,
    x: Tensor,
    a_src: Tensor,
    a_dst: Tensor,
    slope: float,
    num_rows: int,
    rows: Tensor | None,
    p: float,
    key: int,
    words: Tensor | None,
    edge_ids: Tensor | None,
    branch: bool,
) -> list[Tensor]:
    state = body_of("attend", x.device)(
        indptr,
        indices,
        x,
        a_src,
        a_dst,
        slope=slope,
        num_rows=num_rows,
        rows=rows,
        drop=(p, key_of(key, words)),
        edge_ids=edge_ids,
        branch=branch,
    )
    return list(state)


@define(f"attend_({_BLOCK}, Tensor(a!)[] state) -> ()")
def _attend_(
    indptr: Tensor,
    indices: Tensor,
    x: Tensor,
    a_src: Tensor,
    a_dst: Tensor,
    slope: float,
    num_rows: int,
    rows: Tensor | None,
    p: float,
    key: int,
    words: Tensor | None,
    edge_ids: Tensor | None,
    branch: bool,
    state: list[Tensor],
) -> None:
    after = body_of("attend", x.device)(
        indptr,
        indices,
        x,
        a_src,
        a_dst,
        slope=slope,
        num_rows=num_rows,
        rows=rows,
        state=tuple(state),
        drop=(p, key_of(key, words)),
        edge_ids=edge_ids,
        branch=branch,
    )
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
    mass_pos, pos = branch or (None, None)
    _attend_finish_(m, mass, acc, mass_pos, pos)
    return acc, m, *branch


_GRAD = (
    f"{CSR}, {_SCORED}, Tensor out, Tensor lse, Tensor grad_out, float slope, Tensor? rows, {DROP}, Tensor? edge_ids, "
    "Tensor? delta"
)


@define(
    f"attend_grad_src({_GRAD}) -> (Tensor, Tensor)",
    fake=lambda indptr, indices, x, a_src, *rest: (x.new_empty(x.shape), a_src.new_empty(a_src.shape)),
)
def _attend_grad_src(
    indptr: Tensor,
    indices: Tensor,
    x: Tensor,
    a_src: Tensor,
    a_dst: Tensor,
    out: Tensor,
    lse: Tensor,
    grad_out: Tensor,
    slope: float,
    rows: Tensor | None,
    p: float,
    key: int,
    words: Tensor | None,
    edge_ids: Tensor | None,
    delta: Tensor | None,
) -> tuple[Tensor, Tensor]:
    tensors, options = (
        (x, a_src, a_dst, out, lse, grad_out),
        {"drop": (p, key_of(key, words)), "edge_ids": edge_ids, "delta": delta},
    )
    return body_of("attend_grad_src", x.device)(indptr, indices, *tensors, slope=slope, rows=rows, **options)


@public
def attend_grad_src(
    indptr: Tensor,
    indices: Tensor,
    x: Tensor,
    a_src: Tensor,
    a_dst: Tensor,
    out: Tensor,
    lse: Tensor,
    grad_out: Tensor,
    *,
    slope: float,
    rows: Tensor | None = None,
    drop: Drop | None = None,
    edge_ids: Tensor | None = None,
    delta: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    tensors = (x, a_src, a_dst, out, lse, grad_out)
    return _attend_grad_src(indptr, indices, *tensors, slope, rows, *flat_drop(drop), edge_ids, delta)


@define(
    f"attend_grad_dst({_GRAD}) -> Tensor",
    fake=lambda indptr, indices, x, a_src, a_dst, *rest: a_dst.new_empty(a_dst.shape),
)
def _attend_grad_dst(
    indptr: Tensor,
    indices: Tensor,
    x: Tensor,
    a_src: Tensor,
    a_dst: Tensor,
    out: Tensor,
    lse: Tensor,
    grad_out: Tensor,
    slope: float,
    rows: Tensor | None,
    p: float,
    key: int,
    words: Tensor | None,
    edge_ids: Tensor | None,
    delta: Tensor | None,
) -> Tensor:
    tensors, options = (
        (x, a_src, a_dst, out, lse, grad_out),
        {"drop": (p, key_of(key, words)), "edge_ids": edge_ids, "delta": delta},
    )
    return body_of("attend_grad_dst", x.device)(indptr, indices, *tensors, slope=slope, rows=rows, **options)


@public
def attend_grad_dst(
    indptr: Tensor,
    indices: Tensor,
    x: Tensor,
    a_src: Tensor,
    a_dst: Tensor,
    out: Tensor,
    lse: Tensor,
    grad_out: Tensor,
    *,
    slope: float,
    rows: Tensor | None = None,
    drop: Drop | None = None,
    edge_ids: Tensor | None = None,
    delta: Tensor | None = None,
) -> Tensor:
    tensors = (x, a_src, a_dst, out, lse, grad_out)
    return _attend_grad_dst(indptr, indices, *tensors, slope, rows, *flat_drop(drop), edge_ids, delta)


@define(
    f"attend_grad({CSR}, Tensor? rows, Tensor? edge_ids, Tensor back_indptr, Tensor back_indices, Tensor? back_rows, "
    f"Tensor? back_edge_ids, {_SCORED}, Tensor out, Tensor lse, Tensor grad_out, float slope, {DROP}, Tensor? delta"
    ") -> (Tensor, Tensor, Tensor)",
    fake=lambda *args: tuple(t.new_empty(t.shape) for t in args[8:11]),
)
def _attend_grad(
    indptr: Tensor,
    indices: Tensor,
    rows: Tensor | None,
    edge_ids: Tensor | None,
    back_indptr: Tensor,
    back_indices: Tensor,
    back_rows: Tensor | None,
    back_edge_ids: Tensor | None,
    x: Tensor,
    a_src: Tensor,
    a_dst: Tensor,
    out: Tensor,
    lse: Tensor,
    grad_out: Tensor,
    slope: float,
    p: float,
    key: int,
    words: Tensor | None,
    delta: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    sides = Csr(indptr, indices, rows, edge_ids), Csr(back_indptr, back_indices, back_rows, back_edge_ids)
    tensors = (x, a_src, a_dst, out, lse, grad_out)
    return body_of("attend_grad", indptr.device)(
        *sides, *tensors, slope=slope, drop=(p, key_of(key, words)), delta=delta
    )


@public
def attend_grad(
    forward: Csr,
    reverse: Csr,
    x: Tensor,
    a_src: Tensor,
    a_dst: Tensor,
    out: Tensor,
    lse: Tensor,
    grad_out: Tensor,
    *,
    slope: float,
    drop: Drop | None = None,
    delta: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    tensors = (x, a_src, a_dst, out, lse, grad_out)
    return _attend_grad(*forward[:4], *reverse[:4], *tensors, slope, *flat_drop(drop), delta)


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
