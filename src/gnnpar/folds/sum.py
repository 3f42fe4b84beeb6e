"""Sum over in-edges: Y = A X. GCN, GraphSAGE-mean, GIN, GCNII. `weighted`: by the weights of edges, if any."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from gnnpar.folds.aggregator import ByBlock, Separates
from gnnpar.folds.block import Block, Operands, Rows
from gnnpar_kernels import Csr, spmm


@dataclass(frozen=True)
class Sum(ByBlock):
    """out_i = sum_j x_j; `weighted`: sum_j w_ij x_j with the weights of the graph, 1 where it has none.

    Weights that factor into rows (symmetric normalisation, mean) belong to the model.

    Shapes: src (x [M, ...],) -> out [N, ...].
    """

    weighted: bool = False
    needs_src = False
    linear = True
    summed = True
    needs_edge_ids = False

    @property
    def separates(self) -> Separates:
        return "columns"

    def init(self, num_dst: int, x: Operands) -> Rows:
        return ()

    def update(self, state: Rows, block: Block, x: Operands) -> Rows:
        out = state[0] if state else None
        return (self.of(block.forward, x.src[0], block.num_dst, out),)

    def finish(self, state: Rows) -> tuple[Tensor, Rows]:
        return state[0], ()

    def grad(self, block: Block, x: Operands, prepared: Rows, grad_out: Tensor) -> Operands:
        return Operands(src=(self.of(block.reverse, grad_out, block.num_src),))

    def of(self, csr: Csr, x: Tensor, num_rows: int, out: Tensor | None = None) -> Tensor:
        """The sums of the rows of a CSR, added to `out`. Shapes: x [M, ...] -> [num_rows, ...]."""
        weights = csr.weights if self.weighted else None
        return spmm(csr.indptr, csr.indices, x, num_rows=num_rows, rows=csr.rows, weights=weights, out=out)
