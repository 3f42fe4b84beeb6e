"""GAT aggregation with online softmax: the specification, with all edge tensors in memory.

e_ij = leaky_relu(a_src_j + a_dst_i); out_i = sum_j softmax_j(e_ij) K_ij x_j, K_ij the dropout mask over 1 - p.
Source: Velickovic et al. 2018, eq. 3-4; running softmax as in Milakov and Gimelshein 2018.
"""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.functional import leaky_relu

from gnnpar_kernels.csr import Csr, accumulate_dtype, edge_rows
from gnnpar_kernels.dropout.naive import keep_mask
from gnnpar_kernels.hashing import Key

State = tuple[Tensor, ...]  # (m, l, acc) or, with `branch`, (m, l, acc, l_pos, acc_pos)
Drop = tuple[float, Key]


def dropped(weight: Tensor, drop: Drop | None, edge_ids: Tensor | None) -> Tensor:
    """Return weight * K. Shapes: weight [E, H], edge_ids [E] -> [E, H]."""
    if drop is None or drop[0] == 0.0:
        return weight
    if edge_ids is None:
        raise ValueError("attention dropout is keyed by global edge ids: pass edge_ids [E] beside drop=(p, key)")
    p, key = drop
    return torch.where(keep_mask(edge_ids, weight.shape[1], p=p, key=key), weight / (1.0 - p), torch.zeros_like(weight))


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
    """Fold one block of in-edges into (m, l, acc): maximum score, sum of exp(score - m), un-normalised output.

    With `branch` also l_pos and acc_pos, the same sums over only the edges with a_src_j + a_dst_i > 0, so that
    `attend_grad_dst_of` needs no other pass over edges. A given state must be of the same kind.
    Shapes: x [M, H, D], a_src [M, H], a_dst [N, H], edge_ids [E] -> m, l [N, H], acc [N, H, D], at least fp32;
    l_pos as l, acc_pos as acc.
    """
    dtype = accumulate_dtype(x.dtype)
    if state is None:
        state = empty_state(num_rows, x, dtype, branch)
    i = edge_rows(indptr, rows)
    raw = a_src.index_select(0, indices).to(dtype) + a_dst.index_select(0, i).to(dtype)
    values = x.index_select(0, indices).to(dtype)
    return fold(state, i, leaky_relu(raw, slope), values, drop, edge_ids, raw > 0 if branch else None)


def fold(
    state: State,
    i: Tensor,
    score: Tensor,
    values: Tensor,
    drop: Drop | None,
    edge_ids: Tensor | None,
    branch: Tensor | None = None,
) -> State:
    """Fold scored rows of edges into the state. `branch`: edges of the state's last two sums.

    Shapes: i [E] output rows, score, branch [E, H], values [E, H, W].
    """
    m_before, *sums = state
    m = m_before.scatter_reduce(0, i[:, None].expand_as(score), score, "amax")
    base = torch.where(m.isneginf(), torch.zeros_like(m), m)
    shrink = torch.exp(m_before - base)
    weight = torch.exp(score - base.index_select(0, i))
    parts = [weight, dropped(weight, drop, edge_ids)[..., None] * values]
    if branch is not None:
        parts += [weight * branch, parts[1] * branch[..., None]]
    rescaled = [total * (shrink if total.dim() == 2 else shrink[..., None]) for total in sums]
    return m, *(total.index_add_(0, i, part) for total, part in zip(rescaled, parts, strict=True))


def empty_state(num_rows: int, x: Tensor, dtype: torch.dtype, branch: bool) -> State:
    """Return the state before the first edge."""
    m = x.new_full((num_rows, x.shape[1]), -torch.inf, dtype=dtype)
    mass, acc = torch.zeros_like(m), x.new_zeros((num_rows, *x.shape[1:]), dtype=dtype)
    return (m, mass, acc, mass.clone(), acc.clone()) if branch else (m, mass, acc)


def uninitialised_state(num_rows: int, x: Tensor, branch: bool) -> State:
    """Return a state with uninitialised rows, for a caller that writes all of them."""
    shapes = [x.shape[1:2], x.shape[1:2], x.shape[1:], x.shape[1:2], x.shape[1:]]
    return tuple(
        x.new_empty((num_rows, *shape), dtype=accumulate_dtype(x.dtype)) for shape in shapes[: 5 if branch else 3]
    )


def attend_finish(state: State) -> tuple[Tensor, ...]:
    """Return (out, lse), normalised. Rows without an edge get 0 and +inf, so that exp(score - lse) = 0 there.

    A state made with `branch` also gives mass_pos = l_pos / l, the share of the weights with a positive score, and
    pos = acc_pos / l, their part of out.
    Shapes: state of `attend` -> out [N, H, D], lse [N, H] (, mass_pos [N, H], pos [N, H, D]). The results may overwrite
    the state.
    """
    m, mass, acc, *positive = state
    empty = mass == 0
    safe = torch.where(empty, torch.ones_like(mass), mass)
    shares = [total / (safe if total.dim() == 2 else safe[..., None]) for total in positive]
    return acc / safe[..., None], torch.where(empty, torch.full_like(m, torch.inf), m + torch.log(safe)), *shares


def _edge_grads(
    i: Tensor,
    j: Tensor,
    x: Tensor,
    a_src: Tensor,
    a_dst: Tensor,
    lse: Tensor,
    grad_out: Tensor,
    delta: Tensor,
    slope: float,
    drop: Drop | None,
    edge_ids: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Return (alpha K, d score) of edges j -> i. Shapes: i, j [E] -> [E, H] twice."""
    dtype = lse.dtype
    raw = a_src.index_select(0, j).to(dtype) + a_dst.index_select(0, i).to(dtype)
    alpha = torch.exp(leaky_relu(raw, slope) - lse.index_select(0, i))
    kept = dropped(alpha, drop, edge_ids)
    product = (grad_out.index_select(0, i).to(dtype) * x.index_select(0, j).to(dtype)).sum(-1)
    branch = torch.full_like(raw, slope).masked_fill_(raw > 0, 1.0)
    return kept, branch * (kept * product - alpha * delta.index_select(0, i))


def row_dots(a: Tensor, b: Tensor, *, dtype: torch.dtype) -> Tensor:
    """Return <a, b> by row and head, such as Delta = <dO, O> of the gradients. Shapes: [N, H, D] twice -> [N, H] of
    `dtype`."""
    return (a.to(dtype) * b.to(dtype)).sum(-1)


def _delta(out: Tensor, lse: Tensor, grad_out: Tensor, delta: Tensor | None) -> Tensor:
    return (out.to(lse.dtype) * grad_out.to(lse.dtype)).sum(-1) if delta is None else delta


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
    """Return the gradients of the sources from one block, given as reverse CSR: row = source, index = destination.

    Shapes: x [M, H, D], out, grad_out [N, H, D], lse, delta [N, H] -> grad_x [M, H, D], grad_a_src [M, H].
    """
    i, j = indices, edge_rows(indptr, rows)
    delta = _delta(out, lse, grad_out, delta)
    kept, ds = _edge_grads(i, j, x, a_src, a_dst, lse, grad_out, delta, slope, drop, edge_ids)
    grad_x = torch.zeros_like(x, dtype=lse.dtype, memory_format=torch.contiguous_format)
    grad_x.index_add_(0, j, kept[..., None] * grad_out.index_select(0, i).to(lse.dtype))
    grad_a = ds.new_zeros(a_src.shape).index_add_(0, j, ds)
    return grad_x.to(x.dtype), grad_a.to(a_src.dtype)


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
    """Return the gradient of the destinations' scores from one block, given as forward CSR.

    Shapes: as `attend_grad_src` -> grad_a_dst [N, H].
    """
    i, j = edge_rows(indptr, rows), indices
    delta = _delta(out, lse, grad_out, delta)
    _, ds = _edge_grads(i, j, x, a_src, a_dst, lse, grad_out, delta, slope, drop, edge_ids)
    return ds.new_zeros(a_dst.shape).index_add_(0, i, ds).to(a_dst.dtype)


def attend_grad_dst_of(
    grad_out: Tensor, out: Tensor, pos: Tensor, mass_pos: Tensor, *, slope: float, delta: Tensor | None = None
) -> Tensor:
    """Return the gradient of the destinations' scores in the whole fold from results of `attend_finish`, without edges.

    The gradients of a row's activated scores sum to 0 and the activation has two slopes, so gradients of the positive
    branch determine the rest.
    Shapes: grad_out, out, pos [N, H, D], mass_pos, delta [N, H] -> grad_a_dst [N, H] as mass_pos.
    """
    dtype = mass_pos.dtype
    delta = (grad_out.to(dtype) * out.to(dtype)).sum(-1) if delta is None else delta
    return (1.0 - slope) * ((grad_out.to(dtype) * pos.to(dtype)).sum(-1) - mass_pos * delta)


def both_sides(
    source_side: Callable[..., tuple[Tensor, Tensor]],
    destination_side: Callable[..., Tensor],
    dots: Callable[..., Tensor] = row_dots,
) -> Callable[..., tuple[Tensor, Tensor, Tensor]]:
    """Return `attend_grad` made of the `attend_grad_src`, `attend_grad_dst` and `row_dots` of a body."""

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
        """Return (grad_x, grad_a_src, grad_a_dst) of one block given in both orientations. They add up over blocks."""
        delta = dots(out, grad_out, dtype=lse.dtype) if delta is None else delta
        tensors, how = (x, a_src, a_dst, out, lse, grad_out), {"slope": slope, "drop": drop, "delta": delta}
        indptr, indices, rows, edge_ids = reverse[:4]
        grad_x, grad_a_src = source_side(indptr, indices, *tensors, rows=rows, edge_ids=edge_ids, **how)
        indptr, indices, rows, edge_ids = forward[:4]
        return grad_x, grad_a_src, destination_side(indptr, indices, *tensors, rows=rows, edge_ids=edge_ids, **how)

    return attend_grad


attend_grad = both_sides(attend_grad_src, attend_grad_dst)
