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

A codec sees the rows that a part reads of another as one list, chunk by chunk in table order; a slot sends the piece
that begins at `tag.first`. So its numbers depend neither on the order of chunks nor on the number of stages.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Self

import torch
from torch import Tensor

from gnnpar.comm import CodedExchange, Incoming, MessageTag, Outgoing, Posted, RowLike
from gnnpar.comm.communicator import Phase
from gnnpar.folds.aggregator import Aggregator
from gnnpar.folds.block import Block, Operands, Rows, chosen
from gnnpar.folds.sum import Sum
from gnnpar.graph import InEdges, Message
from gnnpar.parallel.blocks import Gradient, Walk, add_returned, walk
from gnnpar.parallel.local import OwnRows, Pass, Source, as_messages, by_type, masked
from gnnpar.parallel.pipeline.chunks import Chunks, EpochOrder, RowRange, Turn
from gnnpar.parallel.pipeline.history import Call, History
from gnnpar.partition.shard import edges_by_id


@dataclass(frozen=True)
class Weights:
    """Weights of gradients: `fresh` of destinations in later slots, `stale` of last epoch's in earlier slots."""

    fresh: float = 2.0
    stale: float = 0.0


@dataclass(frozen=True, eq=False)
class PartState:
    """State that all chunks of a part share on a rank. `exchange`: of the parts of a stage."""

    chunks: Chunks
    exchange: CodedExchange
    history: History
    weights: Weights


@dataclass(eq=False)
class ChunkGraph(Walk, OwnRows):
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
    keeps_own = False
    edge_attr = edge_type = None  # chunks carry no attributes, and types in their blocks alone
    _calls: int = field(default=0, init=False)

    def __post_init__(self) -> None:
        self.chunk = self.epoch_order.order[self.slot]
        self.span = self.part.chunks.own(self.chunk)
        chunks, rows = self.part.chunks, self.span.rows
        self.node_ids, self.in_degree = chunks.ids[rows], chunks.in_degree[rows]
        self.in_weight = chosen(chunks.in_weight, rows)

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
        return by_type(chosen(self.part.chunks.type_degree, self.span.rows), self.in_degree, types)

    def at(self, layer: int) -> Self:
        """Return this chunk in a layer, in fewer calls than dataclasses.replace: it runs 2 L times an epoch."""
        other = object.__new__(type(self))
        other.__dict__.update(self.__dict__, layer=layer, _calls=0)
        return other

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
        return walk(self, agg, call, src, dst, edge, shared)

    @property
    def num_rows(self) -> int:
        return len(self.span)

    def edge_positions(self, block: Block) -> Tensor:
        return torch.searchsorted(self.edge_ids, self.block_edge_ids)

    def keeps(self, agg: Aggregator) -> bool:
        return False

    def blocks(self, agg: Aggregator, x: Operands, call: int) -> Iterator[tuple[Block, Rows]]:
        """Yield the columns of this part, which a sum folds while rows of other parts travel, then theirs. Other folds
        have one block, of columns gathered from both halves; they are gathered again for the gradient."""
        tables, posted = self.publish((self.layer, call), x.src)
        blocks = self.epoch_order.blocks(self.chunk) if isinstance(agg, Sum) else ()
        for block in blocks[:1]:
            yield block, tables
        for p, rows in self.part.exchange.take_all(posted) if posted else ():
            self.part.history.write((self.layer, call), rows, self.part.chunks.span(p, self.chunk).rows)
        for block in blocks[1:]:
            yield block, tables
        if not blocks:
            block, rows, _, _ = self.epoch_order.compact(self.chunk)
            yield block, tuple(table[rows] for table in tables)

    def differentiate(self, gradient: Gradient) -> Operands:
        call = self.layer, gradient.call
        if isinstance(gradient.agg, Sum):
            return Operands(self._pulled(gradient.agg, call, gradient.like, gradient.grad_out))
        block, rows, columns, ahead = self.epoch_order.compact(self.chunk)
        tables = self.part.history.sources(call, gradient.like)
        grads = gradient.of_block(block, tuple(table[rows] for table in tables))
        like = gradient.chosen(gradient.like)
        gradient.set_own(self._pushed(call, grads, like, columns, ahead) if like else ())
        return gradient.total()

    def publish(self, call: Call, src: Rows) -> tuple[Rows, Posted | None]:
        """Write the chunk's source rows and send them to other parts. Return (tables, both halves; the receives,
        None of one part or in a second forward)."""
        history, chunks = self.part.history, self.part.chunks
        if self.published:
            return history.sources(call, RowLike.of(src)), None
        tables = history.write(call, src, self.span.rows)
        if self.part.exchange.comm.size == 1:
            return tables, None
        outgoing = {p: Outgoing(src, rows, first) for p, (rows, first) in chunks.outgoing[self.chunk].items()}
        return tables, self._post(outgoing, chunks.incoming[self.chunk], RowLike.of(src), call, "forward")

    def gradients(self, call: Call, like: Sequence[RowLike], of_rows: Callable[[RowRange], Rows]) -> Rows:
        """Return the gradients of the chunk's source rows, other parts' contributions included. `of_rows`: of some
        table rows, from this part's destinations."""
        chunks, chunk = self.part.chunks, self.chunk
        if self.part.exchange.comm.size == 1:
            return of_rows(self.span)
        outgoing = {
            p: Outgoing(of_rows(chunks.span(p, chunk)), None, piece.first)
            for p, piece in chunks.incoming[chunk].items()
        }
        incoming = {p: Incoming(len(rows), first) for p, (rows, first) in chunks.outgoing[chunk].items()}
        posted = self._post(outgoing, incoming, like, call, "backward")
        mine = of_rows(self.span)  # while gradients of halo rows are sent
        for p, grads in self.part.exchange.take_all(posted):
            add_returned(mine, chunks.outgoing[chunk][p][0], grads)
        return mine

    def _post(
        self,
        outgoing: Mapping[int, Outgoing],
        incoming: Mapping[int, Incoming],
        like: Sequence[RowLike],
        call: Call,
        phase: Phase,
    ) -> Posted:
        """Exchange rows with the other parts of the stage, all of which have a chunk in the slot."""
        tag = MessageTag(self.run.epoch, *call, phase if self.run.counted else "evaluate", chunk=self.slot)
        return self.part.exchange.post(outgoing, incoming, like, tag)

    def _pulled(self, agg: Sum, call: Call, like: Sequence[RowLike], grad_out: Tensor) -> Rows:
        """Return the gradient of a sum's sources, from the structure and the table of gradient rows alone."""
        part, like_out = self.part, RowLike.of((grad_out,))[0]
        table, last = part.history.gradients(call, like_out), part.history.last_gradients(call, like_out)
        rows = table[self.span.rows].copy_(grad_out)
        fresh, stale = part.weights.fresh, part.weights.stale

        def read(turn: Turn, span: RowRange, of: Tensor) -> Tensor | None:
            csr = self.epoch_order.readers(turn, span)
            return None if csr is None else agg.grad_src(csr, of, len(span))

        def pull(span: RowRange) -> Rows:
            total = read("now", span, table)
            more = read("before", span, last) if stale and last is not None else None
            if more is not None:  # rows of the last epoch are kept times `fresh`, too
                more.mul_(stale / fresh)
                total = more if total is None else total.add_(more)
            return (like[0].widened.empty(len(span)).zero_() if total is None else total,)

        grads = self.gradients(call, like, pull)
        if fresh != 1 and (self.slot or part.history.remembers):
            rows.mul_(fresh)  # for the chunks of earlier slots, whose turn comes now
        return grads

    def _pushed(self, call: Call, grads: Rows, like: Sequence[RowLike], columns: Tensor, ahead: Tensor) -> Rows:
        """Add the gradients of a chunk's columns to the tables; take out the gradients of the current slot's
        sources."""
        tables, weights = self.part.history.pushed(call, [each.widened for each in like]), self.part.weights
        weight = torch.where(ahead > 0, weights.fresh, torch.where(ahead < 0, 0.0, 1.0))
        for table, each in zip(tables, grads, strict=True):
            shape = (-1, *[1] * (table.dim() - 1))
            table.index_add_(0, columns, each * weight.to(table.dtype).view(shape))

        def take(span: RowRange) -> Rows:
            """Return rows of the tables, and leave zeros for the next epoch."""
            taken = tuple(table[span.rows].clone() for table in tables)
            for table in tables:
                table[span.rows] = 0
            return taken

        return self.gradients(call, like, take)
