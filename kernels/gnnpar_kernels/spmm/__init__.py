"""Sum over in-edges: out_i += sum_j w_ij x_j, the sum fold and, on the transposed CSR, its gradient; without weights
w_ij is 1.

Shapes: indptr [R + 1], indices [E], x [M, ...], rows [R] or None, weights [E] or None -> [num_rows, ...]; 16-bit rows
are summed in fp32. Floor, rows of F entries of b bytes: E (F b + 4) + N (F b + 8) bytes, every gathered row once and
every output row once; weights add their bytes once.
"""

from torch import Tensor

from gnnpar_kernels.dispatch import body_of
from gnnpar_kernels.registration import CSR, define, public


@define(
    f"spmm({CSR}, Tensor x, SymInt num_rows, Tensor? rows, Tensor? weights) -> Tensor",
    fake=lambda indptr, indices, x, num_rows, rows, weights: x.new_empty((num_rows, *x.shape[1:])),
)
def _spmm(
    indptr: Tensor, indices: Tensor, x: Tensor, num_rows: int, rows: Tensor | None, weights: Tensor | None
) -> Tensor:
    return body_of("spmm", x.device)(indptr, indices, x, num_rows=num_rows, rows=rows, weights=weights)


@define(f"spmm_({CSR}, Tensor x, SymInt num_rows, Tensor? rows, Tensor? weights, Tensor(a!) out) -> ()")
def _spmm_(
    indptr: Tensor,
    indices: Tensor,
    x: Tensor,
    num_rows: int,
    rows: Tensor | None,
    weights: Tensor | None,
    out: Tensor,
) -> None:
    body_of("spmm", x.device)(indptr, indices, x, num_rows=num_rows, rows=rows, weights=weights, out=out)


@public
def spmm(
    indptr: Tensor,
    indices: Tensor,
    x: Tensor,
    *,
    num_rows: int,
    rows: Tensor | None = None,
    weights: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor:
    if out is None:
        return _spmm(indptr, indices, x, num_rows, rows, weights)
    _spmm_(indptr, indices, x, num_rows, rows, weights, out)
    return out
