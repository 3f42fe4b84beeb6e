"""GAT aggregation with online softmax: the specification, every edge tensor written out.

e_ij = leaky_relu(a_src_j + a_dst_i); out_i = sum_j softmax_j(e_ij) K_ij x_j, K_ij the dropout mask over 1 - p.
Source: Velickovic et al. 2018, eq. 3-4; running softmax as in Milakov and Gimelshein 2018.
"""

import torch
from torch import Tensor
from torch.nn.functional import leaky_relu

from gnnpar_kernels.csr import Csr, accumulate_dtype, edge_rows
from gnnpar_kernels.naive.dropout import keep_mask

State = tuple[Tensor, Tensor, Tensor]
Drop = tuple[float, int]


def _dropped(weight: Tensor, drop: Drop | None, edge_ids: Tensor | None) -> Tensor:
    """weight * K. Shapes: weight [E, H], edge_ids [E] -> [E, H]."""
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
) -> State:
    """Fold one block of in-edges into (m, l, acc): maximum score, sum of exp(score - m), un-normalised output.

    Shapes: x [M, H, D], a_src [M, H], a_dst [N, H], edge_ids [E] -> m, l [N, H], acc [N, H, D], at least fp32.
    """
    dtype = accumulate_dtype(x.dtype)
    if state is None:
        shape = (num_rows, x.shape[1])
        m = x.new_full(shape, -torch.inf, dtype=dtype)
        state = m, torch.zeros_like(m), x.new_zeros((*shape, x.shape[2]), dtype=dtype)
    m_before, mass, acc = state
    i = edge_rows(indptr, rows)
    score = leaky_relu(a_src.index_select(0, indices).to(dtype) + a_dst.index_select(0, i).to(dtype), slope)
    m = m_before.scatter_reduce(0, i[:, None].expand_as(score), score, "amax")
    base = torch.where(m.isneginf(), torch.zeros_like(m), m)
    shrink = torch.exp(m_before - base)
    weight = torch.exp(score - base.index_select(0, i))
    mass = (mass * shrink).index_add_(0, i, weight)
    kept = _dropped(weight, drop, edge_ids)
    acc = (acc * shrink[..., None]).index_add_(0, i, kept[..., None] * x.index_select(0, indices).to(dtype))
    return m, mass, acc


def attend_finish(state: State) -> tuple[Tensor, Tensor]:
    """Normalise: (out, lse); rows without an edge get 0 and +inf, so that exp(score - lse) = 0 there.

    Shapes: state of `attend` -> out [N, H, D], lse [N, H]. The state is given up: out may be written over it.
    """
    m, mass, acc = state
    empty = mass == 0
    safe = torch.where(empty, torch.ones_like(mass), mass)
    return acc / safe[..., None], torch.where(empty, torch.full_like(m, torch.inf), m + torch.log(safe))


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
    """(alpha K, d score) of edges j -> i. Shapes: i, j [E] -> [E, H] twice."""
    dtype = lse.dtype
    raw = a_src.index_select(0, j).to(dtype) + a_dst.index_select(0, i).to(dtype)
    alpha = torch.exp(leaky_relu(raw, slope) - lse.index_select(0, i))
    kept = _dropped(alpha, drop, edge_ids)
    product = (grad_out.index_select(0, i).to(dtype) * x.index_select(0, j).to(dtype)).sum(-1)
    branch = torch.full_like(raw, slope).masked_fill_(raw > 0, 1.0)
    return kept, branch * (kept * product - alpha * delta.index_select(0, i))


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
    """Gradients of the sources from one block; the CSR is the reverse one, row = source, index = destination.

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
    """Gradient of the destinations' scores from one block; the CSR is the forward one.

    Shapes: as `attend_grad_src` -> grad_a_dst [N, H].
    """
    i, j = edge_rows(indptr, rows), indices
    delta = _delta(out, lse, grad_out, delta)
    _, ds = _edge_grads(i, j, x, a_src, a_dst, lse, grad_out, delta, slope, drop, edge_ids)
    return ds.new_zeros(a_dst.shape).index_add_(0, i, ds).to(a_dst.dtype)


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
    """(grad_x, grad_a_src, grad_a_dst) of one block given in both orientations; sums over blocks."""
    tensors = (x, a_src, a_dst, out, lse, grad_out)
    grad_x, grad_a_src = attend_grad_src(
        reverse.indptr, reverse.indices, *tensors,
        slope=slope, rows=reverse.rows, drop=drop, edge_ids=reverse.edge_ids, delta=delta,
    )  # fmt: skip
    grad_a_dst = attend_grad_dst(
        forward.indptr, forward.indices, *tensors,
        slope=slope, rows=forward.rows, drop=drop, edge_ids=forward.edge_ids, delta=delta,
    )  # fmt: skip
    return grad_x, grad_a_src, grad_a_dst
