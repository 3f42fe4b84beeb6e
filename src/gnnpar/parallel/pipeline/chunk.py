"""One chunk of a part in its turn: Y[c] = A[c, fresh] X[fresh] + A[c, stale] H[stale].

Source: Chen, Chen and Qian, GNNPipe (arXiv 2308.10087). Forward writes a chunk's source rows to the table and folds
this epoch's rows of all chunks up to its slot, and the history of the others. Backward runs in reverse order, and rows
of the history are constants: a source gets 1 x the gradients of destinations in its own slot, `fresh` x those of later
slots, and `stale` x last epoch's gradients of earlier ones. The paper: fresh 2, stale 0.

Parts exchange slot by slot: halo rows of the chunks in the same slot travel before the fold, their gradients, by then
complete, after it. Each row travels once a direction, as in graph parallelism.

A sum pulls its gradient: the gradient rows of destinations lie in a table, times `fresh` once their slot is over, and
the sources of a slot read them over the out-edges (specification 2.3). Other folds push theirs: the gradients of a
chunk's columns are added to a table until their sources' turn; last epoch's gradients cannot be mixed in there.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Self

import torch
from torch import Tensor

from gnnpar.comm import MessageTag, Posted, RowLike
from gnnpar.comm.communicator import Phase
from gnnpar.folds.aggregator import Aggregator
from gnnpar.folds.block import Operands, Rows, chosen
from gnnpar.folds.sum import Sum
from gnnpar.graph import InEdges, Message
from gnnpar.parallel.blocks import add_returned, split_operands, wanted_gradients
from gnnpar.parallel.local import OwnRows, Pass, Source, as_messages, by_type, masked
from gnnpar.parallel.pipeline.chunks import Chunks, EpochOrder, RowRange, Turn
from gnnpar.parallel.pipeline.history import Call, History
from gnnpar.parallel.pipeline.messages import ChunkHalo
from gnnpar.parallel.torch_types import Context, apply
from gnnpar.partition.shard import Shard, edges_by_id


@dataclass(frozen=True)
class Weights:
    """Weights of gradients: `fresh` of destinations in later slots, `stale` of last epoch's in earlier slots."""

    fresh: float = 2.0
    stale: float = 0.0


@dataclass(frozen=True, eq=False)
class PartState:
    """State that all chunks of a part share on a rank. `in_degree`, `in_weight` [N], `type_degree` [N, T] in table
    order."""

    chunks: Chunks
    in_degree: Tensor
    halo: ChunkHalo
    history: History
    weights: Weights
    in_weight: Tensor | None = None
    type_degree: Tensor | None = None

    @staticmethod
    def of(shard: Shard, chunks: Chunks, halo: ChunkHalo, history: History, weights: Weights) -> PartState:
        """Return the part of a shard."""
        degrees = (chosen(each, chunks.order) for each in (shard.in_weight, shard.type_degree))
        return PartState(chunks, shard.in_degree[chunks.order], halo, history, weights, *degrees)


@dataclass(eq=False)
class ChunkGraph(OwnRows):
    """The Graph of the chunk in a slot, in one layer of one epoch.

    `keeps_masks`: dropout masks of all chunks live through the epoch. `published`: this is a second forward, for the
    gradient; the tables have the rows of this part and of the others already.
    """

    part: PartState
    epoch_order: EpochOrder
    run: Pass
    slot: int
    layer: int = 0
    keeps_masks: bool = True
    published: bool = False
    edge_attr = edge_type = None  # chunks carry no attributes, and types in their blocks alone
    _calls: int = field(default=0, init=False)

    def __post_init__(self) -> None:
        self.chunk = self.epoch_order.order[self.slot]
        self.span = self.part.chunks.own(self.chunk)
        part, rows = self.part, self.span.rows
        self.node_ids, self.in_degree = part.chunks.ids[rows], part.in_degree[rows]
        self.in_weight = chosen(part.in_weight, rows)

    @property
    def edge_ids(self) -> Tensor:
        return self.block_edge_ids.sort().values

    @property
    def in_edges(self) -> InEdges:
        block, rows = self.part.chunks.compact(self.chunk)
        source = rows[block.indices.long()] - self.span.first
        return edges_by_id(block.edges, torch.where(source < len(self.span), source.clamp_min(-1), -1), block.edge_dst)

    @property
    def block_edge_ids(self) -> Tensor:
        """Global edge ids in the order of the chunk's block."""
        chunks = self.part.chunks
        if chunks.held.ids is None:
            raise ValueError("edge operands need edge ids on the shard: give the model needs_edge_ids = True.")
        return chunks.held.ids[chunks.edges(self.chunk)]

    def type_degree(self, types: int) -> Tensor:
        return by_type(chosen(self.part.type_degree, self.span.rows), self.in_degree, types)

    def at(self, layer: int) -> Self:
        """Return this chunk in a layer, in fewer calls than dataclasses.replace: it runs 2 L times an epoch."""
        other = object.__new__(type(self))
        other.__dict__.update(self.__dict__, layer=layer, _calls=0)
        return other

    def second_forward(self) -> Self:
        """Return this chunk in a second forward."""
        return replace(self, published=True)

    def dropout(self, x: Tensor, p: float, *, tag: int = 0) -> Tensor:
        """Return x after dropout. On a CPU a mask is drawn for all chunks at once, in a third of the time if they are
        small."""
        if p == 0 or not self.run.training or x.is_cuda:
            return super().dropout(x, p, tag=tag)
        width, masks, chunks = x.shape[1:].numel(), self.epoch_order.masks, self.part.chunks
        if not self.keeps_masks:
            return masked(x, self.mask(self.node_ids, width, p, tag=tag), p)
        key = self.layer, tag, width, p
        if key not in masks:
            masks[key] = self.mask(chunks.ids[: chunks.num_own], width, p, tag=tag)
        return masked(x, masks[key][self.span.rows], p)

    def source(self, message: Message, *rows: Tensor) -> Rows:
        return Source(as_messages(message(self, *rows), rows[0].dtype, len(self.node_ids)))

    def aggregate(self, agg: Aggregator, src: Rows, dst: Rows = (), edge: Rows = (), shared: Rows = ()) -> Tensor:
        call, self._calls = self._calls, self._calls + 1
        counts = len(src), len(dst), len(edge)
        fold = _PulledFold if isinstance(agg, Sum) else _PushedFold
        return apply(fold, self, agg, (self.layer, call), counts, *src, *dst, *edge, *shared)

    def publish(self, call: Call, src: Rows) -> tuple[Rows, Posted | None]:
        """Write the chunk's source rows and send them to other parts. Return (tables, both halves; the receives)."""
        history = self.part.history
        if self.published:
            return history.sources(call, RowLike.of(src)), None
        history.write(call, src, self.span.rows)
        tables = history.sources(call, RowLike.of(src))
        own = tuple(table[history.fresh : history.fresh + history.own] for table in tables)
        return tables, self.part.halo.send(own, self.chunk, self._message_tag(call, "forward"))

    def complete(self, call: Call, posted: Posted | None) -> None:
        """Write the rows of the other parts' chunks in this slot."""
        for span, rows in self.part.halo.received(posted, self.chunk):
            self.part.history.write(call, rows, span.rows)

    def gradients(self, call: Call, like: Sequence[RowLike], of_rows: Callable[[RowRange], Rows]) -> Rows:
        """Return the gradients of the chunk's source rows, other parts' contributions included. `of_rows`: of some
        table rows, from this part's destinations."""
        halo, spans = self.part.halo, self.part.chunks.spans
        halo_grads = {p: of_rows(spans[p, self.chunk]) for p in self.part.chunks.peers}
        posted = halo.send_back(halo_grads, self.chunk, like, self._message_tag(call, "backward"))
        mine = of_rows(self.span)  # while gradients of halo rows are sent
        for index, grads in halo.returned(posted, self.chunk):
            add_returned(mine, index, grads)
        return mine

    def _message_tag(self, call: Call, phase: Phase) -> MessageTag:
        counted = phase if self.run.counted else "evaluate"
        return MessageTag(self.run.epoch, call[0], call[1], counted, chunk=self.slot)


class _Pulled(Context):
    view: ChunkGraph
    agg: Sum
    call: Call
    like: RowLike  # of the sources


class _PulledFold(torch.autograd.Function):
    """The sum. Nothing is saved: the gradient needs the structure and the table of gradient rows alone."""

    @staticmethod
    def forward(
        ctx: _Pulled, view: ChunkGraph, agg: Sum, call: Call, counts: tuple[int, int, int], *flat: Tensor
    ) -> Tensor:
        x = split_operands(counts, flat)
        tables, posted = view.publish(call, x.src)
        own, halo = view.epoch_order.split(view.chunk)  # own columns are summed while rows of other parts travel
        state = agg.update(agg.init(own.num_dst, x), own, x._replace(src=tables))
        view.complete(call, posted)
        if halo is not None:
            state = agg.update(state, halo, x._replace(src=tables))
        ctx.view, ctx.agg, ctx.call, ctx.like = view, agg, call, RowLike.of(x.src)[0]
        return agg.finish(state)[0]

    @staticmethod
    def backward(ctx: _Pulled, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        view, agg, call, (grad_out,) = ctx.view, ctx.agg, ctx.call, grad_outputs
        if not any(ctx.needs_input_grad[4:]):
            return (None,) * len(ctx.needs_input_grad)
        like, part = RowLike.of((grad_out,))[0], view.part
        table, last = part.history.gradients(call, like), part.history.last_gradients(call, like)
        rows = table[view.span.rows].copy_(grad_out)
        fresh, stale = part.weights.fresh, part.weights.stale

        def read(turn: Turn, span: RowRange, of: Tensor) -> Tensor | None:
            csr = view.epoch_order.readers(turn, span)
            return None if csr is None else agg.grad_src(csr, of, len(span))

        def pull(span: RowRange) -> Rows:
            total = read("now", span, table)
            more = read("before", span, last) if stale and last is not None else None
            if more is not None:  # rows of the last epoch are kept times `fresh`, too
                more.mul_(stale / fresh)
                total = more if total is None else total.add_(more)
            return (like.empty(len(span)).zero_() if total is None else total,)

        grads = view.gradients(call, (ctx.like,), pull)
        if fresh != 1 and (view.slot or part.history.remembers):
            rows.mul_(fresh)  # for the chunks of earlier slots, whose turn comes now
        return (None, None, None, None, *wanted_gradients(Operands(grads), ctx.needs_input_grad[4:]))


class _Pushed(Context):
    view: ChunkGraph
    agg: Aggregator
    call: Call
    counts: tuple[int, int, int]
    like: tuple[RowLike, ...]  # of the sources


class _PushedFold(torch.autograd.Function):
    """Any other fold, over columns gathered from both halves; they are gathered again for the gradient."""

    @staticmethod
    def forward(
        ctx: _Pushed, view: ChunkGraph, agg: Aggregator, call: Call, counts: tuple[int, int, int], *flat: Tensor
    ) -> Tensor:
        x = split_operands(counts, flat)
        tables, posted = view.publish(call, x.src)
        view.complete(call, posted)
        block, rows, _, _ = view.epoch_order.compact(view.chunk)
        x = _on_block(view, x, tables, rows)
        out, saved = agg.finish(agg.update(agg.init(block.num_dst, x), block, x))
        ctx.view, ctx.agg, ctx.call, ctx.counts, ctx.like = view, agg, call, counts, RowLike.of(flat[: counts[0]])
        ctx.save_for_backward(*flat[counts[0] :], *saved)
        return out

    @staticmethod
    def backward(ctx: _Pushed, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        view, agg, (num_src, num_dst, num_edge) = ctx.view, ctx.agg, ctx.counts
        asked, grad_out = ctx.needs_input_grad[4:], grad_outputs[0].contiguous()
        kept, saved = ctx.saved_tensors[: len(asked) - num_src], ctx.saved_tensors[len(asked) - num_src :]
        block, rows, columns, ahead = view.epoch_order.compact(view.chunk)
        own = split_operands((0, num_dst, num_edge), kept)
        x = _on_block(view, own, view.part.history.sources(ctx.call, ctx.like), rows)
        prepared = agg.prepare(saved, grad_out)
        grads = agg.grad(block, x, prepared, grad_out)
        grads = grads._replace(dst=grads.dst or agg.grad_dst(prepared, grad_out))
        if grads.edge:
            order = _order_in_block(view)
            grads = grads._replace(edge=tuple(torch.empty_like(t).index_copy_(0, order, t) for t in grads.edge))
        src: list[Tensor | None] = [None] * num_src
        if wanted := [i for i in range(num_src) if asked[i]]:
            pushed = _push(ctx, [grads.src[i] for i in wanted], [ctx.like[i] for i in wanted], columns, ahead)
            for i, each in zip(wanted, pushed, strict=True):
                src[i] = each
        return (None, None, None, None, *src, *wanted_gradients(grads._replace(src=()), asked[num_src:]))


def _push(ctx: _Pushed, grads: Sequence[Tensor], like: Sequence[RowLike], columns: Tensor, ahead: Tensor) -> Rows:
    """Add the gradients of a chunk's columns to the tables; take out the gradients of the current slot's sources."""
    view = ctx.view
    tables = view.part.history.pushed(ctx.call, [each.widened for each in like])
    weight = torch.where(ahead > 0, view.part.weights.fresh, torch.where(ahead < 0, 0.0, 1.0))
    for table, each in zip(tables, grads, strict=True):
        shape = (-1, *[1] * (table.dim() - 1))
        table.index_add_(0, columns, each * weight.to(table.dtype).view(shape))

    def take(span: RowRange) -> Rows:
        """Return rows of the tables, and leave zeros for the next epoch."""
        taken = tuple(table[span.rows].clone() for table in tables)
        for table in tables:
            table[span.rows] = 0
        return taken

    return view.gradients(ctx.call, like, take)


def _on_block(view: ChunkGraph, x: Operands, tables: Rows, rows: Tensor) -> Operands:
    """Return operands of the chunk's compact block: columns gathered, edge rows in the block's order."""
    x = x._replace(src=tuple(table[rows] for table in tables))
    if not x.edge:
        return x
    order = _order_in_block(view)
    return x._replace(edge=tuple(t[order] for t in x.edge))


def _order_in_block(view: ChunkGraph) -> Tensor:
    """Return the place of each edge of the block among the model's edge rows."""
    return torch.searchsorted(view.edge_ids, view.block_edge_ids)
