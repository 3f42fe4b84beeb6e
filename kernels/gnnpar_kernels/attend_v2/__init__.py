"""GATv2 aggregation over in-edges with online softmax: the fold and its gradients. `attend_finish` normalises it.

    e_ij = a . leaky_relu(x_j + y_i)        out_i = sum_j softmax_j(e_ij) K_ij x_j, K the dropout mask over 1 - p

Shapes: x [M, H, D], y [N, H, D], a [H, D] -> state (m, l [N, H], acc [N, H, D]), as in `attend`.
Floor, F = H D entries of b bytes: forward E (F b + 4) + N (2 F b + 12 H + 8) bytes; backward
E (3 F b + 8 H + 8) + N (6 F b + 8 H + 16): a gather per edge from the destination's side, two from the source's.
"""

from gnnpar_kernels.attend.naive import uninitialised_state
from gnnpar_kernels.attend_v2 import naive
from gnnpar_kernels.registration import like, operator

attend_v2 = operator(
    naive.attend_v2,
    __name__,
    fake=lambda num_rows, x, **rest: uninitialised_state(num_rows, x, False),
    updates="state",
)
attend_v2_grad = operator(naive.attend_v2_grad, __name__, fake=like("x", "y", "a"))
