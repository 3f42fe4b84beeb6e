"""One part of the graph and its neighbours' rows: Y[N_P, F] = A[N_P, N] . halo(X[N_P, F]).

Forward: send boundary rows, fold inner in-edges, fold the halo rows as they arrive. Backward: differentiate the halo
blocks first, so that their gradients travel while the inner block is differentiated.

`halo_engine` builds the engine of methods that read halo rows: one view trains by their exchange, one is exact.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Self, TypeVar

import torch
from torch import Tensor

from gnnpar.codecs.adaptive.codec import with_edge_weights
from gnnpar.codecs.codec import Codec, FirstAndRest, Identity
from gnnpar.comm import CodedExchange, Incoming, MessageTag, Outgoing, Posted, RowLike
from gnnpar.comm.rows import RowLists
from gnnpar.folds.aggregator import Aggregator
from gnnpar.folds.block import Block, Operands, Rows
from gnnpar.folds.mergeable import merging_of
from gnnpar.graph import Message
from gnnpar.parallel.blocks import ExchangingView, Gradient, WholeGraph, add_returned, fold_all_edges, walk
from gnnpar.parallel.context import BuildContext
from gnnpar.parallel.cover import Cover, Exchanges, SourceFold, make_covers
from gnnpar.parallel.edges import EdgeOrder, Overlap
from gnnpar.parallel.engine import FlatEngine, Stateful
from gnnpar.parallel.local import LocalRows, Source, as_messages
from gnnpar.parallel.row_bytes import Halo, RowBytes
from gnnpar.parallel.stale import RowPolicy, StaleExchange
from gnnpar.parallel.strategy import CodedStrategy
from gnnpar.parallel.torch_types import Context, apply_to_rows


@dataclass(eq=False)
class HaloGraph(ExchangingView):
    """A rank's part, with one exchange of boundary rows per aggregation.

    With a `cache`, features of halo nodes that layer 0 reads are fetched once. `covers`: by `Merging.types`, the
    covers that split folds; `coded`: their exchanges, if not `exchange`. `split`: the fold at the sources of
    this aggregation.
    """

    covers: Mapping[int, Cover] = field(default_factory=dict[int, Cover], kw_only=True)
    coded: Mapping[int, Exchanges] = field(default_factory=dict[int, Exchanges], kw_only=True)
    split: SourceFold | None = field(default=None, kw_only=True)
    _features: tuple[Tensor, float, int] | None = field(default=None, init=False)  # the features after dropout

    def dropout(self, x: Tensor, p: float, *, tag: int = 0) -> Tensor:
        out = super().dropout(x, p, tag=tag)
        if x is self.shard.x:
            self._features = (out, p, tag)
        return out

    def source(self, message: Message, *rows: Tensor) -> Rows:
        source = super().source(message, *rows)
        assert isinstance(source, Source)
        features, p, tag = self._features or (self.shard.x, 0.0, 0)
        if self.cache is not None and self.layer == 0 and len(rows) == 1 and rows[0] is features:
            there = self.shard.halo_ids, self.shard.halo_in_degree, self.shard.halo_in_weight
            local = LocalRows(*there, run=self.run, layer=0)
            source.halo = lambda: as_messages(
                message(local, local.dropout(self._kept_halo(), p, tag=tag)), self.shard.x.dtype
            )
        return source

    def fold(self, agg: Aggregator, call: int, src: Rows, dst: Rows, edge: Rows, shared: Rows) -> Tensor:
        if isinstance(src, Source) and src.halo is not None and not (agg.linear and src.constant):
            halo = src.halo()
        elif agg.whole_neighborhood:
            halo = apply_to_rows(_HaloRows, self, call, *src)
        else:
            return walk(self._under_cover(agg, edge), agg, call, src, dst, edge, shared)
        block, order = self.edges.combined
        both = tuple(torch.cat([mine, theirs])[order] for mine, theirs in zip(src, halo, strict=True))
        return fold_all_edges(agg, block, both, dst, edge, shared)

    def _kept_halo(self) -> Tensor:
        """Return the features of the halo nodes, fetched once."""
        assert self.cache is not None
        if self.cache.halo is None:
            tag = self.message_tag(0, "forward")
            view = self.exactly()
            rows = dict(view.exchange.take_all(view.send((self.shard.x,), tag)))
            self.cache.halo = torch.cat([rows[p][0] for p in sorted(rows)] or [self.shard.x[:0]])
        return self.cache.halo

    def exactly(self) -> Self:
        return self if self.once is None else replace(self, exchange=self.once, coded={})

    def _under_cover(self, agg: Aggregator, edge: Rows) -> Self:
        """Return the view of an aggregation that a cover splits: the rows that travel, and the fold at the sources."""
        merging = merging_of(agg, edge) if self.covers else None
        found = None if merging is None else self.covers.get(merging.types)
        if merging is None or found is None or (found.linear and not agg.linear):
            return self
        rows, partial, exact = self.coded.get(merging.types, (self.exchange, self.exchange, self.exchange))
        split = SourceFold(found, merging.at_source or agg, merging, partial, exact)
        return replace(self, shard=found.edges.shard, edges=found.edges, exchange=rows, split=split)

    def send(self, src: Rows, tag: MessageTag) -> Posted:
        """Send boundary rows; halo rows will arrive."""
        boundary, num_halo = self.shard.boundary, self.shard.num_halo
        outgoing = {p: Outgoing(src, boundary[p]) for p in self.edges.readers}
        incoming = {p: Incoming(num_halo[p]) for p in num_halo}
        return self.exchange.post(outgoing, incoming, RowLike.of(src), tag)

    def send_back(self, grads: Mapping[int, Rows], like: Sequence[RowLike], tag: MessageTag) -> Posted:
        """Send gradients of halo rows to their owners, and post the receipt of this rank's boundary rows' gradients."""
        outgoing = {p: Outgoing(rows) for p, rows in grads.items()}
        incoming = {p: Incoming(len(index)) for p, index in self.shard.boundary.items()}
        return self.exchange.post(outgoing, incoming, like, tag)

    def blocks(self, agg: Aggregator, x: Operands, call: int) -> Iterator[tuple[Block, Rows | None]]:
        """Yield inner blocks, then halo blocks in a fixed order, so the bits do not depend on arrival.

        Partial rows are sent as soon as they can be folded: at once, or when the destinations' rows have arrived, while
        inner edges are folded.
        """
        tag, split, exchange = self.message_tag(call, "forward"), self.split, self.exchange
        early, late = self.edges.forward
        asked = split.ask(x.dst, tag) if split else None
        posted = self.send(x.src, tag)
        if split and not asked:
            split.send(x, None, tag)
        there = dict(exchange.take_all(posted)) if self.edges.overlap == "none" else {}
        for block in early:
            yield block, None
        if split and asked:
            split.send(x, asked, tag)
        if self.edges.overlap == "central_marginal":
            there = dict(exchange.take_all(posted))
        for block in late:
            yield block, None
        for p in self.edges.sources:
            yield self.shard.halo[p], there.pop(p, None) or exchange.take(posted, p)

    def merged(self, state: Rows) -> tuple[Rows, Rows]:
        return self.split.merge(state) if self.split else (state, ())

    def differentiate(self, gradient: Gradient) -> Operands:
        """Differentiate partial rows and halo blocks, then inner blocks while their gradients travel."""
        tag, split, g = self.message_tag(gradient.call, "backward"), self.split, gradient
        gone = split.send_back(g.merged, g.prepared, g.grad_out, tag) if split else None
        sent = {p: g.of_block(self.shard.halo[p], g.next_rows()) for p in self.edges.sources}
        travelling = g.chosen(g.like)
        posted = self.send_back(sent, travelling, tag) if travelling else None
        early, late = self.edges.backward
        for block in early:
            g.add_own(block)
        returned = None
        if split and gone:
            grads, returned = split.backward(g.merged, g.x, gone, tag)
            g.add_inner(grads, split.cover.block)
        back = {p: self.exchange.take(posted, p) for p in self.edges.readers if p in posted.incoming} if posted else {}
        for block in late:
            g.add_own(block)
        for p, rows in back.items():
            add_returned(g.local_sums, self.shard.boundary[p], rows)
        total = g.total()
        if split and returned:
            split.add_returned(total.dst, returned)
        return total


def exact_view(context: BuildContext) -> WholeGraph | HaloGraph:
    """Return the view of a method that trains on another one: all in-edges, and halo rows as they are."""
    if context.comm.size == 1:
        return WholeGraph(context.shard, context.start)
    edges = EdgeOrder(context.shard, "edges")
    return HaloGraph(context.shard, context.start, exchange=context.exact_exchange(), edges=edges)


class _Fetched(Context):
    view: HaloGraph
    call: int
    like: tuple[RowLike, ...]


class _HaloRows(torch.autograd.Function):
    """Rows of all halo nodes, parts in ascending order; gradients go to their owners. [N, ...] -> [H, ...]."""

    @staticmethod
    def forward(ctx: _Fetched, view: HaloGraph, call: int, *src: Tensor) -> Rows:
        found = dict(view.exchange.take_all(view.send(src, view.message_tag(call, "forward"))))
        ctx.view, ctx.call, ctx.like = view, call, RowLike.of(src)
        return tuple(torch.cat([found[p][i] for p in sorted(found)] or [t[:0]]) for i, t in enumerate(src))

    @staticmethod
    def backward(ctx: _Fetched, *grads: Tensor) -> tuple[Tensor | None, ...]:
        view, asked = ctx.view, ctx.needs_input_grad[2:]
        wanted = [i for i, each in enumerate(asked) if each]
        sent: dict[int, Rows] = {}
        last = 0
        for p in sorted(view.shard.halo):
            first, last = last, last + view.shard.halo[p].num_src
            sent[p] = tuple(grads[i][first:last].contiguous() for i in wanted)
        like = [ctx.like[i] for i in wanted]
        posted = view.send_back({p: sent[p] for p in view.edges.sources}, like, view.message_tag(ctx.call, "backward"))
        totals = tuple(each.empty(view.shard.num_inner).zero_() for each in like)
        for p in (p for p in view.edges.readers if p in posted.incoming):
            add_returned(totals, view.shard.boundary[p], view.exchange.take(posted, p))
        found = dict(zip(wanted, totals, strict=True))
        return (None, None, *(found.get(i) for i in range(len(asked))))


E = TypeVar("E", bound=FlatEngine)


def halo_engine(
    context: BuildContext,
    strategy: CodedStrategy,
    *,
    overlap: Overlap,
    features_exact: bool,
    halo: Halo = "rows",
    policy: RowPolicy | None = None,
    kept: str = "",
    crosses_epochs: bool = False,
    engine: type[E] = FlatEngine,
) -> E:
    """Build the engine of a strategy that reads halo rows.

    `policy`: how old the rows of the training view are; `kept`: its exchanges are parts of the engine, under this name.
    `features_exact`: features that are sent once travel as they are. `crosses_epochs`: as for FlatEngine. `engine`: its
    class.
    """
    exactness = strategy.exactness
    context = context.normalised_for(exactness)
    shard, model, comm, run = context.shard, context.model, context.comm, context.start
    config, codecs, parts = with_edge_weights(strategy.codec, model), list[Codec](), dict[str, Stateful]()

    def coded(lists: RowLists, name: str = "", *, values: bool = False) -> CodedExchange:
        """Return an exchange of the training view. `values`: the first operand goes by the codec, the others as they
        are."""
        codecs.append(config.build(lists, comm, context.seed))
        wire = FirstAndRest(codecs[-1], exactly) if values else codecs[-1]
        if policy is None:
            return CodedExchange(comm, wire)
        made = parts[kept + name] = StaleExchange(comm, wire, policy)
        return made

    exactly = Identity().build(shard.row_lists, comm, context.seed)
    exact_exchange, edges = CodedExchange(comm, exactly), EdgeOrder(shard, overlap)
    row_bytes = RowBytes(config, halo=halo, linear=policy is not None)
    covers, facts, rest = make_covers(shard, model, row_bytes, comm, overlap)
    split: dict[int, Exchanges] = {}
    for types, cover in covers.items():
        name = f" {types}" if types else ""
        rows = coded(cover.edges.shard.row_lists, f" under cover{name}")
        split[types] = rows, coded(cover.lists, f" partial{name}", values=True), exact_exchange
    whole = coded(shard.row_lists) if rest else next(iter(split.values()))[0]
    cache = context.new_cache()
    # state of an inexact exchange must not leak into evaluation
    exact_cache = cache if "exact" in exactness else context.new_cache()
    once = exact_exchange if features_exact else None
    view = HaloGraph(shard, run, exchange=whole, edges=edges, cache=cache, once=once, covers=covers, coded=split)
    exact = HaloGraph(shard, run, exchange=exact_exchange, edges=edges, cache=exact_cache, covers=covers)
    return engine(
        context,
        view=view,
        exact=exact,
        codecs=codecs,
        structure=tuple(covers.values()),
        parts=parts | {"held": view.held, "cache": cache},
        crosses_epochs=crosses_epochs,
        facts=facts,
    )
