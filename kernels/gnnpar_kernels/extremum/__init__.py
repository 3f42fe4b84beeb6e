"""Maximum over in-edges with the global id of its winner, the smallest id of equal values, and its gradient.

Shapes: x [M, ...], src_ids [M] int64 ascending -> best [N, ...], arg [N, ...] int64; the gradient is again [M, ...].
Floor of fp32 rows of F entries: E (4 F + 4) + N (12 F + 8) bytes, since winners are int64.
"""

import torch
from torch import Tensor

from gnnpar_kernels.extremum import naive
from gnnpar_kernels.registration import operator


def _fake_extremum(x: Tensor, num_rows: int, **rest: object) -> naive.State:
    shape = (num_rows, *x.shape[1:])
    return x.new_empty(shape), x.new_empty(shape, dtype=torch.int64)


extremum = operator(naive.extremum, __name__, fake=_fake_extremum, updates="state")
extremum_finish = operator(naive.extremum_finish, __name__, fake=lambda state: state[0].new_empty(state[0].shape))
extremum_grad = operator(
    naive.extremum_grad,
    __name__,
    fake=lambda arg, src_ids, grad_out: grad_out.new_empty((src_ids.shape[0], *grad_out.shape[1:])),
)
