"""Sum over in-edges, out_i += sum_j w_ij x_j: the specification, index_add over all edges at once."""

from torch import Tensor

from gnnpar_kernels.csr import accumulate_dtype, edge_rows


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
    """Add to out[rows[r]] (None: zeros) the sum of weights[e] x[indices[e]] over the edges e of CSR row r.

    Shapes: indptr [R + 1], indices [E], x [M, ...], rows [R] or None, weights [E] or None (all 1), out [num_rows, ...]
    or None -> [num_rows, ...].
    """
    dtype = accumulate_dtype(x.dtype)
    total = x.new_zeros((num_rows, *x.shape[1:]), dtype=dtype)
    gathered = x.index_select(0, indices).to(dtype)
    if weights is not None:
        gathered.mul_(weights.to(dtype).view(-1, *[1] * (x.ndim - 1)))
    total.index_add_(0, edge_rows(indptr, rows), gathered)
    return total.to(x.dtype) if out is None else out.add_(total)
