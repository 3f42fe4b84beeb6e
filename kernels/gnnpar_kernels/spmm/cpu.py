"""Sum over in-edges as embedding bags over CSR, without edge tensors."""

from torch import Tensor

from gnnpar_kernels.cpu_bags import bag, row_blocks
from gnnpar_kernels.csr import accumulate_dtype, flat_rows

BLOCK = 1 << 17  # edges: the sums of a block are in cache when they are added to `out`


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
    """See `naive.spmm`. 16-bit rows are summed in fp32 and rounded once, or never if `out` is wider."""
    table, wide = flat_rows(x), accumulate_dtype(x.dtype)
    if weights is not None or (out is not None and out.dtype == wide):
        table = table.to(wide)  # a bag has one dtype, that of its sums: 16-bit weights or sums would be rounded twice
    if weights is not None:
        weights = weights.to(wide)
    assert rows is not None or indptr.shape[0] == num_rows + 1, f"{indptr.shape[0] - 1} CSR rows, {num_rows} of output"
    if out is None and rows is None:
        total = bag(table, indices, indptr, weights).to(x.dtype)
        return total if x.ndim == 2 else total.view(num_rows, *x.shape[1:])  # autograd forbids writes into a view
    result = x.new_zeros((num_rows, *x.shape[1:])) if out is None else out
    if indices.shape[0] == 0 or table.shape[1] == 0:
        return result
    for block in row_blocks(indptr, indices, edges=BLOCK):
        weights_here = None if weights is None else weights[block.begin : block.end]
        total = bag(table, block.indices, block.offsets, weights_here).view(block.num_rows, *x.shape[1:])
        if rows is None:
            result[block.first : block.last].add_(total)
        else:
            result.index_add_(0, rows[block.first : block.last], total.to(result.dtype))
    return result
