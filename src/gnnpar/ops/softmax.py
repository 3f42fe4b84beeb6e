"""Attention over in-edges with additive scores (GAT), as an online softmax whose state chains over blocks."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from gnnpar.ops.aggregator import EdgeDropout
from gnnpar.ops.block import Block, Operands, Rows
from gnnpar_kernels import Csr, attend, attend_finish, attend_grad, attend_grad_dst_of, attend_grad_src


@dataclass(frozen=True)
class Softmax:
    """out_i = sum_j alpha_ij x_j, alpha_ij = softmax_j(leaky_relu(a_src_j + a_dst_i)), per head.

    Shapes: src (x [M, H, D], a_src [M, H]), dst (a_dst [N, H],) -> out [N, H, D]. Saved: out and logsumexp [N, H].
    Source: Velickovic et al. 2018, equation 3; online softmax as in flash attention.

    `branch`: also save the weights' mass over in-edges with a positive score [N, H] and their part of out [N, H, D].
    The gradients of a row's activated scores sum to zero and the activation has two slopes, so these give the gradient
    of a_dst without another look at the edges: the fold is Pushable.
    """

    slope: float = 0.2
    dropout: EdgeDropout | None = None
    branch: bool = False
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
            rows=block.rows, state=state or None, drop=self.dropout, edge_ids=block.edge_ids, branch=self.branch,
        )  # fmt: skip

    def finish(self, state: Rows) -> tuple[Tensor, Rows]:
        saved = attend_finish(state)
        return saved[0], saved

    def grad(self, block: Block, x: Operands, saved: Rows, grad_out: Tensor) -> Operands:
        features, a_src = x.src
        out, logsumexp, *_ = saved
        grad_x, grad_a_src, grad_a_dst = attend_grad(
            block.forward, block.reverse, features, a_src, x.dst[0], out, logsumexp, grad_out,
            slope=self.slope, drop=self.dropout,
        )  # fmt: skip
        return Operands(src=(grad_x, grad_a_src), dst=(grad_a_dst,))

    def pushing(self) -> Softmax:
        return replace(self, branch=True)

    def pushed(self, x: Operands, saved: Rows, grad_out: Tensor) -> Rows:
        """(grad_out [N, H, D], a_dst, logsumexp, <grad_out, out>, each [N, H])."""
        out, logsumexp, *_ = saved
        delta = torch.linalg.vecdot(grad_out.to(logsumexp.dtype), out.to(logsumexp.dtype))
        return grad_out, x.dst[0], logsumexp, delta

    def grad_src(self, back: Csr, src: Rows, pushed: Rows) -> Rows:
        grad_out, a_dst, logsumexp, delta = pushed
        return attend_grad_src(
            back.indptr, back.indices, *src, a_dst, grad_out, logsumexp, grad_out, slope=self.slope, rows=back.rows,
            drop=self.dropout, edge_ids=back.edge_ids, delta=delta,
        )  # fmt: skip  # with delta given, the output is not read

    def grad_dst(self, saved: Rows, pushed: Rows) -> Rows:
        out, _, mass_pos, pos = saved
        grad_out, a_dst, _, delta = pushed
        return (attend_grad_dst_of(grad_out, out, pos, mass_pos, slope=self.slope, delta=delta).to(a_dst.dtype),)
