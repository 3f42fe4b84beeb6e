"""GATv2 aggregation with online softmax: the specification, with all edge tensors in memory.

e_ij = a . leaky_relu(x_j + y_i) per head; out_i = sum_j softmax_j(e_ij) K_ij x_j, K_ij the dropout mask over 1 - p.
Source: Brody et al. 2022, eq. 7; running softmax as in Milakov and Gimelshein 2018.
"""

import torch
from torch import Tensor
from torch.nn.functional import leaky_relu

from gnnpar_kernels.attend.naive import Drop, State, dropped, empty_state, fold
from gnnpar_kernels.csr import Csr, accumulate_dtype, edge_rows


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
    """Fold one block of in-edges into (m, l, acc): maximum score, sum of exp(score - m), un-normalised output.

    The state is as in `attend`; `attend_finish` normalises it.
    Shapes: x [M, H, D], y [N, H, D], a [H, D], edge_ids [E] -> m, l [N, H], acc [N, H, D], at least fp32.
    """
    dtype = accumulate_dtype(x.dtype)
    state = empty_state(num_rows, x, dtype, False) if state is None else state
    i = edge_rows(indptr, rows)
    value = x.index_select(0, indices).to(dtype)
    score = (leaky_relu(value + y.index_select(0, i).to(dtype), slope) * a.to(dtype)).sum(-1)
    return fold(state, i, score, value, drop, edge_ids)


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
    """Return the gradients of x, y and a from one block given in both orientations. They add up over blocks.

    `order`: the place in `forward` of every edge of `reverse`. delta: `row_dots` of the whole fold's output and
    grad_out.
    Shapes: order [E], lse, delta [N, H], grad_out [N, H, D] -> grad_x [M, H, D], grad_y [N, H, D], grad_a [H, D].
    """
    dtype = lse.dtype
    i, j = edge_rows(forward.indptr, forward.rows), forward.indices
    value, pulled = x.index_select(0, j).to(dtype), grad_out.index_select(0, i).to(dtype)
    raw = value + y.index_select(0, i).to(dtype)
    activated, wide = leaky_relu(raw, slope), a.to(dtype)
    alpha = torch.exp((activated * wide).sum(-1) - lse.index_select(0, i))
    kept = dropped(alpha, drop, forward.edge_ids)
    ds = (kept * (pulled * value).sum(-1) - alpha * delta.to(dtype).index_select(0, i))[..., None]
    of_score = ds * wide * torch.full_like(raw, slope).masked_fill_(raw > 0, 1.0)
    grad_x = of_score.new_zeros(x.shape).index_add_(0, j, kept[..., None] * pulled + of_score)
    grad_y = of_score.new_zeros(y.shape).index_add_(0, i, of_score)
    return grad_x.to(x.dtype), grad_y.to(y.dtype), (ds * activated).sum(0).to(a.dtype)
