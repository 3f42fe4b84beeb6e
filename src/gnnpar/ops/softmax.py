"""Attention over in-edges with additive scores (GAT), as an online softmax whose state chains over blocks."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from gnnpar.ops.aggregator import EdgeDropout
from gnnpar.ops.block import Block, Operands, Rows
from gnnpar_kernels import attend, attend_finish, attend_grad


@dataclass(frozen=True)
class Softmax:
    """out_i = sum_j alpha_ij x_j, alpha_ij = softmax_j(leaky_relu(a_src_j + a_dst_i)), per head.

    Shapes: src (x [M, H, D], a_src [M, H]), dst (a_dst [N, H],) -> out [N, H, D]. Saved: out and logsumexp [N, H].
    Source: Velickovic et al. 2018, equation 3; online softmax as in flash attention.
    """

    slope: float = 0.2
    dropout: EdgeDropout | None = None
    needs_src = True
    linear = False

    @property
    def needs_edge_ids(self) -> bool:
        return self.dropout is not None

    def init(self, num_dst: int, x: Operands) -> Rows:
        return ()

    def update(self, state: Rows, block: Block, x: Operands) -> Rows:
        features, a_src = x.src
        return attend(
            block.indptr, block.indices, features, a_src, x.dst[0], slope=self.slope, num_rows=block.num_dst,
            rows=block.rows, state=(state[0], state[1], state[2]) if state else None,
            drop=self.dropout, edge_ids=block.edge_ids,
        )  # fmt: skip

    def finish(self, state: Rows) -> tuple[Tensor, Rows]:
        m, normaliser, acc = state
        out, logsumexp = attend_finish((m, normaliser, acc))
        return out, (out, logsumexp)

    def grad(self, block: Block, x: Operands, saved: Rows, grad_out: Tensor) -> Operands:
        features, a_src = x.src
        out, logsumexp = saved
        grad_x, grad_a_src, grad_a_dst = attend_grad(
            block.forward, block.reverse, features, a_src, x.dst[0], out, logsumexp, grad_out,
            slope=self.slope, drop=self.dropout,
        )  # fmt: skip
        return Operands(src=(grad_x, grad_a_src), dst=(grad_a_dst,))
