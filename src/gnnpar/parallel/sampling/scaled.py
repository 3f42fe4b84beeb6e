"""Sums that make up for edges left out, by a number a row or by a number an edge.

By row: out_i = loops of i + scale_i . sum of what was drawn of i, each edge once. By edge: out_i = sum_j weight_ij x_j.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from gnnpar.folds.aggregator import Aggregator
from gnnpar.folds.block import Block, Operands, Rows
from gnnpar.folds.generic import Generic
from gnnpar.folds.sum import Sum
from gnnpar.parallel.torch_types import Context, apply
from gnnpar.parallel.whole import fold_block, split_operands, wanted_gradients


class Parts(NamedTuple):
    """In-edges of n destinations in two blocks, and the places of their edges among all: [e] of `drawn`, [e'] of
    `loops`. `loops` reads the first n sources alone, which are the destinations."""

    drawn: Block
    loops: Block
    of_drawn: Tensor
    of_loops: Tensor


def fold_scaled(agg: Aggregator, parts: Parts, scale: Tensor, src: Rows, dst: Rows, edge: Rows, shared: Rows) -> Tensor:
    """`agg` is `summed`. Shapes: scale [n], src [N, ...], dst [n, ...], edge [e + e', ...] -> [n, ...]."""
    return apply(_ScaledFold, agg, parts, scale, (len(src), len(dst), len(edge)), *src, *dst, *edge, *shared)


def fold_weighted(
    agg: Aggregator, block: Block, weights: Tensor, src: Rows, dst: Rows, edge: Rows, shared: Rows
) -> Tensor:
    """`agg` is `summed`. Shapes: weights [E], src [N, ...], dst [n, ...], edge [E, ...] -> [n, ...].

    ValueError where the fold is neither Sum nor Generic.
    """
    if isinstance(agg, Sum):  # the engine carries no weights of the graph
        counted = replace(block, edges=replace(block.edges, weight=weights))
        return fold_block(replace(agg, weighted=True), counted, src, dst, edge, shared)
    if not isinstance(agg, Generic):
        raise ValueError(
            f"the fold {type(agg).__name__} cannot count an edge more than once, as strategy.sampler=saint asks: "
            "set strategy.normalize=subgraph, or use Sum or Generic"
        )
    value = agg.value

    def weighted(s: Rows, d: Rows, e: Rows, t: Rows) -> Tensor:
        found = value(s, d, e[:-1], t)
        return found * _column(e[-1], found)

    return fold_block(replace(agg, value=weighted), block, src, dst, (*edge, weights), shared)


class _Kept(Context):
    agg: Aggregator
    parts: Parts
    counts: tuple[int, int, int]
    num_kept: int


class _ScaledFold(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: _Kept, agg: Aggregator, parts: Parts, scale: Tensor, counts: tuple[int, int, int], *flat: Tensor
    ) -> Tensor:
        drawn, loops = _operands(parts, split_operands(counts, flat))
        (total,) = agg.update(agg.init(parts.drawn.num_dst, drawn), parts.drawn, drawn)
        out, saved = agg.finish(agg.update((total.mul_(_column(scale, total)),), parts.loops, loops))
        ctx.agg, ctx.parts, ctx.counts = agg, parts, counts
        kept = flat if agg.needs_src else ()
        ctx.num_kept = len(kept)
        ctx.save_for_backward(scale, *kept, *saved)
        return out

    @staticmethod
    def backward(ctx: _Kept, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        (grad_out,) = grad_outputs
        scale, tensors = ctx.saved_tensors[0], ctx.saved_tensors[1:]
        agg, parts, num_kept = ctx.agg, ctx.parts, ctx.num_kept
        x, saved = split_operands(ctx.counts, tensors[:num_kept]), tensors[num_kept:]
        drawn, loops = _operands(parts, x)
        grad_out = grad_out.contiguous()
        scaled = grad_out * _column(scale, grad_out)
        of_drawn = agg.grad(parts.drawn, drawn, agg.prepare(saved, scaled), scaled)
        of_loops = agg.grad(parts.loops, loops, agg.prepare(saved, grad_out), grad_out)
        for whole, part in zip(of_drawn.src, of_loops.src, strict=True):
            whole[: len(part)].add_(part)
        grads = Operands(
            of_drawn.src,
            tuple(a + b for a, b in zip(of_drawn.dst, of_loops.dst, strict=True)),
            tuple(_joined(parts, a, b) for a, b in zip(of_drawn.edge, of_loops.edge, strict=True)),
            tuple(a + b for a, b in zip(of_drawn.shared, of_loops.shared, strict=True)),
        )
        return (None, None, None, None, *wanted_gradients(grads, ctx.needs_input_grad[4:]))


def _operands(parts: Parts, x: Operands) -> tuple[Operands, Operands]:
    """Of both blocks."""
    own = tuple(rows[: parts.loops.num_src] for rows in x.src)
    edges = (tuple(rows[places] for rows in x.edge) for places in (parts.of_drawn, parts.of_loops))
    return x._replace(edge=next(edges)), x._replace(src=own, edge=next(edges))


def _joined(parts: Parts, drawn: Tensor, loops: Tensor) -> Tensor:
    """Shapes: [e, ...], [e', ...] -> [e + e', ...], in the order of all edges."""
    out = drawn.new_empty(len(drawn) + len(loops), *drawn.shape[1:])
    out[parts.of_drawn], out[parts.of_loops] = drawn, loops
    return out


def _column(scale: Tensor, rows: Tensor) -> Tensor:
    return scale.view(-1, *[1] * (rows.dim() - 1))
