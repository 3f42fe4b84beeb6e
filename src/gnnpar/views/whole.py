"""The whole graph on one device: Y = A X."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any, Self

import torch
from torch import Tensor

from gnnpar.graph import Message
from gnnpar.ops.aggregator import Aggregator, EdgeDropout
from gnnpar.ops.block import Block, Operands, Rows
from gnnpar.shard.shard import Shard
from gnnpar.views.local import LocalRows, Pass, Source


@dataclass(eq=False)
class WholeGraph:
    """A shard that needs nobody else's rows (the only part, or a test's whole graph).

    `cache`: results of linear folds of constant rows in layer 0, kept over epochs (first_layer=cached); None: nothing.
    """

    shard: Shard
    run: Pass
    layer: int = 0
    cache: dict | None = None
    _calls: int = field(default=0, init=False)

    def __post_init__(self) -> None:
        self.local = LocalRows(self.shard.node_ids, self.shard.in_degree, run=self.run, layer=self.layer)

    @property
    def node_ids(self) -> Tensor:
        return self.local.node_ids

    @property
    def edge_ids(self) -> Tensor:
        return edge_order(self.shard)

    @property
    def in_degree(self) -> Tensor:
        return self.local.in_degree

    def during(self, run: Pass) -> Self:
        """This view in another pass."""
        return replace(self, run=run, layer=0)

    def at(self, layer: int) -> Self:
        return replace(self, layer=layer)

    def dropout(self, x: Tensor, p: float, *, tag: int = 0) -> Tensor:
        return self.local.dropout(x, p, tag=tag)

    def edge_dropout(self, p: float, *, tag: int = 0) -> EdgeDropout | None:
        return self.local.edge_dropout(p, tag=tag)

    def source(self, message: Message, *rows: Tensor) -> Rows:
        return constant_aware(message, self, rows, self.shard.x)

    def aggregate(self, agg: Aggregator, src: Rows, dst: Rows = (), edge: Rows = (), shared: Rows = ()) -> Tensor:
        call, self._calls = self._calls, self._calls + 1
        if (found := cached_result(self.cache, self.layer, call, agg, src)) is not None:
            return found
        return remember(
            self.cache, self.layer, call, agg, src, fold_block(agg, self.shard.inner, src, dst, edge, shared)
        )


def edge_order(shard: Shard) -> Tensor:
    """Global ids of the in-edges of the shard's rows, ascending: the order of edge operands."""
    ids = [b.edge_ids for b in (shard.inner, *shard.halo.values()) if b.edge_ids is not None]
    if not ids:
        raise ValueError("edge operands need edge ids on the shard: give the model needs_edge_ids = True.")
    return torch.cat(ids).sort().values


def constant_aware(message: Message, view: Any, rows: Rows, features: Tensor) -> Source:
    """message(view, *rows), marked constant where it reads the features alone and nothing learned or random."""
    view.local.random = False
    out = message(view, *rows)
    fixed = len(rows) == 1 and rows[0] is features and not view.local.random
    return Source(out, constant=fixed and not any(t.requires_grad for t in out))


def cached_result(cache: dict | None, layer: int, call: int, agg: Aggregator, src: Rows) -> Tensor | None:
    """A X from an earlier epoch, where it cannot have changed."""
    return None if cache is None or not _cacheable(layer, agg, src) else cache.get(("fold", call))


def remember(cache: dict | None, layer: int, call: int, agg: Aggregator, src: Rows, out: Tensor) -> Tensor:
    if cache is not None and _cacheable(layer, agg, src):
        cache["fold", call] = out
    return out


def _cacheable(layer: int, agg: Aggregator, src: Rows) -> bool:
    return layer == 0 and agg.linear and isinstance(src, Source) and src.constant


def fold_block(agg: Aggregator, block: Block, src: Rows, dst: Rows, edge: Rows, shared: Rows) -> Tensor:
    """One aggregation over one block, differentiable by the aggregator's own gradient."""
    out = _BlockFold.apply(agg, block, (len(src), len(dst), len(edge)), *src, *dst, *edge, *shared)
    assert isinstance(out, Tensor)
    return out


def split_operands(counts: tuple[int, int, int], flat: tuple) -> Operands:
    """Flat autograd arguments -> Operands."""
    a, b, c = counts[0], counts[0] + counts[1], sum(counts)
    return Operands(flat[:a], flat[a:b], flat[b:c], flat[c:])


class _BlockFold(torch.autograd.Function):
    @staticmethod
    def forward(  # type: ignore[override]
        ctx, agg: Aggregator, block: Block, counts: tuple[int, int, int], *flat: Tensor
    ) -> Tensor:
        x = split_operands(counts, flat)
        out, saved = agg.finish(agg.update(agg.init(block.num_dst, x), block, x))
        ctx.agg, ctx.block, ctx.counts = agg, block, counts
        kept = flat if agg.needs_src else ()
        ctx.num_kept = len(kept)
        ctx.save_for_backward(*kept, *saved)
        return out

    @staticmethod
    def backward(ctx, grad_out: Tensor) -> tuple:  # type: ignore[override]
        tensors = ctx.saved_tensors
        kept, saved = tensors[: ctx.num_kept], tensors[ctx.num_kept :]
        grads = ctx.agg.grad(ctx.block, split_operands(ctx.counts, kept), saved, grad_out.contiguous())
        return (None, None, None, *wanted_gradients(grads, ctx.needs_input_grad[3:]))


def wanted_gradients(grads: Operands, asked: tuple[bool, ...]) -> list[Tensor | None]:
    """Operands of gradients -> one per flat autograd argument, None where nobody asked."""
    flat = [g for group in grads for g in group]
    flat += [None] * (len(asked) - len(flat))
    return [g if wanted else None for g, wanted in zip(flat, asked, strict=True)]
