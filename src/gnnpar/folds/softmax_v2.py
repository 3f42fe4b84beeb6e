"""Attention over in-edges with scores that read both ends' rows (GATv2), as an online softmax over blocks."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from gnnpar.folds.aggregator import ByBlock, EdgeDropout, Separates
from gnnpar.folds.block import Block, Operands, Rows, refuse_short, widened
from gnnpar.folds.mergeable import MergesSoftmax
from gnnpar_kernels import attend_finish, attend_v2, attend_v2_grad, row_dots


@dataclass(frozen=True)
class SoftmaxV2(MergesSoftmax, ByBlock):
    """out_i = sum_j alpha_ij x_j, alpha_ij = softmax_j(a . leaky_relu(x_j + y_i)), per head.

    The score is not a sum of one term per end, so gradients of destinations need the source rows: it is not Pushable.

    Shapes: src (x [M, H, D],), dst (y [N, H, D],), shared (a [H, D],) -> out [N, H, D]. Saved: out and logsumexp
    [N, H]. Source: Brody et al. 2022, equation 7; online softmax as in flash attention.
    """

    slope: float = 0.2
    dropout: EdgeDropout | None = None
    needs_src = True
    linear = False
    summed = False

    @property
    def separates(self) -> Separates:
        """Separation by heads, except with attention dropout, which draws one mask per edge for all heads."""
        return "heads" if self.dropout is None else "no"

    @property
    def needs_edge_ids(self) -> bool:
        return self.dropout is not None

    def init(self, num_dst: int, x: Operands) -> Rows:
        return ()

    def update(self, state: Rows, block: Block, x: Operands) -> Rows:
        refuse_short(block, x.src)
        return attend_v2(
            block.indptr,
            block.indices,
            x.src[0],
            x.dst[0],
            x.shared[0],
            slope=self.slope,
            num_rows=block.num_dst,
            rows=block.rows,
            state=state or None,
            drop=self.dropout,
            edge_ids=block.edge_ids,
        )

    def finish(self, state: Rows) -> tuple[Tensor, Rows]:
        out, logsumexp = attend_finish(state)
        return out, (out, logsumexp)

    def at_source(self) -> SoftmaxV2:
        return self

    def statistics(self, prepared: Rows) -> tuple[Tensor, Tensor]:
        return prepared[0], prepared[1]

    def prepare_partial(self, saved: Rows, back: Rows) -> tuple[Rows, Tensor]:
        return (saved[1], back[1]), back[0]

    def prepare(self, saved: Rows, grad_out: Tensor) -> Rows:
        """Return (logsumexp, <grad_out, out>), each [N, H]."""
        out, logsumexp = saved
        return logsumexp, row_dots(out, grad_out, dtype=logsumexp.dtype)

    def grad(self, block: Block, x: Operands, prepared: Rows, grad_out: Tensor) -> Operands:
        logsumexp, delta = prepared
        order = block.reverse_order  # before `reverse`, which drops it
        rows, near, attention = widened(x.src[0]), widened(x.dst[0]), widened(x.shared[0])  # to sum in fp32
        tensors = (rows, near, attention, logsumexp, grad_out, delta)
        grad_x, grad_y, grad_a = attend_v2_grad(
            block.forward, block.reverse, order, *tensors, slope=self.slope, drop=self.dropout
        )
        return Operands((grad_x,), (grad_y,), (), (grad_a,))
