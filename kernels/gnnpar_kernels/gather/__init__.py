"""Row moves: pack the rows of a message, add received rows back.

Shapes: x [N, ...], index [n] -> [n, ...], and back. There is no CPU body: torch's own moves run at the speed of memory.
Floor of rows of F entries of b bytes: n (2 F b + 8) bytes; adding reads the rows it adds to as well, n (3 F b + 8).
"""

from torch import Tensor

from gnnpar_kernels.dispatch import body_of
from gnnpar_kernels.registration import define, public


@define(
    "gather_rows(Tensor x, Tensor index) -> Tensor",
    fake=lambda x, index: x.new_empty((index.shape[0], *x.shape[1:])),
)
def _gather_rows(x: Tensor, index: Tensor) -> Tensor:
    return body_of("gather_rows", x.device)(x, index)


@define("gather_rows_(Tensor x, Tensor index, Tensor(a!) out) -> ()")
def _gather_rows_(x: Tensor, index: Tensor, out: Tensor) -> None:
    body_of("gather_rows", x.device)(x, index, out=out)


@public
def gather_rows(x: Tensor, index: Tensor, *, out: Tensor | None = None) -> Tensor:
    if out is None:
        return _gather_rows(x, index)
    _gather_rows_(x, index, out)
    return out


@define("scatter_add_rows_(Tensor(a!) out, Tensor index, Tensor x) -> ()")
def _scatter_add_rows_(out: Tensor, index: Tensor, x: Tensor) -> None:
    body_of("scatter_add_rows_", out.device)(out, index, x)


@public
def scatter_add_rows_(out: Tensor, index: Tensor, x: Tensor) -> Tensor:
    _scatter_add_rows_(out, index, x)
    return out
