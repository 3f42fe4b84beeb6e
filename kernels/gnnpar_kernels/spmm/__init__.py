"""Sum over in-edges: out_i += sum_j x_j, the sum fold and, on the transposed CSR, its gradient.

Shapes: indptr [R + 1], indices [E], x [M, ...], rows [R] or None -> [num_rows, ...]; 16-bit rows are summed in fp32.
Floor, rows of F entries of b bytes: E (F b + 4) + N (F b + 8) bytes, every gathered row once and every output row once.
"""

from torch import Tensor

from gnnpar_kernels.dispatch import body_of
from gnnpar_kernels.registration import CSR, define, public


@define(
    f"spmm({CSR}, Tensor x, SymInt num_rows, Tensor? rows) -> Tensor",
    fake=lambda indptr, indices, x, num_rows, rows: x.new_empty((num_rows, *x.shape[1:])),
)
def _spmm(indptr: Tensor, indices: Tensor, x: Tensor, num_rows: int, rows: Tensor | None) -> Tensor:
    return body_of("spmm", x.device)(indptr, indices, x, num_rows=num_rows, rows=rows)


@define(f"spmm_({CSR}, Tensor x, SymInt num_rows, Tensor? rows, Tensor(a!) out) -> ()")
def _spmm_(indptr: Tensor, indices: Tensor, x: Tensor, num_rows: int, rows: Tensor | None, out: Tensor) -> None:
    body_of("spmm", x.device)(indptr, indices, x, num_rows=num_rows, rows=rows, out=out)


@public
def spmm(
    indptr: Tensor, indices: Tensor, x: Tensor, *, num_rows: int, rows: Tensor | None = None, out: Tensor | None = None
) -> Tensor:
    if out is None:
        return _spmm(indptr, indices, x, num_rows, rows)
    _spmm_(indptr, indices, x, num_rows, rows, out)
    return out
