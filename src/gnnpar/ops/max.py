"""Maximum over in-edges, element by element, with one winner per element. GraphSAGE-max."""

from __future__ import annotations

from dataclasses import dataclass

from gnnpar_kernels import extremum, extremum_finish, extremum_grad
from torch import Tensor

from gnnpar.ops.block import Block, Operands, Rows


@dataclass(frozen=True)
class Max:
    """out_i = max_j x_j (0 without in-edges). Ties go to the smallest global id, so any split of the edges agrees.

    Shapes: src (x [M, F],) -> out [N, F]; the gradient goes to the winner alone.
    """

    needs_src = False  # the winner's id is saved, not its value
    linear = False
    needs_edge_ids = False

    def init(self, num_dst: int, x: Operands) -> Rows:
        return ()

    def update(self, state: Rows, block: Block, x: Operands) -> Rows:
        assert block.src_ids is not None
        best, arg = extremum(
            block.indptr, block.indices, x.src[0], block.src_ids,
            num_rows=block.num_dst, rows=block.rows, state=(state[0], state[1]) if state else None,
        )  # fmt: skip
        return best, arg

    def finish(self, state: Rows) -> tuple[Tensor, Rows]:
        best, arg = state
        return extremum_finish((best, arg)), (arg,)

    def grad(self, block: Block, x: Operands, saved: Rows, grad_out: Tensor) -> Operands:
        assert block.src_ids is not None
        return Operands(src=(extremum_grad(saved[0], block.src_ids, grad_out),))
