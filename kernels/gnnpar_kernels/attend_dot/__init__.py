"""Dot-product attention over in-edges with online softmax: the fold and its gradients. `attend_finish` normalises it.

    s_ij = <q_i, k_j> + <r_i, e_ij>        out_i = sum_j softmax_j(s_ij) K_ij [v_j, e_ij], K the dropout mask over 1 - p

Shapes: key, value [M, H, D], query [N, H, D], edge [E, A] with edge_query [N, H, A], or neither -> state (m, l [N, H],
acc [N, H, D + A]), as in `attend`. Floor without edge attributes, F = H D entries of b bytes: forward
E (2 F b + 4) + N (2 F b + 12 H + 8) bytes; backward E (4 F b + 8 H + 8) + N (8 F b + 8 H + 16): two gathers per edge
from either side.
"""

from torch import Tensor

from gnnpar_kernels.attend.naive import uninitialised_state
from gnnpar_kernels.attend_dot import naive
from gnnpar_kernels.registration import operator


def _fake_grad(key, value, query, edge, edge_query, of_edge, **rest) -> tuple[Tensor, ...]:
    return tuple(t.new_empty(t.shape) for t in naive.inputs(key, value, query, edge, edge_query, of_edge))


attend_dot = operator(
    naive.attend_dot,
    __name__,
    fake=lambda num_rows, value, edge, **rest: uninitialised_state(num_rows, naive.widths(value, edge), False),
    updates="state",
)
attend_dot_grad = operator(naive.attend_dot_grad, __name__, fake=_fake_grad)
