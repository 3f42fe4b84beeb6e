"""Attention over in-edges as an online softmax that chains over blocks: scores of GAT, GATv2 and dot products."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from gnnpar.folds.aggregator import ByBlock, EdgeDropout, Separates
from gnnpar.folds.block import Block, Operands, Rows, refuse_short, widened
from gnnpar.folds.mergeable import MergingSoftmax
from gnnpar_kernels import (
    Csr,
    attend,
    attend_dot,
    attend_dot_grad,
    attend_finish,
    attend_grad_dst,
    attend_grad_dst_of,
    attend_grad_src,
    attend_v2,
    attend_v2_grad,
    row_dots,
)


class _Attention(ByBlock):
    """Base of attention folds. Saved: out [N, H, D] and logsumexp [N, H]. Source: online softmax as in flash attention.

    Gradients of destinations need the source rows unless a score says otherwise.
    """

    dropout: EdgeDropout | None
    needs_src = True
    linear = False
    summed = False
    merging = MergingSoftmax()

    @property
    def separates(self) -> Separates:
        """Separation by heads, except with attention dropout, which draws one mask per edge for all heads."""
        return "heads" if self.dropout is None else "no"

    @property
    def needs_edge_ids(self) -> bool:
        return self.dropout is not None

    def finish(self, state: Rows) -> tuple[Tensor, Rows]:
        results = attend_finish(state)
        return results[0], results

    def prepare(self, saved: Rows, grad_out: Tensor) -> Rows:
        """Return (logsumexp, <grad_out, out>), each [N, H], and the other saved rows."""
        out, logsumexp, *others = saved
        return logsumexp, row_dots(out, grad_out, dtype=logsumexp.dtype), *others


@dataclass(frozen=True)
class Softmax(_Attention):
    """out_i = sum_j alpha_ij x_j, alpha_ij = softmax_j(leaky_relu(a_src_j + a_dst_i)), per head.

    `branch` also sums the sources with a positive score [N, H, D] and their weights [N, H]. The gradients of a row's
    activated scores sum to zero and the activation has two slopes, so these sums give the gradient of a_dst without
    another pass over the edges, and the fold is Pushable. Default: True while gradients are recorded.

    Shapes: src (x [M, H, D], a_src [M, H]), dst (a_dst [N, H],) -> out [N, H, D]. Source: Velickovic et al. 2018,
    equation 3.
    """

    slope: float = 0.2
    dropout: EdgeDropout | None = None
    branch: bool = field(default_factory=torch.is_grad_enabled)

    @property
    def separates_values(self) -> bool:
        return True

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

    def grad(self, block: Block, x: Operands, prepared: Rows, grad_out: Tensor) -> Operands:
        src = self.grad_src(block.reverse, x.src, (grad_out, widened(x.dst[0]), *prepared[:2]))
        if self.branch:
            return Operands(src=src)
        csr = block.forward
        dst = attend_grad_dst(
            csr.indptr,
            csr.indices,
            *self._tensors(x.src, widened(x.dst[0]), prepared[0], grad_out),
            slope=self.slope,
            rows=csr.rows,
            drop=self.dropout,
            edge_ids=csr.edge_ids,
            delta=prepared[1],
        )
        return Operands(src=src, dst=(dst,))

    def grad_dst(self, prepared: Rows, grad_out: Tensor) -> Rows:
        if not self.branch:
            return ()
        _, delta, mass_pos, pos = prepared
        return (attend_grad_dst_of(grad_out, grad_out, pos, mass_pos, slope=self.slope, delta=delta),)

    @staticmethod
    def _tensors(src: Rows, a_dst: Tensor, logsumexp: Tensor, grad_out: Tensor) -> Rows:
        """Return the operands of both gradients, in fp32 for 16-bit rows. `grad_out` replaces the output, which is not
        read if <grad_out, out> is given."""
        return widened(src[0]), widened(src[1]), a_dst, grad_out, logsumexp, grad_out

    def pushing(self) -> Softmax:
        return replace(self, branch=True)

    def pushed(self, x: Operands, prepared: Rows, grad_out: Tensor) -> Rows:
        """Return (grad_out [N, H, D] in the source rows' type, a_dst, logsumexp, <grad_out, out>, each [N, H])."""
        return grad_out.to(x.src[0].dtype), widened(x.dst[0]), *prepared[:2]

    def grad_src(self, back: Csr, src: Rows, pushed: Rows) -> Rows:
        grad_out, a_dst, logsumexp, delta = pushed
        return attend_grad_src(
            back.indptr,
            back.indices,
            *self._tensors(src, a_dst, logsumexp, grad_out),
            slope=self.slope,
            rows=back.rows,
            drop=self.dropout,
            edge_ids=back.edge_ids,
            delta=delta,
        )


@dataclass(frozen=True)
class SoftmaxV2(_Attention):
    """out_i = sum_j alpha_ij x_j, alpha_ij = softmax_j(a . leaky_relu(x_j + y_i)), per head.

    The score does not split into a term of each end, so gradients of destinations need source rows: not Pushable.

    Shapes: src (x [M, H, D],), dst (y [N, H, D],), shared (a [H, D],) -> out [N, H, D]. Source: Brody et al. 2022,
    equation 7.
    """

    slope: float = 0.2
    dropout: EdgeDropout | None = None

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

    def grad(self, block: Block, x: Operands, prepared: Rows, grad_out: Tensor) -> Operands:
        logsumexp, delta = prepared
        order = block.reverse_order  # before `reverse`, which reuses it
        rows, near, attention = widened(x.src[0]), widened(x.dst[0]), widened(x.shared[0])  # gradients sum in fp32
        tensors = (rows, near, attention, logsumexp, grad_out, delta)
        grad_x, grad_y, grad_a = attend_v2_grad(
            block.forward, block.reverse, order, *tensors, slope=self.slope, drop=self.dropout
        )
        return Operands((grad_x,), (grad_y,), (), (grad_a,))


@dataclass(frozen=True)
class SoftmaxDot(_Attention):
    """out_i = sum_j alpha_ij [v_j, e_ij], alpha_ij = softmax_j(<q_i, k_j> + <r_i, e_ij>), per head.

    Without rows of edges, omit e and r. `of_edges`: compute the gradient of edge rows; else it is 0. For keys
    k_j + W e_ij and values v_j + W e_ij with a matrix W, use r_i = W^T q_i, and add W times the last A columns of the
    result to the others. The caller scales queries.

    Shapes: src (k [M, H, D], v [M, H, D]), dst (q [N, H, D],) -> out [N, H, D]; with edge (e [E, A],), dst (q, r
    [N, H, A]) -> out [N, H, D + A]. Source: Shi et al. 2021, equations 3 to 5.
    """

    dropout: EdgeDropout | None = None
    with_edges: bool = False
    of_edges: bool = False

    @property
    def separates(self) -> Separates:
        return "no" if self.with_edges else super().separates

    def update(self, state: Rows, block: Block, x: Operands) -> Rows:
        refuse_short(block, x.src)
        (key, value), (edge, edge_query) = x.src, self._edge_operands(x)
        return attend_dot(
            block.indptr,
            block.indices,
            key,
            value,
            x.dst[0],
            num_rows=block.num_dst,
            rows=block.rows,
            state=state or None,
            drop=self.dropout,
            edge_ids=block.edge_ids,
            edge=edge,
            edge_query=edge_query,
        )

    def grad(self, block: Block, x: Operands, prepared: Rows, grad_out: Tensor) -> Operands:
        logsumexp, delta = prepared
        order = block.reverse_order  # before `reverse`, which reuses it
        x = Operands(*(tuple(map(widened, rows)) for rows in x))  # gradients sum in fp32
        edge, edge_query = self._edge_operands(x)
        grads = attend_dot_grad(
            block.forward,
            block.reverse,
            order,
            *(x.src[0], x.src[1], x.dst[0], logsumexp, grad_out, delta),
            drop=self.dropout,
            edge=edge,
            edge_query=edge_query,
            of_edge=self.of_edges,
        )
        ends = 2 + len(x.dst)
        of_edges = grads[ends:] or tuple(t.new_zeros(1).expand(t.shape) for t in x.edge)
        return Operands(grads[:2], grads[2:ends], of_edges)

    def value(self, src: Rows, dst: Rows, edge: Rows, shared: Rows) -> Tensor:
        """Return the values of edges. Shapes: v [e, H, D], e [e, A] or none -> [e, H, D + A]."""
        return torch.cat([src[1], *(t[:, None].expand(-1, src[1].shape[1], -1) for t in edge)], dim=-1)

    def _edge_operands(self, x: Operands) -> tuple[Tensor | None, Tensor | None]:
        """Return the rows of edges and their queries r, or None."""
        return (x.edge[0], x.dst[1]) if self.with_edges else (None, None)
