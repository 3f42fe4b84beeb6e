"""A rank's part and the rows of all parts, block by block: Y[N_P, F] = sum_q A[N_P, N_q] X[N_q, F] over parts q.

Forward: each part in turn sends all its rows to every rank, and ranks fold and drop them. Backward: in the same order,
every rank sends the gradients of a part's rows to their owner.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import torch
from torch import Tensor

from gnnpar.codecs.codec import Identity
from gnnpar.comm import CodedExchange, Communicator, Incoming, MessageTag, Outgoing, Posted, RowLike, RowLists
from gnnpar.folds.aggregator import Aggregator
from gnnpar.folds.block import Block, Operands, Rows, chosen
from gnnpar.parallel.blocks import ExchangingView, Gradient
from gnnpar.parallel.context import BuildContext
from gnnpar.parallel.edges import EdgeOrder
from gnnpar.parallel.engine import FlatEngine, Stateful
from gnnpar.parallel.strategy import CodedStrategy
from gnnpar.partition.shard import Shard


def whole_parts(shard: Shard, comm: Communicator) -> Shard:
    """Return the shard with all rows of every other part as columns of its block. Collective, not counted.

    The shard has no boundary lists: every rank receives all rows.
    """
    ids_of = [ids.to(shard.node_ids.device) for ids in comm.all_gather(shard.node_ids.cpu())]
    blocks = {q: _widened(shard, q, ids) for q, ids in enumerate(ids_of) if q != shard.part}
    weight = chosen(shard.in_weight, shard.node_ids[:0])
    return replace(shard, halo=blocks, boundary={}, halo_in_degree=shard.in_degree[:0], halo_in_weight=weight)


def broadcast_engine(
    context: BuildContext,
    strategy: CodedStrategy,
    *,
    prefetch: int,
    training: Callable[..., BroadcastGraph] | None = None,
    parts: Mapping[str, Stateful | None] | None = None,
) -> FlatEngine:
    """Build the engine of a strategy that broadcasts parts. `training`: constructor of the training view; None: the
    evaluation view."""
    context = context.normalised_for(strategy.exactness)
    context = replace(context, shard=whole_parts(context.shard, context.comm))
    shard, comm, seed = context.shard, context.comm, context.seed
    coded, exactly = (each.build(row_lists(shard), comm, seed) for each in (strategy.codec, Identity()))
    exact = BroadcastGraph(
        shard,
        context.start,
        exchange=CodedExchange(comm, exactly),
        edges=EdgeOrder(shard, "edges"),
        grid=Grid(comm.size, 1),
        prefetch=prefetch,
        cache=context.new_cache(),
    )
    view = (training or BroadcastGraph)(
        shard,
        context.start,
        exchange=CodedExchange(comm, coded),
        edges=exact.edges,
        grid=exact.grid,
        prefetch=prefetch,
        once=None if "exact" in strategy.exactness else exact.exchange,
        cache=context.new_cache(),
    )
    kept = {"held": view.held, **(parts or {}), "cache": view.cache}
    return FlatEngine(context, view=view, exact=exact, codecs=(coded,), parts=kept)


def _widened(shard: Shard, part: int, ids: Tensor) -> Block:
    """Return the in-edges from a part as a block with a column for each of its nodes. Shapes: ids [N_q] ascending."""
    block = shard.halo.get(part)
    if block is None:
        none, inner = ids[:0], shard.inner
        return Block.from_edges(
            none,
            none,
            num_dst=shard.num_inner,
            num_src=len(ids),
            src_ids=ids,
            edges=inner.edges.at(none),
            compress=True,
        )
    assert block.src_ids is not None
    place = torch.searchsorted(ids, block.src_ids).to(block.indices.dtype)
    return replace(block, indices=place[block.indices.long()], num_src=len(ids), src_ids=ids)


def row_lists(shard: Shard) -> RowLists:
    """Return the row lists of a shard with whole parts: all rows to every rank."""
    every = torch.arange(shard.num_inner, device=shard.node_ids.device)
    read = {q: block.src_ids for q, block in shard.halo.items() if block.src_ids is not None}
    return RowLists(shard.part, shard.parts, shard.node_ids, dict.fromkeys(read, every), read)


class Grid(NamedTuple):
    """A grid of ranks, P / c groups of c. `copies`: c; c^2 divides the number of ranks. 1: all ranks are a column."""

    ranks: int
    copies: int

    def group(self, rank: int) -> range:
        """Return the ranks of a rank's group: the parts with rows that it sums."""
        first = rank // self.copies * self.copies
        return range(first, first + self.copies)

    def column(self, rank: int) -> int:
        return rank % self.copies

    @property
    def stages(self) -> int:
        """Return the parts that a rank reads, one for each stage."""
        return self.ranks // self.copies

    def source(self, column: int, stage: int) -> int:
        """Return the part that a column reads in a stage."""
        return column * self.stages + stage

    def readers(self, part: int) -> range:
        """Return the ranks that read the rows of a part: a column."""
        return range(part // self.stages, self.ranks, self.copies)

    def others(self, of: range, rank: int) -> list[int]:
        """Return the ranks of a group or of a column but one, the next one after it first."""
        return sorted(set(of) - {rank}, key=lambda p: (p - rank) % self.ranks)


@dataclass(eq=False)
class BroadcastGraph(ExchangingView):
    """A rank's part and the rows of all parts. `prefetch`: parts in flight while one is folded.

    With a `cache`, results of linear folds of layer 0 are kept, never features of other parts.
    """

    grid: Grid = field(kw_only=True)
    prefetch: int = field(default=1, kw_only=True)

    @property
    def rank(self) -> int:
        return self.exchange.comm.rank

    @property
    def first(self) -> int:
        """Return the first of the parts that this rank reads, one in each stage; the others follow it."""
        return self.grid.source(self.grid.column(self.rank), 0)

    @property
    def readers(self) -> list[int]:
        """Return the other ranks that read the rows of this one, the next one first."""
        return self.grid.others(self.grid.readers(self.rank), self.rank)

    def block(self, part: int) -> Block:
        return self.shard.inner if part == self.rank else self.shard.halo[part]

    def blocks(self, agg: Aggregator, x: Operands, call: int) -> Iterator[tuple[Block, Rows | None]]:
        for part, rows in self.stages(x.src, self.message_tag(call, "forward")):
            yield self.block(part), None if part == self.rank else rows
            del rows

    def differentiate(self, gradient: Gradient) -> Operands:
        travelling, tag = gradient.chosen(gradient.like), self.message_tag(gradient.call, "backward")
        returned: Posted | None = None
        for stage in range(self.grid.stages):
            sent, part = (), self.first + stage
            if part == self.rank:
                gradient.add_own(self.block(part))
            else:
                sent = gradient.of_block(self.block(part), gradient.next_rows())
            if travelling:
                posted = self.post_gradients(stage, sent, travelling, tag)
                returned = posted if self._sends(stage) else returned
        if returned is not None:
            if not gradient.local_sums:
                gradient.begin(self.shard.num_inner)
            for peer in sorted(returned.peers):
                for total, rows in zip(gradient.local_sums, self.exchange.take(returned, peer), strict=True):
                    total.add_(rows)
        return gradient.total()

    def stages(self, src: Rows, tag: MessageTag) -> Iterator[tuple[int, Rows]]:
        """Yield (part, its rows) for all parts in ascending order."""
        under_way: deque[Posted] = deque()
        for stage in range(self.grid.stages):
            while len(under_way) <= self.prefetch and stage + len(under_way) < self.grid.stages:
                under_way.append(self.post_part(stage + len(under_way), src, tag))
            posted, part = under_way.popleft(), self.first + stage
            yield part, src if part == self.rank else self.exchange.take(posted, part)

    def post_part(self, stage: int, src: Rows, tag: MessageTag) -> Posted:
        """Post all rows of the part that a stage reads to its readers; receive the rows that this rank reads."""
        outgoing, part = dict[int, Outgoing](), self.first + stage
        if self._sends(stage):
            every = torch.arange(len(src[0]), device=src[0].device)
            outgoing = {p: Outgoing(src, every) for p in self.readers}
        incoming = {} if part == self.rank else {part: Incoming(self.block(part).num_src)}
        self.exchange.comm.flush(keep=self.prefetch)
        return self.exchange.post(outgoing, incoming, RowLike.of(src), tag)

    def post_gradients(self, stage: int, grads: Rows, like: Sequence[RowLike], tag: MessageTag) -> Posted:
        """Send the gradients of a part's rows to its owner. The owner receives the gradients of all readers."""
        part = self.first + stage
        outgoing = {} if part == self.rank else {part: Outgoing(grads)}
        incoming = {p: Incoming(self.shard.num_inner) for p in self.readers} if self._sends(stage) else {}
        self.exchange.comm.flush(keep=self.prefetch)
        return self.exchange.post(outgoing, incoming, like, tag)

    def _sends(self, stage: int) -> bool:
        """Return True if the readers of this rank read its rows in this stage."""
        return stage == self.rank % self.grid.stages
