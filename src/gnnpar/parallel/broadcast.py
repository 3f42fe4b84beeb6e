"""A rank's part and the rows of all parts, block by block: Y[N_P, F] = sum_q A[N_P, N_q] X[N_q, F] over parts q.

Forward: part after part sends all of its rows to every rank, which folds them and lets go of them. Backward: in the
same order every rank sends the gradients of a part's rows to their owner.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Self

import torch
from torch import Tensor

from gnnpar.codecs.codec import CodecConfig, Exactness, Identity
from gnnpar.comm import CodedExchange, Communicator, Incoming, Outgoing, Posted, RowLike, RowLists, Site
from gnnpar.comm.communicator import Phase, T
from gnnpar.folds.aggregator import Aggregator
from gnnpar.folds.block import Block, Operands, Rows, chosen
from gnnpar.parallel.context import BuildContext
from gnnpar.parallel.engine import FlatEngine, Stateful
from gnnpar.parallel.halo_graph import EdgeOrder, HeldRows
from gnnpar.parallel.normalised import normalised_for
from gnnpar.parallel.shares import Shares
from gnnpar.parallel.torch_types import Context, apply
from gnnpar.parallel.view import View
from gnnpar.parallel.whole import split_operands, wanted_gradients
from gnnpar.partition.shard import Shard


def whole_parts(shard: Shard, comm: Communicator) -> Shard:
    """The shard, whose block of every other part has all of that part's rows as columns. Collective, not counted.

    It has no boundary lists: all rows go to everybody.
    """
    everyone = comm.broadcast(comm.gather(shard.node_ids.cpu()))
    assert everyone is not None
    ids_of = [ids.to(shard.node_ids.device) for ids in everyone]
    blocks = {q: _widened(shard, q, ids) for q, ids in enumerate(ids_of) if q != shard.part}
    weight = chosen(shard.in_weight, shard.node_ids[:0])
    return replace(shard, halo=blocks, boundary={}, halo_in_degree=shard.in_degree[:0], halo_in_weight=weight)


def broadcast_engine(
    context: BuildContext,
    *,
    codec: CodecConfig,
    exactness: frozenset[Exactness],
    prefetch: int,
    training: Callable[..., BroadcastGraph] | None = None,
    parts: Mapping[str, Stateful | None] | None = None,
) -> FlatEngine:
    """Build the engine of a strategy that broadcasts parts. `training`: makes its view; None: as that of evaluation."""
    context = normalised_for(context, exactness)
    context = replace(context, shard=whole_parts(context.shard, context.comm))
    shard, comm, seed = context.shard, context.comm, context.seed
    coded, exactly = (each.build(row_lists(shard), comm, seed) for each in (codec, Identity()))
    exact = BroadcastGraph(
        shard,
        context.start,
        exchange=CodedExchange(comm, exactly),
        edges=EdgeOrder(shard, "edges"),
        prefetch=prefetch,
        cache=context.new_cache(),
    )
    view = (training or BroadcastGraph)(
        shard,
        context.start,
        exchange=CodedExchange(comm, coded),
        edges=exact.edges,
        prefetch=prefetch,
        once=None if "exact" in exactness else exact.exchange,
        cache=context.new_cache(),
    )
    kept = {"held": view.held, **(parts or {}), "cache": view.cache}
    return FlatEngine(context, view=view, exact=exact, codecs=(coded,), parts=kept)


def _widened(shard: Shard, part: int, ids: Tensor) -> Block:
    """In-edges from a part, whose columns are all of its nodes. Shapes: ids [N_q] ascending."""
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
    """Of a shard with whole parts: all rows to everybody."""
    every = torch.arange(shard.num_inner, device=shard.node_ids.device)
    read = {q: block.src_ids for q, block in shard.halo.items() if block.src_ids is not None}
    return RowLists(shard.part, shard.parts, shard.node_ids, dict.fromkeys(read, every), read)


@dataclass(eq=False)
class BroadcastGraph(View):
    """`prefetch`: parts whose rows are under way while one is folded. `once`: the exchange of what is sent once and
    kept over epochs (first_layer=cached); None: `exchange`. Of layer 0 only results of linear folds are kept.
    """

    exchange: CodedExchange = field(kw_only=True)
    edges: EdgeOrder = field(kw_only=True)
    prefetch: int = field(default=1, kw_only=True)
    once: CodedExchange | None = field(default=None, kw_only=True)
    held: HeldRows = field(default_factory=HeldRows, kw_only=True)

    @property
    def comm(self) -> Communicator:
        return self.exchange.comm

    @property
    def edge_ids(self) -> Tensor:
        return self.edges.edge_ids

    @property
    def rank(self) -> int:
        return self.exchange.comm.rank

    @property
    def num_parts(self) -> int:
        return self.exchange.comm.size

    def block(self, part: int) -> Block:
        return self.shard.inner if part == self.rank else self.shard.halo[part]

    def site(self, call: int, phase: Phase) -> Site:
        return Site(self.run.epoch, self.layer, call, phase if self.run.counted else "evaluate")

    def exactly(self) -> Self:
        """This view with the exchange of what is sent once."""
        return self if self.once is None else replace(self, exchange=self.once)

    def aggregate(self, agg: Aggregator, src: Rows, dst: Rows = (), edge: Rows = (), shared: Rows = ()) -> Tensor:
        call = self.next_call()
        if (kept := self.kept_result(call, agg, src)) is not None:
            return kept
        view = self.exactly() if self.cache is not None and self._constant(agg, src) else self
        counts = len(src), len(dst), len(edge)
        out = apply(_BroadcastFold, view, agg, call, counts, *src, *dst, *edge, *shared)
        return self.keep_result(call, agg, src, out)

    def stages(self, src: Rows, site: Site) -> Iterator[tuple[int, Rows]]:
        """(part, its rows) of all parts in ascending order."""
        under_way: deque[Posted] = deque()
        for part in range(self.num_parts):
            while len(under_way) <= self.prefetch and part + len(under_way) < self.num_parts:
                under_way.append(self.post_part(part + len(under_way), src, site))
            posted = under_way.popleft()
            yield part, src if part == self.rank else self.exchange.take(posted, part)

    def post_part(self, part: int, src: Rows, site: Site) -> Posted:
        """All rows of a part to every other rank."""
        outgoing: dict[int, Outgoing] = {}
        if part == self.rank:
            every = torch.arange(len(src[0]), device=src[0].device)
            outgoing = {p: Outgoing(src, every) for p in self._readers}
        incoming = {} if part == self.rank else {part: Incoming(self.block(part).num_src)}
        self.exchange.comm.flush(keep=self.prefetch)
        return self.exchange.post(outgoing, incoming, RowLike.of(src), site)

    def post_gradients(self, part: int, grads: Rows, like: Sequence[RowLike], site: Site) -> Posted:
        """The gradients of a part's rows to their owner, who gets those of all others."""
        mine = part == self.rank
        incoming = {p: Incoming(self.shard.num_inner) for p in self._readers} if mine else {}
        self.exchange.comm.flush(keep=self.prefetch)
        return self.exchange.post({} if mine else {part: Outgoing(grads)}, incoming, like, site)

    @property
    def _readers(self) -> list[int]:
        """All other ranks, the next one first."""
        return [(self.rank + step) % self.num_parts for step in range(1, self.num_parts)]


class _Kept(Context):
    view: BroadcastGraph
    agg: Aggregator
    call: int
    counts: tuple[int, int, int]
    num_kept: int
    like: tuple[RowLike, ...]


class _BroadcastFold(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: _Kept, view: BroadcastGraph, agg: Aggregator, call: int, counts: tuple[int, int, int], *flat: Tensor
    ) -> Tensor:
        x = split_operands(counts, flat)
        state, received = agg.init(view.shard.num_inner, x), list[Tensor]()
        for part, rows in view.stages(x.src, view.site(call, "forward")):
            block = view.block(part)
            state = agg.update(state, block, x._replace(src=rows, edge=view.edges.edge_rows(block, x.edge)))
            if agg.needs_src and part != view.rank:
                received += rows
            del rows
        out, saved = agg.finish(state)
        kept = [*flat, *received] if agg.needs_src else []
        ctx.view, ctx.agg, ctx.call, ctx.counts, ctx.num_kept = view, agg, call, counts, len(kept)
        ctx.like = RowLike.of(x.src)
        view.held.record(view.layer, call, received)
        ctx.save_for_backward(*kept, *saved)
        return out

    @staticmethod
    def backward(ctx: _Kept, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        (grad_out,) = grad_outputs
        view, agg, tensors = ctx.view, ctx.agg, ctx.saved_tensors
        kept, saved = tensors[: ctx.num_kept], tensors[ctx.num_kept :]
        asked = ctx.needs_input_grad[4:]
        num_flat = len(asked) if kept else 0
        x, received = split_operands(ctx.counts, kept[:num_flat]), iter(kept[num_flat:])
        grad_out, wanted = grad_out.contiguous(), asked[: ctx.counts[0]]
        prepared, shares = agg.prepare(saved, grad_out), Shares(view.edges.slots, x.edge)
        travelling, site = _wanted(ctx.like, wanted), view.site(ctx.call, "backward")
        returned: Posted | None = None
        for part in range(view.num_parts):
            block = view.block(part)
            mine = part == view.rank or not kept
            rows = x.src if mine else tuple(next(received) for _ in ctx.like)
            operands = Operands(rows, x.dst, view.edges.edge_rows(block, x.edge), x.shared)
            grads = agg.grad(block, operands, prepared, grad_out)
            sent = ()
            if part == view.rank:
                shares.add_inner(grads, block)
            else:
                sent = _wanted(shares.add_halo(grads, block), wanted)
            if travelling:
                posted = view.post_gradients(part, sent, travelling, site)
                returned = posted if part == view.rank else returned
        if returned is not None:
            into = _wanted(shares.src, wanted)
            for peer in sorted(returned.peers):
                for total, rows in zip(into, view.exchange.take(returned, peer), strict=True):
                    total.add_(rows)
        return (None, None, None, None, *wanted_gradients(shares.finished(agg, prepared, grad_out), asked))


def _wanted(of: Sequence[T], wanted: Sequence[bool]) -> tuple[T, ...]:
    return tuple(each for each, asked in zip(of, wanted, strict=True) if asked)
