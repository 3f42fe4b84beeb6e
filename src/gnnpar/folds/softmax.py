"""Attention over in-edges with additive scores (GAT), as an online softmax with a state that chains over blocks."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from gnnpar.folds.aggregator import EdgeDropout, Separates
from gnnpar.folds.block import Block, Operands, Rows, refuse_short, widened
from gnnpar.folds.mergeable import MergesSoftmax
from gnnpar_kernels import Csr, attend, attend_finish, attend_grad_dst, attend_grad_dst_of, attend_grad_src, row_dots


@dataclass(frozen=True)
class Softmax(MergesSoftmax):
    """out_i = sum_j alpha_ij x_j, alpha_ij = softmax_j(leaky_relu(a_src_j + a_dst_i)), per head.

    `branch` also sums the sources with a positive score [N, H, D] and their weights [N, H]. The gradients of a row's
    activated scores sum to zero and the activation has two slopes, so these sums give the gradient of a_dst without
    another pass over the edges, and the fold is Pushable. By default this is done if gradients are recorded.

    Shapes: src (x [M, H, D], a_src [M, H]), dst (a_dst [N, H],) -> out [N, H, D]. Saved: out and logsumexp [N, H].
    Source: Velickovic et al. 2018, equation 3; online softmax as in flash attention.
    """

    slope: float = 0.2
    dropout: EdgeDropout | None = None
    branch: bool = field(default_factory=torch.is_grad_enabled)
    needs_src = True
    linear = False
    summed = False
    separates_values = True
    whole_neighborhood = False

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
        features, a_src = x.src
        return attend(
            block.indptr,
            block.indices,
            features,
            widened(a_src),
            widened(x.dst[0]),
            slope=self.slope,
            num_rows=block.num_dst,
            rows=block.rows,
            state=state or None,
            drop=self.dropout,
            edge_ids=block.edge_ids,
            branch=self.branch,
        )

    def finish(self, state: Rows) -> tuple[Tensor, Rows]:
        results = attend_finish(state)
        return results[0], results

    def prepare(self, saved: Rows, grad_out: Tensor) -> Rows:
        out, logsumexp, *branch = saved
        return out, logsumexp, row_dots(out, grad_out, dtype=logsumexp.dtype), *branch

    def grad(self, block: Block, x: Operands, prepared: Rows, grad_out: Tensor) -> Operands:
        features, a_src = map(widened, x.src)  # gradients of 16-bit rows are summed in fp32
        out, logsumexp, delta = prepared[:3]
        tensors = (features, a_src, widened(x.dst[0]), out, logsumexp, grad_out)
        csr = block.reverse
        src = attend_grad_src(
            csr.indptr,
            csr.indices,
            *tensors,
            slope=self.slope,
            rows=csr.rows,
            drop=self.dropout,
            edge_ids=csr.edge_ids,
            delta=delta,
        )
        if self.branch:
            return Operands(src=src)
        csr = block.forward
        dst = attend_grad_dst(
            csr.indptr,
            csr.indices,
            *tensors,
            slope=self.slope,
            rows=csr.rows,
            drop=self.dropout,
            edge_ids=csr.edge_ids,
            delta=delta,
        )
        return Operands(src=src, dst=(dst,))

    def grad_dst(self, prepared: Rows, grad_out: Tensor) -> Rows:
        if not self.branch:
            return ()
        out, _, delta, mass_pos, pos = prepared
        return (attend_grad_dst_of(grad_out, out, pos, mass_pos, slope=self.slope, delta=delta),)

    def at_source(self) -> Softmax:
        return self

    def statistics(self, prepared: Rows) -> tuple[Tensor, Tensor]:
        return prepared[1], prepared[2]

    def prepare_partial(self, saved: Rows, back: Rows) -> tuple[Rows, Tensor]:
        """Return (prepared, grad_out). The destinations' gradient is a sum over the positive branch of all edges, in
        one term per rank."""
        out, logsumexp, *branch = saved
        return (out, logsumexp, back[1], *branch), back[0]

    def pushing(self) -> Softmax:
        return replace(self, branch=True)

    def pushed(self, x: Operands, prepared: Rows, grad_out: Tensor) -> Rows:
        """Return (grad_out [N, H, D] in the source rows' type, a_dst, logsumexp, <grad_out, out>, each [N, H])."""
        _, logsumexp, delta, *_ = prepared
        return grad_out.to(x.src[0].dtype), widened(x.dst[0]), logsumexp, delta

    def grad_src(self, back: Csr, src: Rows, pushed: Rows) -> Rows:
        features, a_src = map(widened, src)
        grad_out, a_dst, logsumexp, delta = pushed
        return attend_grad_src(
            back.indptr,
            back.indices,
            features,
            a_src,
            a_dst,
            grad_out,
            logsumexp,
            grad_out,
            slope=self.slope,
            rows=back.rows,
            drop=self.dropout,
            edge_ids=back.edge_ids,
            delta=delta,
        )  # with delta given, the output is not read
