"""Sum over in-edges: Y = A X, for GCN, GraphSAGE-mean, GIN, GCNII. weighted: by edge weights, if any. types: one sum
per edge type, R-GCN's Y_r = A_r X."""

from __future__ import annotations

from dataclasses import dataclass, replace

from torch import Tensor

from gnnpar.folds.aggregator import ByBlock, Separates
from gnnpar.folds.block import Block, Operands, Rows, refuse_short
from gnnpar.folds.mergeable import Merging
from gnnpar_kernels import Csr, spmm
from gnnpar_kernels.csr import accumulate_dtype


@dataclass(frozen=True)
class Sum(ByBlock):
    """out_i = sum_j x_j; `weighted`: sum_j w_ij x_j with the weights of the graph, 1 without weights.

    types (not 0): out_ir is the sum over the in-edges of type r, 0 <= r < types: the same sum with pairs (i, r) as
    destinations. Rows are sent as for one sum. Edges of a graph without types have type 0. Weights that factor into
    rows (symmetric normalisation, mean) belong to the model.

    Shapes: src (x [M, ...],) -> out [N, ...], or [N, types, ...].
    """

    weighted: bool = False
    types: int = 0
    needs_src = False
    linear = True
    summed = True

    @property
    def separates(self) -> Separates:
        return "no" if self.types else "columns"

    @property
    def separates_values(self) -> bool:
        return bool(self.types)

    @property
    def merging(self) -> Merging:
        return Merging(self.types, replace(self, types=0))

    def update(self, state: Rows, block: Block, x: Operands) -> Rows:
        refuse_short(block, x.src)
        rows, out = x.src[0], state[0] if state else None
        if not self.types:
            return (self._sums(block.forward, rows, block.num_dst, out),)
        shape = (block.num_dst, self.types, *rows.shape[1:])
        flat = None if out is None else out.view(shape[0] * self.types, *shape[2:])
        return (self._sums(block.forward_by_type(self.types), rows, shape[0] * self.types, flat).view(shape),)

    def grad(self, block: Block, x: Operands, prepared: Rows, grad_out: Tensor) -> Operands:
        return Operands(src=(self.grad_src(block.reverse, grad_out, block.num_src),))

    def grad_src(self, back: Csr, grad_out: Tensor, num_src: int) -> Tensor:
        """Return the gradient of the rows of a transposed CSR. Shapes: grad_out as `out` -> [num_src, ...]."""
        if self.types:
            back, grad_out = self._by_pair(back, len(grad_out)), grad_out.flatten(0, 1)
        return self._sums(back, grad_out, num_src)

    def _by_pair(self, back: Csr, num_dst: int) -> Csr:
        """Return the transposed CSR with pairs (destination, type) as indices."""
        indptr, indices = back.indptr, back.indices
        if num_dst * self.types >= 2**31:
            indptr, indices = indptr.long(), indices.long()
        indices = indices * self.types
        if back.types is not None:
            indices += back.types
        return back._replace(indptr=indptr, indices=indices)

    def _sums(self, csr: Csr, x: Tensor, num_rows: int, out: Tensor | None = None) -> Tensor:
        """Return the sums of the rows of a CSR, added to `out`. Shapes: x [M, ...] -> [num_rows, ...]."""
        weights = csr.weights if self.weighted else None
        if out is None and (dtype := accumulate_dtype(x.dtype)) != x.dtype:
            out = x.new_zeros(num_rows, *x.shape[1:], dtype=dtype)
        return spmm(csr.indptr, csr.indices, x, num_rows=num_rows, rows=csr.rows, weights=weights, out=out)
