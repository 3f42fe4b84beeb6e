"""Sum over in-edges in registers."""

# pyright: reportCallIssue=false, reportIndexIssue=false, reportAttributeAccessIssue=false, reportArgumentType=false
# pyright: reportGeneralTypeIssues=false

import triton
import triton.language as tl
from torch import Tensor

from gnnpar_kernels.triton_rows import Reduction, reduce_rows


@triton.jit
def _add(total, source, tile, other, TILE: tl.constexpr):
    if TILE:
        tile = tl.sum(tile, 0)
    return total + tile, source


@triton.jit
def _write(out, arg, ids, place, mask, total, source, FRESH: tl.constexpr):
    if not FRESH:
        total += tl.load(out + place, mask=mask, other=0.0)
    tl.store(out + place, total, mask=mask)


SUM = Reduction(_add, _write, empty=0.0, slots=8)


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
    """See `naive.spmm`. 16-bit rows are summed in fp32 and rounded once; the result is equal in every run."""
    assert rows is not None or indptr.shape[0] == num_rows + 1, f"{indptr.shape[0] - 1} CSR rows, {num_rows} of output"
    shape = (num_rows, *x.shape[1:])
    if indices.shape[0] == 0 or x[:1].numel() == 0:
        return x.new_zeros(shape) if out is None else out
    if out is None:
        result = x.new_empty(shape) if rows is None else x.new_zeros(shape)
    else:
        result = out.contiguous()
    weights = None if weights is None else weights.contiguous()
    reduce_rows(SUM, indptr, indices, x, result, fresh=out is None, rows=rows, weights=weights)
    return result if out is None or result is out else out.copy_(result)
