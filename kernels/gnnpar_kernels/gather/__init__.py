"""Row moves: pack the rows of a message, add received rows back.

Shapes: x [N, ...], index [n] -> [n, ...], and back. There is no CPU body: torch's own moves run at memory bandwidth.
Floor of rows of F entries of b bytes: n (2 F b + 8) bytes; adding also reads the target rows, n (3 F b + 8).
"""

from torch import Tensor

from gnnpar_kernels.dispatch import body_of
from gnnpar_kernels.gather import naive
from gnnpar_kernels.registration import define, operator, public

gather_rows = operator(
    naive.gather_rows,
    __name__,
    fake=lambda x, index: x.new_empty((index.shape[0], *x.shape[1:])),
    updates="out",
)


@define("scatter_add_rows_(Tensor(a!) out, Tensor index, Tensor x) -> ()")
def _scatter_add_rows_(out: Tensor, index: Tensor, x: Tensor) -> None:
    body_of("scatter_add_rows_", out.device)(out, index, x)


@public(naive.scatter_add_rows_, __name__)
def scatter_add_rows_(out: Tensor, index: Tensor, x: Tensor) -> Tensor:
    _scatter_add_rows_(out, index, x)
    return out
