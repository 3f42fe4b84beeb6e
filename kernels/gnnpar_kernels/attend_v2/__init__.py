"""GATv2 aggregation over in-edges with online softmax: the fold and its gradients; `attend_finish` is its end.

    e_ij = a . leaky_relu(x_j + y_i)        out_i = sum_j softmax_j(e_ij) K_ij x_j, K the dropout mask over 1 - p

Shapes: x [M, H, D], y [N, H, D], a [H, D] -> state (m, l [N, H], acc [N, H, D]), as that of `attend`.
Floor, F = H D entries of b bytes: forward E (F b + 4) + N (2 F b + 12 H + 8) bytes; backward
E (3 F b + 8 H + 8) + N (6 F b + 8 H + 16): a gather per edge from the destination's side, two from the source's.
"""

from torch import Tensor

from gnnpar_kernels.attend import flat_drop
from gnnpar_kernels.attend.naive import Drop, State, uninitialised_state
from gnnpar_kernels.csr import Csr
from gnnpar_kernels.dispatch import body_of
from gnnpar_kernels.registration import CSR, DROP, define, key_of, public

_BLOCK = f"{CSR}, Tensor x, Tensor y, Tensor a, float slope, SymInt num_rows, Tensor? rows, {DROP}, Tensor? edge_ids"


def _fake_attend_v2(indptr, indices, x, y, a, slope, num_rows, *rest) -> list[Tensor]:
    return list(uninitialised_state(num_rows, x, False))


@define(f"attend_v2({_BLOCK}) -> Tensor[]", fake=_fake_attend_v2)
def _attend_v2(
    indptr: Tensor,
    indices: Tensor,
    x: Tensor,
    y: Tensor,
    a: Tensor,
    slope: float,
    num_rows: int,
    rows: Tensor | None,
    p: float,
    key: int,
    words: Tensor | None,
    edge_ids: Tensor | None,
) -> list[Tensor]:
    how = {
        "slope": slope,
        "num_rows": num_rows,
        "rows": rows,
        "drop": (p, key_of(key, words)),
        "edge_ids": edge_ids,
    }
    return list(body_of("attend_v2", x.device)(indptr, indices, x, y, a, **how))


@define(f"attend_v2_({_BLOCK}, Tensor(a!)[] state) -> ()")
def _attend_v2_(
    indptr: Tensor,
    indices: Tensor,
    x: Tensor,
    y: Tensor,
    a: Tensor,
    slope: float,
    num_rows: int,
    rows: Tensor | None,
    p: float,
    key: int,
    words: Tensor | None,
    edge_ids: Tensor | None,
    state: list[Tensor],
) -> None:
    how = {
        "slope": slope,
        "num_rows": num_rows,
        "rows": rows,
        "drop": (p, key_of(key, words)),
        "edge_ids": edge_ids,
    }
    after = body_of("attend_v2", x.device)(indptr, indices, x, y, a, **how, state=tuple(state))
    for old, new in zip(state, after, strict=True):
        if new is not old:
            old.copy_(new)


@public
def attend_v2(
    indptr: Tensor,
    indices: Tensor,
    x: Tensor,
    y: Tensor,
    a: Tensor,
    *,
    slope: float,
    num_rows: int,
    rows: Tensor | None = None,
    state: State | None = None,
    drop: Drop | None = None,
    edge_ids: Tensor | None = None,
) -> State:
    flat = (indptr, indices, x, y, a, slope, num_rows, rows, *flat_drop(drop), edge_ids)
    if state is None:
        return tuple(_attend_v2(*flat))
    _attend_v2_(*flat, list(state))
    return state


@define(
    f"attend_v2_grad({CSR}, Tensor? rows, Tensor? edge_ids, Tensor back_indptr, Tensor back_indices, "
    "Tensor? back_rows, Tensor? back_edge_ids, Tensor order, Tensor x, Tensor y, Tensor a, Tensor lse, "
    f"Tensor grad_out, Tensor delta, float slope, {DROP}) -> (Tensor, Tensor, Tensor)",
    fake=lambda *args: tuple(t.new_empty(t.shape) for t in args[9:12]),
)
def _attend_v2_grad(
    indptr: Tensor,
    indices: Tensor,
    rows: Tensor | None,
    edge_ids: Tensor | None,
    back_indptr: Tensor,
    back_indices: Tensor,
    back_rows: Tensor | None,
    back_edge_ids: Tensor | None,
    order: Tensor,
    x: Tensor,
    y: Tensor,
    a: Tensor,
    lse: Tensor,
    grad_out: Tensor,
    delta: Tensor,
    slope: float,
    p: float,
    key: int,
    words: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    sides = Csr(indptr, indices, rows, edge_ids), Csr(back_indptr, back_indices, back_rows, back_edge_ids)
    tensors = (order, x, y, a, lse, grad_out, delta)
    return body_of("attend_v2_grad", indptr.device)(*sides, *tensors, slope=slope, drop=(p, key_of(key, words)))


@public
def attend_v2_grad(
    forward: Csr,
    reverse: Csr,
    order: Tensor,
    x: Tensor,
    y: Tensor,
    a: Tensor,
    lse: Tensor,
    grad_out: Tensor,
    delta: Tensor,
    *,
    slope: float,
    drop: Drop | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    tensors = (order, x, y, a, lse, grad_out, delta)
    return _attend_v2_grad(*forward[:4], *reverse[:4], *tensors, slope, *flat_drop(drop))
