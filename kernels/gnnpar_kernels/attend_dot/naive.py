"""Dot-product attention with online softmax: the specification, with all edge tensors in memory.

s_ij = <q_i, k_j> + <r_i, e_ij> per head; out_i = sum_j softmax_j(s_ij) K_ij [v_j, e_ij], K_ij the dropout mask over
1 - p. A row of attributes e_ij is shared by all heads. Keys k_j + W e_ij and values v_j + W e_ij are the same with
r_i = W^T q_i and the last A columns of the output times W^T.
Source: Shi et al. 2021, equations 3 to 5; running softmax as in Milakov and Gimelshein 2018.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from gnnpar_kernels.attend.naive import Drop, State, empty_state, fold, gradients
from gnnpar_kernels.csr import Csr, accumulate_dtype, edge_rows


def widths(value: Tensor, edge: Tensor | None) -> Tensor:
    """Return a tensor without rows, of the shape of the output's rows. Shapes: [M, H, D], [E, A] -> [0, H, D + A]."""
    extra = 0 if edge is None else edge.shape[1]
    return value.new_empty((0, value.shape[1], value.shape[2] + extra))


def inputs(key: Tensor, value: Tensor, query: Tensor, edge: Tensor | None, edge_query: Tensor | None, of_edge: bool):
    """Return the operands of a gradient, in the order of its results."""
    beside = () if edge is None or edge_query is None else (edge_query, edge)[: 1 + of_edge]
    return key, value, query, *beside


def _edges(j: Tensor, i: Tensor, edge: Tensor | None) -> Callable[..., tuple[Tensor, Tensor]]:
    """Return the function (key, value, query, edge_query, edge) -> (score [E, H], value [E, H, D + A]) of edges."""

    def edges(key, value, query, edge_query=None, edge=edge) -> tuple[Tensor, Tensor]:
        score = (key.index_select(0, j) * query.index_select(0, i)).sum(-1)
        values = value.index_select(0, j)
        if edge is None or edge_query is None:
            return score, values
        beside = edge[:, None].expand(-1, value.shape[1], -1)
        return score + (beside * edge_query.index_select(0, i)).sum(-1), torch.cat([values, beside], -1)

    return edges


def attend_dot(
    indptr: Tensor,
    indices: Tensor,
    key: Tensor,
    value: Tensor,
    query: Tensor,
    *,
    num_rows: int,
    rows: Tensor | None = None,
    state: State | None = None,
    drop: Drop | None = None,
    edge_ids: Tensor | None = None,
    edge: Tensor | None = None,
    edge_query: Tensor | None = None,
) -> State:
    """Fold one block of in-edges into (m, l, acc): maximum score, sum of exp(score - m), un-normalised output.

    The state is as in `attend`; `attend_finish` normalises it. The caller scales queries.
    Shapes: key, value [M, H, D], query [N, H, D], edge_ids [E], edge [E, A] with edge_query [N, H, A], or neither
    -> m, l [N, H], acc [N, H, D + A], at least fp32.
    """
    i, dtype = edge_rows(indptr, rows), accumulate_dtype(value.dtype)
    state = empty_state(num_rows, widths(value, edge)) if state is None else state
    operands = inputs(key, value, query, edge, edge_query, of_edge=True)
    score, values = _edges(indices, i, None)(*(t.to(dtype) for t in operands))
    return fold(state, i, score, values, drop, edge_ids)


def attend_dot_grad(
    forward: Csr,
    reverse: Csr,
    order: Tensor,
    key: Tensor,
    value: Tensor,
    query: Tensor,
    lse: Tensor,
    grad_out: Tensor,
    delta: Tensor,
    *,
    drop: Drop | None = None,
    edge: Tensor | None = None,
    edge_query: Tensor | None = None,
    of_edge: bool = False,
) -> tuple[Tensor, ...]:
    """Return the gradients of key, value and query, with edge attributes also of edge_query, with `of_edge` of edge.

    One block is given in both orientations; gradients add up over blocks. `order`: the place in `forward` of every edge
    of `reverse`; `edge` is in the order of `forward`. delta: `row_dots` of the whole fold's output and grad_out.
    Shapes: order [E], lse, delta [N, H], grad_out [N, H, D + A] -> as key, value, query, edge_query, edge.
    """
    i, operands = edge_rows(forward.indptr, forward.rows), inputs(key, value, query, edge, edge_query, of_edge)
    edges = _edges(forward.indices, i, None if edge is None else edge.to(lse.dtype))
    return gradients(edges, operands, i, lse, grad_out, delta, drop, forward.edge_ids)
