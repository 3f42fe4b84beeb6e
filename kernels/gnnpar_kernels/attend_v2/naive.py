"""GATv2 aggregation with online softmax: the specification, with all edge tensors in memory.

e_ij = a . leaky_relu(x_j + y_i) per head; out_i = sum_j softmax_j(e_ij) K_ij x_j, K_ij the dropout mask over 1 - p.
Source: Brody et al. 2022, eq. 7; running softmax as in Milakov and Gimelshein 2018.
"""

from collections.abc import Callable

from torch import Tensor
from torch.nn.functional import leaky_relu

from gnnpar_kernels.attend.naive import Drop, State, empty_state, fold, gradients
from gnnpar_kernels.csr import Csr, accumulate_dtype, edge_rows


def _edges(j: Tensor, i: Tensor, slope: float) -> Callable[..., tuple[Tensor, Tensor]]:
    """Return the function (x, y, a) -> (score [E, H], value [E, H, D]) of edges j -> i."""

    def edges(x: Tensor, y: Tensor, a: Tensor) -> tuple[Tensor, Tensor]:
        value = x.index_select(0, j)
        return (leaky_relu(value + y.index_select(0, i), slope) * a).sum(-1), value

    return edges


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
    i, dtype = edge_rows(indptr, rows), accumulate_dtype(x.dtype)
    state = empty_state(num_rows, x) if state is None else state
    score, value = _edges(indices, i, slope)(x.to(dtype), y.to(dtype), a.to(dtype))
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
    i = edge_rows(forward.indptr, forward.rows)
    edges = _edges(forward.indices, i, slope)
    grad_x, grad_y, grad_a = gradients(edges, (x, y, a), i, lse, grad_out, delta, drop, forward.edge_ids)
    return grad_x, grad_y, grad_a
