"""The walk over blocks: Y = finish(fold over (block, rows)), and its gradient block by block.

A walk gives the order of the blocks, the source of their rows, and the destination of remote gradients. One autograd
function does the rest. `feature` on several ranks and whole neighbourhoods have their own autograd functions.

`WholeGraph` is the view of a whole graph on one device, Y = A X; `fold_block` folds over one block for every view.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar, Protocol, Self

import torch
from torch import Tensor

from gnnpar.comm import CodedExchange, Communicator, RowLike
from gnnpar.comm.communicator import T
from gnnpar.folds.aggregator import Aggregator
from gnnpar.folds.block import Block, Operands, Rows, widened
from gnnpar.parallel.edges import EdgeOrder
from gnnpar.parallel.engine import Stateful
from gnnpar.parallel.torch_types import Context, apply
from gnnpar.parallel.view import View


class Walk(Protocol):
    """The blocks of one aggregation, in order. Defaults: edge operands are in the order of the only block; no rows are
    sent.

    `keeps_own`: False if the gradient finds the local source rows in tables too.
    """

    keeps_own: ClassVar[bool] = True

    @property
    def num_rows(self) -> int:
        """Return the number of result rows."""
        ...

    def edge_positions(self, block: Block) -> Tensor | None:
        """Return the positions of a block's edges among the edge operands; None: they are in the block's order."""
        return None

    def blocks(self, agg: Aggregator, x: Operands, call: int) -> Iterator[tuple[Block, Rows | None]]:
        """Yield (block, source rows) for every block; rows None: the local rows `x.src`."""
        ...

    def keeps(self, agg: Aggregator) -> bool:
        """Return True if the gradient reads remote rows that forward has read."""
        return agg.needs_src

    def merged(self, state: Rows) -> tuple[Rows, Rows]:
        """Return (the state merged with remote partial results, their rows that the gradient reads)."""
        return state, ()

    def hold(self, call: int, rows: Sequence[Tensor]) -> None:
        """Record the remote rows held from forward to backward."""

    def differentiate(self, gradient: Gradient) -> Operands:
        """Walk over the blocks again, send remote gradients to their owners, and return the total."""
        ...


class Gradient:
    """Gradient of one aggregation, accumulated block by block.

    Gradients of local rows add up over blocks; gradients of remote rows are sent to their owners. Shares of
    destinations and of shared tensors from remote and local blocks are summed separately and added at the end, so the
    bits do not depend on whether the local block comes first or last.
    """

    def __init__(
        self, ctx: _Kept, x: Operands, remote: Rows, merged: Rows, saved: Rows, grad_out: Tensor, asked: Sequence[bool]
    ) -> None:
        """Prepare the sums. `remote`: remote rows that forward kept. `asked`: for each flat operand, whether its
        gradient is needed."""
        self.agg, self.call, self.like, self._walk = ctx.agg, ctx.call, ctx.like, ctx.walk
        self.x, self.merged, self.grad_out = x, merged, grad_out
        self.prepared = ctx.agg.prepare(saved, grad_out)
        each, self._wanted = len(ctx.like), asked[: len(ctx.like)]
        self._remote = iter([remote[i : i + each] for i in range(0, len(remote), each)])
        self._edge: Rows = ()
        self._inner, self._halo = Operands(()), Operands(())

    def next_rows(self) -> Rows:
        """Return the next remote block's rows in the order of forward; () if none were kept."""
        return next(self._remote, ())

    def chosen(self, of: Sequence[T]) -> tuple[T, ...]:
        """Return the source operands that need a gradient."""
        return tuple(each for each, wanted in zip(of, self._wanted, strict=True) if wanted)

    def add_own(self, block: Block) -> None:
        """Differentiate a block that reads local rows."""
        self.add_inner(self._of(block, self.x.src), block)

    def add_inner(self, grads: Operands, block: Block) -> None:
        self._inner = _sum(self._inner, self._placed(grads, block))

    def of_block(self, block: Block, rows: Rows) -> Rows:
        """Differentiate a block that reads remote rows. Return the gradients that are needed."""
        grads = self._placed(self._of(block, rows), block)
        self._halo = _sum(self._halo, grads._replace(src=()))
        return self.chosen(grads.src)

    @property
    def local_sums(self) -> Rows:
        """Return the gradients so far of the local rows that need one; returned gradients are added in place."""
        return self.chosen(self._inner.src) if self._inner.src else ()

    def begin(self, num_rows: int) -> None:
        """Start the local rows' gradient with zeros if no block reads local rows."""
        zeros = tuple(each.widened.empty(num_rows).zero_() for each in self.like)
        self._inner = self._inner._replace(src=zeros)

    def set_own(self, grads: Rows) -> None:
        """Set the gradients of the local rows that need one."""
        given = iter(grads)
        src = tuple(next(given) if wanted else self.grad_out for wanted in self._wanted)  # others are not read
        self._inner = self._inner._replace(src=src)

    def total(self) -> Operands:
        """Return the sum of all shares, with the destinations' gradient if it is computed from saved values."""
        total = _sum(self._inner, self._halo)
        total = total._replace(edge=self._inner.edge or self._edge)
        return total if total.dst else total._replace(dst=self.agg.grad_dst(self.prepared, self.grad_out))

    def _of(self, block: Block, rows: Rows) -> Operands:
        x = self.x._replace(src=rows, edge=_edge_rows(self._walk, block, self.x.edge))
        return self.agg.grad(block, x, self.prepared, self.grad_out)

    def _placed(self, grads: Operands, block: Block) -> Operands:
        """Write the edges' gradients to their positions; each edge is in one block."""
        positions = self._walk.edge_positions(block) if grads.edge else None
        if positions is None:
            return grads
        self._edge = self._edge or tuple(torch.zeros_like(widened(t)) for t in self.x.edge)
        for into, g in zip(self._edge, grads.edge, strict=True):
            into[positions] = g
        return grads._replace(edge=())


def _edge_rows(over: Walk, block: Block, edge: Rows) -> Rows:
    """Return the rows of edge operands that belong to a block, in its order."""
    positions = over.edge_positions(block) if edge else None
    return edge if positions is None else tuple(rows[positions] for rows in edge)


def _sum(old: Operands, new: Operands) -> Operands:
    """Add in place to the old value if both exist."""
    src, dst, edge, shared = (
        tuple(a.add_(b) for a, b in zip(x, y, strict=True)) if x and y else x or y
        for x, y in zip(old, new, strict=True)
    )
    return Operands(src, dst, edge, shared)


def add_returned(into: Rows, index: Tensor, grads: Rows) -> None:
    """Add returned gradients in place to the unique rows `index`, in the dtype of the sum."""
    for total, rows in zip(into, grads, strict=True):
        total.index_add_(0, index, rows.to(total.dtype))


def walk(over: Walk, agg: Aggregator, call: int, src: Rows, dst: Rows, edge: Rows, shared: Rows) -> Tensor:
    """Fold one aggregation, differentiable by the aggregator's own gradient."""
    return apply(_Fold, over, agg, call, (len(src), len(dst), len(edge)), *src, *dst, *edge, *shared)


def split_operands(counts: tuple[int, int, int], flat: Rows) -> Operands:
    """Return flat autograd arguments as Operands."""
    a, b, c = counts[0], counts[0] + counts[1], sum(counts)
    return Operands(flat[:a], flat[a:b], flat[b:c], flat[c:])


def wanted_gradients(grads: Operands, asked: Sequence[bool]) -> list[Tensor | None]:
    """Return one gradient for each flat autograd argument, None if it is not needed."""
    flat: list[Tensor | None] = [g for group in grads for g in group]
    flat += [None] * (len(asked) - len(flat))
    return [g if wanted else None for g, wanted in zip(flat, asked, strict=True)]


class _Kept(Context):
    walk: Walk
    agg: Aggregator
    call: int
    counts: tuple[int, int, int]
    ends: tuple[int, int, int]  # of own operands, of remote rows, of rows from `merged`
    like: tuple[RowLike, ...]


class _Fold(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: _Kept, over: Walk, agg: Aggregator, call: int, counts: tuple[int, int, int], *flat: Tensor
    ) -> Tensor:
        x, keeps = split_operands(counts, flat), over.keeps(agg)
        state, remote = agg.init(over.num_rows, x), list[Tensor]()
        for block, rows in over.blocks(agg, x, call):
            state = agg.update(
                state, block, x._replace(src=x.src if rows is None else rows, edge=_edge_rows(over, block, x.edge))
            )
            if keeps and rows is not None:
                remote += rows
            del rows  # freed before the next rows arrive
        state, merged = over.merged(state)
        out, saved = agg.finish(state)
        first = 0 if over.keeps_own else len(x.src)
        own = flat[first:] if agg.needs_src else ()
        ctx.walk, ctx.agg, ctx.call, ctx.like = over, agg, call, RowLike.of(x.src)
        ctx.counts = counts[0] - first, *counts[1:]
        ctx.ends = len(own), len(own) + len(remote), len(own) + len(remote) + len(merged)
        over.hold(call, [*remote, *merged])
        ctx.save_for_backward(*own, *remote, *merged, *saved)
        return out

    @staticmethod
    def backward(ctx: _Kept, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        tensors, (a, b, c), asked = ctx.saved_tensors, ctx.ends, ctx.needs_input_grad[4:]
        if torch.is_grad_enabled() and any(t.requires_grad for t in (*tensors, *grad_outputs)):
            raise ValueError("the model differentiates a gradient again (create_graph=True), which a fold cannot")
        x, grad_out = split_operands(ctx.counts, tensors[:a]), grad_outputs[0].contiguous()
        gradient = Gradient(ctx, x, tensors[a:b], tensors[b:c], tensors[c:], grad_out, asked)
        return (*(None,) * 4, *wanted_gradients(ctx.walk.differentiate(gradient), asked))


@dataclass(eq=False)
class HeldRows(Stateful):
    """Bytes of halo rows held from forward to backward in the last pass, by (layer, call). A part of an engine."""

    nbytes_of: dict[tuple[int, int], int] = field(default_factory=dict[tuple[int, int], int])

    @property
    def nbytes(self) -> int:
        return sum(self.nbytes_of.values())

    def record(self, layer: int, call: int, rows: Sequence[Tensor]) -> None:
        self.nbytes_of[layer, call] = sum(t.nbytes for t in rows)


@dataclass(eq=False)
class ExchangingView(Walk, View):
    """A rank's part of the graph, with a walk that reads remote rows. Subclasses add `blocks` and `differentiate`.

    `exchange`: sends rows and gradients. `once`: sends rows that are kept over epochs (first_layer=cached) without
    noise, which would stay for the whole run; None: `exchange`.
    """

    exchange: CodedExchange = field(kw_only=True)
    edges: EdgeOrder = field(kw_only=True)
    once: CodedExchange | None = field(default=None, kw_only=True)
    held: HeldRows = field(default_factory=HeldRows, kw_only=True)

    @property
    def comm(self) -> Communicator:
        return self.exchange.comm

    @property
    def num_rows(self) -> int:
        return self.shard.num_inner

    @property
    def edge_ids(self) -> Tensor:
        return self.edges.edge_ids

    def edge_positions(self, block: Block) -> Tensor:
        return self.edges.edge_positions(block)

    def exactly(self) -> Self:
        return self if self.once is None else replace(self, exchange=self.once)

    def fold(self, agg: Aggregator, call: int, src: Rows, dst: Rows, edge: Rows, shared: Rows) -> Tensor:
        return walk(self, agg, call, src, dst, edge, shared)

    def hold(self, call: int, rows: Sequence[Tensor]) -> None:
        self.held.record(self.layer, call, rows)


@dataclass(frozen=True, eq=False)
class OneBlock(Walk):
    """The walk over a single block with all its rows on this rank. Edge operands are in its order."""

    block: Block

    @property
    def num_rows(self) -> int:
        return self.block.num_dst

    def blocks(self, agg: Aggregator, x: Operands, call: int) -> Iterator[tuple[Block, None]]:
        yield self.block, None

    def differentiate(self, gradient: Gradient) -> Operands:
        gradient.add_own(self.block)
        return gradient.total()


@dataclass(eq=False)
class WholeGraph(View):
    """A shard that needs no remote rows (a single part, or a test's whole graph)."""

    def fold(self, agg: Aggregator, call: int, src: Rows, dst: Rows, edge: Rows, shared: Rows) -> Tensor:
        return fold_all_edges(agg, self.shard.inner, src, dst, edge, shared)


def fold_all_edges(agg: Aggregator, block: Block, src: Rows, dst: Rows, edge: Rows, shared: Rows) -> Tensor:
    """Call `fold_block` on a block with all in-edges of its rows. Rows of `edge` ascend by edge id."""
    if edge and (places := block.edge_places) is not None:
        edge = tuple(rows[places] for rows in edge)
    return fold_block(agg, block, src, dst, edge, shared)


def fold_block(agg: Aggregator, block: Block, src: Rows, dst: Rows, edge: Rows, shared: Rows) -> Tensor:
    """Fold one aggregation over one block, differentiable by the aggregator's own gradient."""
    return walk(OneBlock(block), agg, 0, src, dst, edge, shared)
