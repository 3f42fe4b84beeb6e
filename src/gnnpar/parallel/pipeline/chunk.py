"""One chunk of a part in its turn: Y[c] = A[c, fresh] X[fresh] + A[c, stale] H[stale].

Source: Chen, Chen and Qian, GNNPipe (arXiv 2308.10087). Forward, a chunk's source rows are written to the table, and
the fold reads this epoch's rows of all chunks up to its slot, of the others the history. Backward, in the reverse
order, rows of the history are constants: a source gets 1 x the gradients of destinations in its own slot, `fresh` x
those of later slots, and `stale` x last epoch's gradients of earlier ones. The paper: fresh 2, stale 0.

Parts exchange slot by slot: halo rows of the chunks in the same slot travel before the fold, their gradients, by then
complete, after it. Each row travels once a direction, as in graph parallelism.

A sum is differentiated by pulling: the gradient rows of destinations lie in a table, times `fresh` once their slot is
over, and the sources of a slot read them over the out-edges (specification 2.3). Other folds push: the gradients of a
chunk's columns are added to a table, where they wait for their sources' turn; last epoch's gradients cannot be mixed in
there.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Self

import torch
from torch import Tensor

from gnnpar.comm import Posted, RowLike, Site
from gnnpar.comm.communicator import Phase
from gnnpar.folds.aggregator import Aggregator
from gnnpar.folds.block import Operands, Rows
from gnnpar.folds.sum import Sum
from gnnpar.graph import InEdges, Message
from gnnpar.parallel.blocks import add_returned, split_operands, wanted_gradients
from gnnpar.parallel.local import LocalRows, OwnRows, Pass, Source, as_messages, by_type, masked
from gnnpar.parallel.pipeline.chunks import Chunks, EpochOrder, Span, Turn
from gnnpar.parallel.pipeline.history import Call, History
from gnnpar.parallel.pipeline.slots import Slots
from gnnpar.parallel.torch_types import Context, apply
from gnnpar.partition.shard import edges_by_id


@dataclass(frozen=True)
class Weights:
    """Of gradients by the destination's turn: `fresh` of later slots, `stale` of last epoch's in earlier slots."""

    fresh: float = 2.0
    stale: float = 0.0


@dataclass(frozen=True, eq=False)
class Part:
    """What all chunks of a part on a rank share. `in_degree`, `in_weight` [N], `type_degree` [N, T] in table order."""

    chunks: Chunks
    in_degree: Tensor
    slots: Slots
    history: History
    weights: Weights
    in_weight: Tensor | None = None
    type_degree: Tensor | None = None


@dataclass(eq=False)
class ChunkGraph(OwnRows):
    """The Graph of the chunk in a slot, in one layer of one epoch.

    `keeps_masks`: those of all chunks live through the epoch. `published`: the rows that folds read are in the tables
    already, of this part and of the others, so this is a second forward, for the gradient.
    """

    part: Part
    epoch_order: EpochOrder
    run: Pass
    slot: int
    layer: int = 0
    keeps_masks: bool = True
    published: bool = False
    _calls: int = field(default=0, init=False)

    def __post_init__(self) -> None:
        self.chunk = self.epoch_order.order[self.slot]
        self.span = self.part.chunks.own(self.chunk)
        part, rows = self.part, self.span.rows
        in_weight = None if part.in_weight is None else part.in_weight[rows]
        self._rows = part.chunks.ids[rows], part.in_degree[rows], in_weight
        self.local = LocalRows(*self._rows, run=self.run, layer=self.layer)

    @property
    def edge_attr(self) -> None:
        """Chunks carry none."""

    @property
    def edge_type(self) -> None:
        """Only those of blocks."""

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
        """In the order of the chunk's block."""
        chunks = self.part.chunks
        if chunks.held.ids is None:
            raise ValueError("edge operands need edge ids on the shard: give the model needs_edge_ids = True.")
        return chunks.held.ids[chunks.edges(self.chunk)]

    def type_degree(self, types: int) -> Tensor:
        degree = self.part.type_degree
        return by_type(None if degree is None else degree[self.span.rows], self.in_degree, types)

    def at(self, layer: int) -> Self:
        """As dataclasses.replace, in fewer calls: a chunk names its layer 2 L times an epoch."""
        other = object.__new__(type(self))
        other.__dict__.update(self.__dict__, layer=layer, _calls=0)
        other.local = LocalRows(*self._rows, run=self.run, layer=layer)
        return other

    def again(self) -> Self:
        """Return this chunk in a second forward."""
        return replace(self, published=True)

    def dropout(self, x: Tensor, p: float, *, tag: int = 0) -> Tensor:
        """As everywhere; on a CPU a mask is drawn for all chunks at once, a third of the time for small ones."""
        if p == 0 or not self.run.training or x.is_cuda:
            return self.local.dropout(x, p, tag=tag)
        width, masks, chunks = x.shape[1:].numel(), self.epoch_order.masks, self.part.chunks
        if not self.keeps_masks:
            return masked(x, self.local.mask(self.node_ids, width, p, tag=tag), p)
        key = self.layer, tag, width, p
        if key not in masks:
            masks[key] = self.local.mask(chunks.ids[: chunks.num_own], width, p, tag=tag)
        return masked(x, masks[key][self.span.rows], p)

    def source(self, message: Message, *rows: Tensor) -> Rows:
        return Source(as_messages(message(self, *rows), rows[0].dtype, len(self.node_ids)))

    def aggregate(self, agg: Aggregator, src: Rows, dst: Rows = (), edge: Rows = (), shared: Rows = ()) -> Tensor:
        call, self._calls = self._calls, self._calls + 1
        counts = len(src), len(dst), len(edge)
        fold = _PulledFold if isinstance(agg, Sum) else _PushedFold
        return apply(fold, self, agg, (self.layer, call), counts, *src, *dst, *edge, *shared)

    def publish(self, call: Call, src: Rows) -> tuple[Rows, Posted | None]:
        """Write the chunk's source rows and send those that other parts read: (tables, both halves; what will come)."""
        part = self.part
        history = part.history
        tables = history.sources(call, src)
        if self.published:
            return tables, None
        first = history.fresh + self.span.first
        for table, rows in zip(tables, src, strict=True):
            table[first : first + len(self.span)] = rows
        if part.slots.comm.size == 1:
            return tables, None
        own = tuple(table[history.fresh : history.fresh + history.own] for table in tables)
        return tables, part.slots.send(own, self.chunk, self.site(call, "forward"))

    def complete(self, tables: Rows, posted: Posted | None) -> Rows:
        """Write what the other parts sent of their chunks in this slot; the tables."""
        if posted is not None:
            fresh = self.part.history.fresh
            for span, rows in self.part.slots.received(posted, self.chunk):
                for table, each in zip(tables, rows, strict=True):
                    table[fresh + span.first : fresh + span.last] = each
        return tables

    def spans_of_peers(self) -> dict[int, Span]:
        """Part -> the rows here of its chunk in this slot."""
        return {p: self.part.chunks.spans[p, self.chunk] for p in self.part.chunks.peers}

    def send_back(self, call: Call, theirs: Mapping[int, Rows], like: Sequence[RowLike]) -> Posted | None:
        """Gradients of halo rows to their parts; what will come for this chunk's rows."""
        slots = self.part.slots
        return None if slots.comm.size == 1 else slots.send_back(theirs, self.chunk, like, self.site(call, "backward"))

    def add_returned(self, mine: Rows, posted: Posted | None) -> Rows:
        """Add this part's gradients of the chunk's rows; return those of the others."""
        if posted is not None:
            for index, grads in self.part.slots.returned(posted, self.chunk):
                add_returned(mine, index, grads)
        return mine

    def site(self, call: Call, phase: Phase) -> Site:
        counted = phase if self.run.counted else "evaluate"
        return Site(self.run.epoch, call[0], call[1], counted, chunk=self.slot)


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
        view.complete(tables, posted)
        if halo is not None:
            state = agg.update(state, halo, x._replace(src=tables))
        ctx.view, ctx.agg, ctx.call, ctx.like = view, agg, call, RowLike.of(x.src)[0]
        return agg.finish(state)[0]

    @staticmethod
    def backward(ctx: _Pulled, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        (grad_out,) = grad_outputs
        view, agg, call = ctx.view, ctx.agg, ctx.call
        if not any(ctx.needs_input_grad[4:]):
            return (None,) * len(ctx.needs_input_grad)
        of_result, part = RowLike.of((grad_out,))[0], view.part
        rows = part.history.gradients(call, of_result)[view.span.rows]
        rows.copy_(grad_out)

        def pull(span: Span) -> Rows:
            total = _pull(view, agg, call, span, of_result)
            return (of_result.empty(len(span)).zero_() if total is None else total,)

        theirs = {p: pull(span) for p, span in view.spans_of_peers().items()}
        posted = view.send_back(call, theirs, (ctx.like,))
        mine = pull(view.span)  # while those of halo rows travel
        if part.weights.fresh != 1 and (view.slot or part.history.remembers):
            rows.mul_(part.weights.fresh)  # for the chunks of earlier slots, whose turn comes now
        grads = view.add_returned(mine, posted)
        return (None, None, None, None, *wanted_gradients(Operands(grads), ctx.needs_input_grad[4:]))


def _pull(view: ChunkGraph, agg: Sum, call: Call, span: Span, like: RowLike) -> Tensor | None:
    """Return the gradient of table rows of this turn, from this part's destinations; None if nothing reads them.
    `like`: a row of the result. `like`: a row of the result."""
    part = view.part
    total = _read(view, agg, "now", span, part.history.gradients(call, like))
    before = part.history.last_gradients(call, like) if part.weights.stale else None
    more = None if before is None else _read(view, agg, "before", span, before)
    if more is not None:  # rows of the last epoch are kept times `fresh`, too
        more.mul_(part.weights.stale / part.weights.fresh)
        total = more if total is None else total.add_(more)
    return total


def _read(view: ChunkGraph, agg: Sum, turn: Turn, span: Span, table: Tensor) -> Tensor | None:
    """Return sums of the table over the out-edges of a span; None without any."""
    csr = view.epoch_order.readers(turn, span)
    return None if csr is None else agg.grad_src(csr, table, len(span))


class _Pushed(Context):
    view: ChunkGraph
    agg: Aggregator
    call: Call
    counts: tuple[int, int, int]
    like: tuple[RowLike, ...]  # of the sources
    num_kept: int


class _PushedFold(torch.autograd.Function):
    """Any other fold, over columns gathered from both halves; they are gathered again for the gradient."""

    @staticmethod
    def forward(
        ctx: _Pushed, view: ChunkGraph, agg: Aggregator, call: Call, counts: tuple[int, int, int], *flat: Tensor
    ) -> Tensor:
        x = split_operands(counts, flat)
        tables = view.complete(*view.publish(call, x.src))
        block, rows, _, _ = view.epoch_order.compact(view.chunk)
        x = _on_block(view, x, tables, rows)
        out, saved = agg.finish(agg.update(agg.init(block.num_dst, x), block, x))
        ctx.view, ctx.agg, ctx.call, ctx.counts, ctx.like = view, agg, call, counts, RowLike.of(flat[: counts[0]])
        ctx.num_kept = len(flat) - counts[0]
        ctx.save_for_backward(*flat[counts[0] :], *saved)
        return out

    @staticmethod
    def backward(ctx: _Pushed, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        (grad_out,) = grad_outputs
        view, agg, tensors = ctx.view, ctx.agg, ctx.saved_tensors
        kept, saved = tensors[: ctx.num_kept], tensors[ctx.num_kept :]
        asked, grad_out = ctx.needs_input_grad[4:], grad_out.contiguous()
        block, rows, columns, ahead = view.epoch_order.compact(view.chunk)
        own = split_operands((0, *ctx.counts[1:]), kept)
        x = _on_block(view, own, view.part.history.sources(ctx.call, ctx.like), rows)
        prepared = agg.prepare(saved, grad_out)
        grads = agg.grad(block, x, prepared, grad_out)
        grads = grads._replace(dst=grads.dst or agg.grad_dst(prepared, grad_out), src=tuple(grads.src))
        if grads.edge:
            grads = grads._replace(edge=_in_model_order(view, grads.edge))
        num_src = ctx.counts[0]
        src = _push(ctx, grads.src, columns, ahead, asked) if any(asked[:num_src]) else [None] * num_src
        return (None, None, None, None, *src, *wanted_gradients(grads._replace(src=()), asked[num_src:]))


def _push(ctx: _Pushed, grads: Rows, columns: Tensor, ahead: Tensor, asked: tuple[bool, ...]) -> list[Tensor | None]:
    """Add the gradients of a chunk's columns to the table; take out those of the sources whose turn is now."""
    view = ctx.view
    wanted = [i for i in range(ctx.counts[0]) if asked[i]]
    like = [ctx.like[i] for i in wanted]
    tables = view.part.history.pushed(ctx.call, [each.widened for each in like])
    weight = torch.where(ahead > 0, view.part.weights.fresh, torch.where(ahead < 0, 0.0, 1.0))
    for table, i in zip(tables, wanted, strict=True):
        shape = (-1, *[1] * (table.dim() - 1))
        table.index_add_(0, columns, grads[i] * weight.to(table.dtype).view(shape))
    theirs = {p: _taken(tables, span) for p, span in view.spans_of_peers().items()}
    posted = view.send_back(ctx.call, theirs, like)
    mine = view.add_returned(_taken(tables, view.span), posted)
    out: list[Tensor | None] = [None] * ctx.counts[0]
    for i, g in zip(wanted, mine, strict=True):
        out[i] = g
    return out


def _taken(tables: Rows, span: Span) -> Rows:
    """Rows of the tables, which are zeros for the next epoch afterwards."""
    taken = tuple(table[span.rows].clone() for table in tables)
    for table in tables:
        table[span.rows] = 0
    return taken


def _on_block(view: ChunkGraph, x: Operands, tables: Rows, rows: Tensor) -> Operands:
    """Operands of the chunk's compact block: columns gathered, edge rows in the block's order."""
    x = x._replace(src=tuple(table[rows] for table in tables))
    if not x.edge:
        return x
    order = torch.searchsorted(view.edge_ids, view.block_edge_ids)
    return x._replace(edge=tuple(t[order] for t in x.edge))


def _in_model_order(view: ChunkGraph, edge: Rows) -> Rows:
    order = torch.searchsorted(view.edge_ids, view.block_edge_ids)
    return tuple(torch.empty_like(t).index_copy_(0, order, t) for t in edge)
