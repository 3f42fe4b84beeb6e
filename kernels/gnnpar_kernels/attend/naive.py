"""GAT aggregation with online softmax: the specification, with all edge tensors in memory.

e_ij = leaky_relu(a_src_j + a_dst_i); out_i = sum_j softmax_j(e_ij) K_ij x_j, K_ij the dropout mask over 1 - p.
Source: Velickovic et al. 2018, eq. 3-4; running softmax as in Milakov and Gimelshein 2018.

`fold` and `gradients` hold for every score. GATv2 and dot products have the same with other scores and values of edges.
"""

from collections.abc import Callable, Sequence
from typing import TypedDict

import torch
from torch import Tensor
from torch.nn.functional import leaky_relu

from gnnpar_kernels.csr import Csr, accumulate_dtype, edge_rows
from gnnpar_kernels.dispatch import specified
from gnnpar_kernels.dropout.naive import keep_mask
from gnnpar_kernels.hashing import Key

State = tuple[Tensor, ...]  # (m, l, acc) or, with `branch`, (m, l, acc, l_pos, acc_pos)
Drop = tuple[float, Key]


class Where(TypedDict):
    """Keyword arguments of every fold of attention, see `attend`."""

    num_rows: int
    rows: Tensor | None
    state: State | None
    drop: Drop | None
    edge_ids: Tensor | None


def keyed(drop: Drop | None, edge_ids: Tensor | None) -> tuple[float, Key, Tensor] | None:
    """Return the probability, the key and the ids of attention dropout, or None without dropout."""
    if drop is None or drop[0] == 0.0:
        return None
    if edge_ids is None:
        raise ValueError("attention dropout is keyed by global edge ids: pass edge_ids [E] beside drop=(p, key)")
    return *drop, edge_ids


def dropped(weight: Tensor, drop: Drop | None, edge_ids: Tensor | None) -> Tensor:
    """Return weight * K. Shapes: weight [E, H], edge_ids [E] -> [E, H]."""
    if (keys := keyed(drop, edge_ids)) is None:
        return weight
    p, key, ids = keys
    return torch.where(keep_mask(ids, weight.shape[1], p=p, key=key), weight / (1.0 - p), torch.zeros_like(weight))


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
    i, dtype = edge_rows(indptr, rows), accumulate_dtype(x.dtype)
    state = empty_state(num_rows, x, branch) if state is None else state
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


def empty_state(num_rows: int, x: Tensor, branch: bool = False) -> State:
    """Return the state before the first edge."""
    m, *sums = uninitialised_state(num_rows, x, branch)
    return m.fill_(-torch.inf), *(total.zero_() for total in sums)


def uninitialised_state(num_rows: int, x: Tensor, branch: bool = False) -> State:
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


def gradients(
    edges: Callable[..., tuple[Tensor, Tensor]],
    operands: tuple[Tensor, ...],
    i: Tensor,
    lse: Tensor,
    grad_out: Tensor,
    delta: Tensor,
    drop: Drop | None,
    edge_ids: Tensor | None,
) -> tuple[Tensor, ...]:
    """Return the gradients of operands from the edges j -> i of one block, by their scores and values.

    With alpha = exp(score - lse_i): d value = alpha K dO_i, d score = alpha (K <dO_i, value> - Delta_i).
    Shapes: edges(*operands) -> score [E, H], value [E, H, W]; i [E], lse, delta [N, H], grad_out [N, H, W].
    """
    (score, value), pull = torch.func.vjp(edges, *(t.to(lse.dtype) for t in operands))[:2]
    alpha = torch.exp(score - lse.index_select(0, i))
    kept, pulled = dropped(alpha, drop, edge_ids), grad_out.index_select(0, i).to(lse.dtype)
    ds = kept * (pulled * value).sum(-1) - alpha * delta.to(lse.dtype).index_select(0, i)
    return tuple(g.to(t.dtype) for g, t in zip(pull((ds, kept[..., None] * pulled)), operands, strict=True))


def row_dots(a: Tensor, b: Tensor, *, dtype: torch.dtype) -> Tensor:
    """Return <a, b> by row and head, such as Delta = <dO, O> of the gradients. Shapes: [N, H, D] twice -> [N, H] of
    `dtype`."""
    return (a.to(dtype) * b.to(dtype)).sum(-1)


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

    `delta`: <grad_out, out>; if given, `out` is not read.
    Shapes: x [M, H, D], out, grad_out [N, H, D], lse, delta [N, H] -> grad_x [M, H, D], grad_a_src [M, H].
    """
    i, j, near = indices, edge_rows(indptr, rows), a_dst.to(lse.dtype)
    delta = row_dots(out, grad_out, dtype=lse.dtype) if delta is None else delta

    def edges(x: Tensor, a_src: Tensor) -> tuple[Tensor, Tensor]:
        return leaky_relu(a_src.index_select(0, j) + near.index_select(0, i), slope), x.index_select(0, j)

    grad_x, grad_a = gradients(edges, (x, a_src), i, lse, grad_out, delta, drop, edge_ids)
    return grad_x, grad_a


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
    i, j, far = edge_rows(indptr, rows), indices, a_src.to(lse.dtype)
    delta = row_dots(out, grad_out, dtype=lse.dtype) if delta is None else delta
    values = x.index_select(0, j).to(lse.dtype)

    def edges(a_dst: Tensor) -> tuple[Tensor, Tensor]:
        return leaky_relu(far.index_select(0, j) + a_dst.index_select(0, i), slope), values

    return gradients(edges, (a_dst,), i, lse, grad_out, delta, drop, edge_ids)[0]


def attend_grad_dst_of(
    grad_out: Tensor, out: Tensor, pos: Tensor, mass_pos: Tensor, *, slope: float, delta: Tensor | None = None
) -> Tensor:
    """Return the gradient of the destinations' scores in the whole fold from results of `attend_finish`, without edges.

    The gradients of a row's activated scores sum to 0 and the activation has two slopes, so gradients of the positive
    branch determine the rest.
    Shapes: grad_out, out, pos [N, H, D], mass_pos, delta [N, H] -> grad_a_dst [N, H] as mass_pos.
    """
    delta = row_dots(grad_out, out, dtype=mass_pos.dtype) if delta is None else delta
    return (1.0 - slope) * (row_dots(grad_out, pos, dtype=mass_pos.dtype) - mass_pos * delta)


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


def sides(gradients: Callable[..., Sequence[Tensor]], dots: Callable[..., Tensor]):
    """Return `attend_grad_src`, `attend_grad_dst` and `attend_grad` of a body, made of one function for both sides.

    gradients(indptr, indices, tensors, source, slope, rows, drop, edge_ids, delta) -> those of x and a_src if `source`,
    else that of a_dst. `dots`: the body's `row_dots`.
    """

    def one_side(indptr: Tensor, indices: Tensor, tensors: tuple[Tensor, ...], **how) -> Sequence[Tensor]:
        out, lse, grad_out = tensors[3:]
        delta = dots(out, grad_out, dtype=lse.dtype) if how["delta"] is None else how["delta"].to(lse.dtype)
        return gradients(indptr, indices, tensors, **{**how, "delta": delta})

    @specified(attend_grad_src)
    def of_src(indptr: Tensor, indices: Tensor, *tensors: Tensor, **how) -> tuple[Tensor, Tensor]:
        grad_x, grad_a = one_side(indptr, indices, tensors, source=True, **how)
        return grad_x, grad_a

    @specified(attend_grad_dst)
    def of_dst(indptr: Tensor, indices: Tensor, *tensors: Tensor, **how) -> Tensor:
        return one_side(indptr, indices, tensors, source=False, **how)[-1]

    return of_src, of_dst, both_sides(of_src, of_dst, dots)
