"""Gradient of the GAT aggregation on a CPU: weighted bags over both orientations, no product per edge.

With alpha the weights, s' the slope of the activation, K the dropout mask, Delta_i = <dO_i, O_i>:
    dz_j   = sum_i alpha K dO_i
    del_j  = <z_j, sum_i alpha s' K dO_i> - sum_i alpha s' Delta_i         (reverse CSR)
    der_i  = <dO_i, sum_j alpha s' K z_j> - Delta_i sum_j alpha s'         (forward CSR)
alpha = exp(score) exp(-lse_i): where scores are small, exp(-lse) is folded into the rows, not the edges.
"""

import torch
from torch import Tensor

from gnnpar_kernels.cpu.bags import bag, row_blocks, row_sums
from gnnpar_kernels.cpu.scores import (
    BLOCK,
    PLAIN,
    BlockScores,
    Buffers,
    Dropping,
    apply_keep,
    edge_hash,
    head_major,
    is_plain,
    largest,
)
from gnnpar_kernels.csr import Csr
from gnnpar_kernels.naive.attend import Drop


def _delta(out: Tensor, lse: Tensor, grad_out: Tensor, delta: Tensor | None) -> Tensor:
    """<dO, O> per row and head. Shapes: out, grad_out [N, H, D] -> [N, H]."""
    return (out.to(lse.dtype) * grad_out.to(lse.dtype)).sum(-1) if delta is None else delta.to(lse.dtype)


def _row_factor(lse: Tensor) -> Tensor:
    """exp(-lse); rows whose lse is below every score have no edge here, and must not overflow."""
    return torch.exp(-lse.clamp(min=-PLAIN - 1.0))


class _Edges:
    """Weights alpha s' and alpha K of one block and head, up to the factor folded into rows."""

    def __init__(self, scores: BlockScores, dropping: Dropping | None, edge_ids: Tensor | None) -> None:
        self.scores, self.dropping = scores, dropping
        self.hashed = edge_hash(dropping, edge_ids, scores.block)

    def slopes(self, score: Tensor, weight: Tensor) -> Tensor:
        """weight * s'. Shapes: [E] -> [E]."""
        return torch.ops.aten.leaky_relu_backward(weight, score, self.scores.slope, False)

    def bits(self, head: int) -> Tensor | None:
        """The dropout mask of a head, None without dropout."""
        if self.dropping is None or self.hashed is None:
            return None
        return self.scores.keep(self.dropping, self.hashed, head)

    def kept(self, weight: Tensor, bits: Tensor | None) -> Tensor:
        """weight * K, in place. Shapes: [E] -> [E]."""
        if bits is None or self.dropping is None:
            return weight
        return apply_keep(weight, bits, scale=1.0 / (1.0 - self.dropping.p), out=weight)


def attend_grad_src(
    indptr: Tensor,
    indices: Tensor,
    x: Tensor,
    a_src: Tensor,
    a_dst: Tensor,
    out: Tensor,
    lse: Tensor,
    grad_out: Tensor,
    *,
    slope: float,
    rows: Tensor | None = None,
    drop: Drop | None = None,
    edge_ids: Tensor | None = None,
    delta: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """See `naive.attend_grad_src`."""
    dtype, num_heads = lse.dtype, x.shape[1]
    grad_x = torch.zeros(x.shape, dtype=dtype)
    grad_a = torch.zeros(a_src.shape, dtype=dtype)
    if indices.shape[0] == 0:
        return grad_x.to(x.dtype), grad_a.to(a_src.dtype)
    a_src, a_dst, delta = a_src.to(dtype), a_dst.to(dtype), _delta(out, lse, grad_out, delta)
    plain = is_plain(a_src, a_dst, slope)
    factor = _row_factor(lse) if plain else None
    table = head_major(grad_out, dtype, factor)
    shift = (delta if factor is None else delta * factor).t().contiguous()
    a_row = (a_src if rows is None else a_src.index_select(0, rows)).t().contiguous()
    a_col, lse_col = a_dst.t().contiguous(), lse.t().contiguous()
    dropping = Dropping.of(drop, edge_ids, num_heads)
    buffers = Buffers(dtype, edges=largest(indptr))
    for block in row_blocks(indptr, indices, edges=BLOCK):
        edges = _Edges(BlockScores(block, buffers, slope=slope), dropping, edge_ids)
        where = slice(block.first, block.last) if rows is None else rows[block.first : block.last]
        part = torch.empty((block.num_rows, *x.shape[1:]), dtype=dtype)
        part_a = torch.empty((block.num_rows, num_heads), dtype=dtype)
        own = x[where].to(dtype)
        for head in range(num_heads):
            score = edges.scores.raw(a_row[head, block.first : block.last], a_col[head])
            weight = edges.scores.weights(score, shift_col=None if plain else lse_col[head])
            sloped, bits = edges.slopes(score, weight), edges.bits(head)
            lost = bag(shift[head, :, None], block.indices, block.offsets, sloped)[:, 0]
            part[:, head] = bag(table[head], block.indices, block.offsets, edges.kept(weight, bits))
            pulled = bag(table[head], block.indices, block.offsets, edges.kept(sloped, bits))
            part_a[:, head] = (own[:, head] * pulled).sum(-1) - lost
        grad_x[where], grad_a[where] = part, part_a
    return grad_x.to(x.dtype), grad_a.to(a_src.dtype)


def attend_grad_dst(
    indptr: Tensor,
    indices: Tensor,
    x: Tensor,
    a_src: Tensor,
    a_dst: Tensor,
    out: Tensor,
    lse: Tensor,
    grad_out: Tensor,
    *,
    slope: float,
    rows: Tensor | None = None,
    drop: Drop | None = None,
    edge_ids: Tensor | None = None,
    delta: Tensor | None = None,
) -> Tensor:
    """See `naive.attend_grad_dst`."""
    dtype, num_heads = lse.dtype, x.shape[1]
    grad_a = torch.zeros(a_dst.shape, dtype=dtype)
    if indices.shape[0] == 0:
        return grad_a.to(a_dst.dtype)
    result_dtype = a_dst.dtype
    a_src, a_dst, delta = a_src.to(dtype), a_dst.to(dtype), _delta(out, lse, grad_out, delta)
    plain = is_plain(a_src, a_dst, slope)
    factor = _row_factor(lse) if plain else None
    table = head_major(x, dtype)
    a_row, lse_row = (
        (t if rows is None else t.index_select(0, rows)).t().contiguous() for t in (a_dst, lse)
    )  # fmt: skip
    a_col = a_src.t().contiguous()
    dropping = Dropping.of(drop, edge_ids, num_heads)
    size = largest(indptr)
    buffers, positions = Buffers(dtype, edges=size), torch.arange(size, dtype=indices.dtype)
    for block in row_blocks(indptr, indices, edges=BLOCK):
        edges = _Edges(BlockScores(block, buffers, slope=slope), dropping, edge_ids)
        span = slice(block.first, block.last)
        where = span if rows is None else rows[span]
        part = torch.empty((block.num_rows, num_heads), dtype=dtype)
        grads, lost = grad_out[where].to(dtype), delta[where]
        for head in range(num_heads):
            score = edges.scores.raw(a_row[head, span], a_col[head])
            weight = edges.scores.weights(score, shift_row=None if plain else lse_row[head, span])
            sloped = edges.slopes(score, weight)
            mass = row_sums(sloped, block.offsets, positions[: block.num_edges])
            pulled = bag(table[head], block.indices, block.offsets, edges.kept(sloped, edges.bits(head)))
            part[:, head] = (grads[:, head] * pulled).sum(-1) - lost[:, head] * mass
        grad_a[where] = part if factor is None else part * factor[where]
    return grad_a.to(result_dtype)


def attend_grad(
    forward: Csr,
    reverse: Csr,
    x: Tensor,
    a_src: Tensor,
    a_dst: Tensor,
    out: Tensor,
    lse: Tensor,
    grad_out: Tensor,
    *,
    slope: float,
    drop: Drop | None = None,
    delta: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """See `naive.attend_grad`."""
    delta = _delta(out, lse, grad_out, delta)
    tensors = (x, a_src, a_dst, out, lse, grad_out)
    grad_x, grad_a_src = attend_grad_src(
        reverse.indptr, reverse.indices, *tensors,
        slope=slope, rows=reverse.rows, drop=drop, edge_ids=reverse.edge_ids, delta=delta,
    )  # fmt: skip
    grad_a_dst = attend_grad_dst(
        forward.indptr, forward.indices, *tensors,
        slope=slope, rows=forward.rows, drop=drop, edge_ids=forward.edge_ids, delta=delta,
    )  # fmt: skip
    return grad_x, grad_a_src, grad_a_dst
