"""Rows times a matrix: y_i = W x_i + b + a_i, bias and summand in the same walk over the output.

Shapes: x [N, F], weight [O, F], bias [O] or None, add [N, O] or None -> [N, O]. There is no Triton body: cuBLAS has the
bias in its epilogue. Floor: 2 N F O operations; rows of b bytes: N b (F + O) bytes, (F + 2 O) with a summand.
"""

from torch import Tensor

from gnnpar_kernels.dispatch import body_of
from gnnpar_kernels.registration import define, public


@define(
    "dense(Tensor x, Tensor weight, Tensor? bias, Tensor? add) -> Tensor",
    fake=lambda x, weight, bias, add: x.new_empty((x.shape[0], weight.shape[0])),
)
def _dense(x: Tensor, weight: Tensor, bias: Tensor | None, add: Tensor | None) -> Tensor:
    return body_of("dense", x.device)(x, weight, bias=bias, add=add)


@public
def dense(x: Tensor, weight: Tensor, *, bias: Tensor | None = None, add: Tensor | None = None) -> Tensor:
    return _dense(x, weight, bias, add)
