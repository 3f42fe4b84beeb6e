"""The whole graph on one device: Y = A X. And the fold over one block that every view is made of."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from gnnpar.folds.aggregator import Aggregator
from gnnpar.folds.block import Block, Operands, Rows
from gnnpar.parallel.torch_types import Context, apply
from gnnpar.parallel.view import View


@dataclass(eq=False)
class WholeGraph(View):
    """A shard that needs nobody else's rows (the only part, or a test's whole graph)."""

    def aggregate(self, agg: Aggregator, src: Rows, dst: Rows = (), edge: Rows = (), shared: Rows = ()) -> Tensor:
        call = self.next_call()
        if (kept := self.kept_result(call, agg, src)) is not None:
            return kept
        return self.keep_result(call, agg, src, fold_all_edges(agg, self.shard.inner, src, dst, edge, shared))


def fold_all_edges(agg: Aggregator, block: Block, src: Rows, dst: Rows, edge: Rows, shared: Rows) -> Tensor:
    """`fold_block` of a block with all in-edges of its rows. Rows of `edge` ascend by edge id."""
    if edge and (places := block.edge_places) is not None:
        edge = tuple(rows[places] for rows in edge)
    return fold_block(agg, block, src, dst, edge, shared)


def fold_block(agg: Aggregator, block: Block, src: Rows, dst: Rows, edge: Rows, shared: Rows) -> Tensor:
    """One aggregation over one block, differentiable by the aggregator's own gradient."""
    return apply(_BlockFold, agg, block, (len(src), len(dst), len(edge)), *src, *dst, *edge, *shared)


def split_operands(counts: tuple[int, int, int], flat: Rows) -> Operands:
    """Flat autograd arguments -> Operands."""
    a, b, c = counts[0], counts[0] + counts[1], sum(counts)
    return Operands(flat[:a], flat[a:b], flat[b:c], flat[c:])


class _Kept(Context):
    agg: Aggregator
    block: Block
    counts: tuple[int, int, int]
    num_kept: int


class _BlockFold(torch.autograd.Function):
    @staticmethod
    def forward(ctx: _Kept, agg: Aggregator, block: Block, counts: tuple[int, int, int], *flat: Tensor) -> Tensor:
        x = split_operands(counts, flat)
        out, saved = agg.finish(agg.update(agg.init(block.num_dst, x), block, x))
        ctx.agg, ctx.block, ctx.counts = agg, block, counts
        kept = flat if agg.needs_src else ()
        ctx.num_kept = len(kept)
        ctx.save_for_backward(*kept, *saved)
        return out

    @staticmethod
    def backward(ctx: _Kept, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        (grad_out,) = grad_outputs
        tensors = ctx.saved_tensors
        kept, saved = tensors[: ctx.num_kept], tensors[ctx.num_kept :]
        grad_out = grad_out.contiguous()
        prepared = ctx.agg.prepare(saved, grad_out)
        grads = ctx.agg.grad(ctx.block, split_operands(ctx.counts, kept), prepared, grad_out)
        grads = grads._replace(dst=grads.dst or ctx.agg.grad_dst(prepared, grad_out))
        return (None, None, None, *wanted_gradients(grads, ctx.needs_input_grad[3:]))


def wanted_gradients(grads: Operands, asked: tuple[bool, ...]) -> list[Tensor | None]:
    """Operands of gradients -> one per flat autograd argument, None where nobody asked."""
    flat: list[Tensor | None] = [g for group in grads for g in group]
    flat += [None] * (len(asked) - len(flat))
    return [g if wanted else None for g, wanted in zip(flat, asked, strict=True)]
