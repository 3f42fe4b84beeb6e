"""Sum over in-edges: Y = A X. GCN, GraphSAGE-mean, GIN, GCNII."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from gnnpar.folds.aggregator import ByBlock, Separates
from gnnpar.folds.block import Block, Operands, Rows
from gnnpar_kernels import spmm


@dataclass(frozen=True)
class Sum(ByBlock):
    """out_i = sum_j x_j. Weights that factor into rows (symmetric normalisation, mean) belong to the model.

    Shapes: src (x [M, ...],) -> out [N, ...].
    """

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
        return (spmm(block.indptr, block.indices, x.src[0], num_rows=block.num_dst, rows=block.rows, out=out),)

    def finish(self, state: Rows) -> tuple[Tensor, Rows]:
        return state[0], ()

    def grad(self, block: Block, x: Operands, prepared: Rows, grad_out: Tensor) -> Operands:
        csr = block.reverse
        return Operands(src=(spmm(csr.indptr, csr.indices, grad_out, num_rows=block.num_src, rows=csr.rows),))
