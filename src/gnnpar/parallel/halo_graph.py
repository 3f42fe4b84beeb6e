"""One part of the graph and its neighbours' rows: Y[N_P, F] = A[N_P, N] . halo(X[N_P, F]).

Forward: send boundary rows, fold inner in-edges, fold the halo rows as they come. Backward: differentiate the halo
blocks first, so that their gradients travel while the inner block is differentiated.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Literal, NamedTuple, Self

import torch
from torch import Tensor

from gnnpar.comm import CodedExchange, Communicator, Incoming, Outgoing, Posted, RowLike, Site
from gnnpar.comm.communicator import Phase
from gnnpar.folds.aggregator import Aggregator
from gnnpar.folds.block import Block, Operands, Rows
from gnnpar.folds.edge_data import EdgeData
from gnnpar.folds.mergeable import merges
from gnnpar.graph import Message
from gnnpar.parallel.cover.cover import Cover
from gnnpar.parallel.cover.source_fold import SourceFold
from gnnpar.parallel.engine import Unsaved
from gnnpar.parallel.local import LocalRows, Source, as_messages
from gnnpar.parallel.shares import Shares, add_returned
from gnnpar.parallel.torch_types import Context, apply, apply_to_rows
from gnnpar.parallel.view import View, edge_order
from gnnpar.parallel.whole import fold_all_edges, split_operands, wanted_gradients
from gnnpar.partition.shard import Shard

Overlap = Literal["none", "edges", "central_marginal"]


class EdgeOrder:
    """Which inner edges are worked on while messages travel (`early`) and which after, in both directions.

    none: nothing early (the papers' vanilla). edges: every inner edge early. central_marginal: early only the edges of
    destinations without a halo in-neighbour, backward of sources that no other part reads (AdaQP, section 1.2).
    """

    def __init__(self, shard: Shard, overlap: Overlap) -> None:
        self.shard = shard
        self.overlap: Overlap = overlap

    @cached_property
    def forward(self) -> tuple[list[Block], list[Block]]:
        """(early, late) blocks of inner edges."""
        marginal = torch.zeros(self.shard.num_inner, dtype=torch.bool, device=self.shard.node_ids.device)
        for block in self.shard.halo.values():
            marginal[slice(None) if block.rows is None else block.rows] = True
        return self._split(lambda inner: marginal[inner.edge_dst])

    @cached_property
    def backward(self) -> tuple[list[Block], list[Block]]:
        boundary = torch.zeros(self.shard.num_inner, dtype=torch.bool, device=self.shard.node_ids.device)
        for index in self.shard.boundary.values():
            boundary[index] = True
        return self._split(lambda inner: boundary[inner.indices])

    def _split(self, waits: Callable[[Block], Tensor]) -> tuple[list[Block], list[Block]]:
        inner = self.shard.inner
        if self.overlap == "none":
            return [], [inner]
        if self.overlap == "edges":
            return [inner], []
        late = waits(inner)
        return [inner.restrict(~late)], [inner.restrict(late)]

    @cached_property
    def edge_ids(self) -> Tensor:
        return edge_order(self.shard)

    def edge_rows(self, block: Block, edge: Rows) -> Rows:
        """The rows of edge operands that belong to a block."""
        if not edge:
            return ()
        slots = self.slots(block)
        return tuple(t[slots] for t in edge)

    def slots(self, block: Block) -> Tensor:
        """Positions of a block's edges in the order of edge operands."""
        assert block.edge_ids is not None
        return torch.searchsorted(self.edge_ids, block.edge_ids)

    @cached_property
    def combined(self) -> tuple[Block, Tensor]:
        """(one block over all in-edges with inner and halo columns by ascending global id, the order that sorts
        [inner rows, halo rows] into these columns); only first_layer=cached builds it."""
        shard = self.shard
        order = torch.argsort(torch.cat([shard.node_ids, shard.halo_ids]))
        column = torch.empty_like(order)
        column[order] = torch.arange(len(order), device=order.device)
        blocks, start = [shard.inner, *(shard.halo[p] for p in sorted(shard.halo))], 0
        dsts: list[Tensor] = []
        srcs: list[Tensor] = []
        for block in blocks:
            dsts.append(block.edge_dst)
            srcs.append(column[block.indices.long() + start])
            start += block.num_src
        dst, src = torch.cat(dsts), torch.cat(srcs)
        by_row = torch.argsort(dst * len(order) + src, stable=True)  # repeated edges keep the order of their ids
        block = Block.from_edges(
            dst[by_row],
            src[by_row],
            num_dst=shard.num_inner,
            num_src=len(order),
            src_ids=torch.cat([shard.node_ids, shard.halo_ids])[order],
            edges=EdgeData.cat([block.edges for block in blocks]).at(by_row),
        )
        return block, order


@dataclass(eq=False)
class HeldRows(Unsaved):
    """Bytes of halo rows held from forward to backward, by (layer, call), of the last pass. An engine's part."""

    nbytes_of: dict[tuple[int, int], int] = field(default_factory=dict[tuple[int, int], int])

    @property
    def nbytes(self) -> int:
        return sum(self.nbytes_of.values())

    def record(self, layer: int, call: int, rows: Sequence[Tensor]) -> None:
        self.nbytes_of[layer, call] = sum(t.numel() * t.element_size() for t in rows)


class Covered(NamedTuple):
    """A cover, and the exchanges of the rows that travel under it, of partial rows and of destinations' rows."""

    cover: Cover
    edges: EdgeOrder
    rows: CodedExchange
    partial: CodedExchange
    exact: CodedExchange

    def by(self, rows: CodedExchange, partial: CodedExchange) -> Covered:
        """With other exchanges."""
        return self._replace(rows=rows, partial=partial)


@dataclass(eq=False)
class HaloGraph(View):
    """A rank's part, with one exchange of boundary rows per aggregation.

    `exchange` carries rows and their gradients. With a `cache`, what layer 0 reads of the features is fetched once, by
    the exchange `once` where it is given: noise that is drawn once would stay for the whole run. `covers`: by
    `Mergeable.partial_types`, those under which folds are split.
    """

    exchange: CodedExchange = field(kw_only=True)
    edges: EdgeOrder = field(kw_only=True)
    once: CodedExchange | None = field(default=None, kw_only=True)
    held: HeldRows = field(default_factory=HeldRows, kw_only=True)
    covers: Mapping[int, Covered] = field(default_factory=dict[int, "Covered"], kw_only=True)
    _features: tuple[Tensor, float, int] | None = field(default=None, init=False)  # the features after dropout

    @property
    def comm(self) -> Communicator:
        return self.exchange.comm

    @property
    def edge_ids(self) -> Tensor:
        return self.edges.edge_ids

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

    def aggregate(self, agg: Aggregator, src: Rows, dst: Rows = (), edge: Rows = (), shared: Rows = ()) -> Tensor:
        call = self.next_call()
        if (kept := self.kept_result(call, agg, src)) is not None:
            return kept
        if isinstance(src, Source) and src.halo is not None and not (agg.linear and src.constant):
            block, order = self.edges.combined
            both = tuple(torch.cat([inner, halo])[order] for inner, halo in zip(src, src.halo(), strict=True))
            return fold_all_edges(agg, block, both, dst, edge, shared)
        if agg.whole_neighborhood:
            block, order = self.edges.combined
            halo = apply_to_rows(_HaloRows, self, call, *src)
            both = tuple(torch.cat([mine, theirs])[order] for mine, theirs in zip(src, halo, strict=True))
            return fold_all_edges(agg, block, both, dst, edge, shared)
        view = self.exactly() if self.cache is not None and self._constant(agg, src) else self
        view, split = view._under_cover(agg, edge)
        out = apply(_HaloFold, view, split, agg, call, (len(src), len(dst), len(edge)), *src, *dst, *edge, *shared)
        return self.keep_result(call, agg, src, out)

    def _kept_halo(self) -> Tensor:
        """Features of the halo nodes, fetched once."""
        assert self.cache is not None
        if self.cache.halo is None:
            site = self.site(call=0, phase="forward")
            view = self.exactly()
            rows = dict(view.exchange.take_all(view.send((self.shard.x,), site)))
            self.cache.halo = torch.cat([rows[p][0] for p in sorted(rows)] or [self.shard.x[:0]])
        return self.cache.halo

    def exactly(self) -> Self:
        """This view with the exchange of what is sent once."""
        if self.once is None:
            return self
        covers = {types: each.by(self.once, self.once) for types, each in self.covers.items()}
        return replace(self, exchange=self.once, covers=covers)

    def _under_cover(self, agg: Aggregator, edge: Rows) -> tuple[Self, SourceFold | None]:
        """(the view of the rows that travel, the fold of the others) of an aggregation that a cover splits."""
        if not self.covers or not merges(agg, edge):
            return self, None
        found = self.covers.get(agg.partial_types or 0)
        if found is None or (found.cover.linear and not agg.linear):
            return self, None
        view = replace(self, shard=found.cover.shard, edges=found.edges, exchange=found.rows)
        return view, SourceFold(found.cover, agg, found.partial, found.exact)

    def site(self, *, call: int, phase: Phase) -> Site:
        return Site(self.run.epoch, self.layer, call, phase if self.run.counted else "evaluate")

    def send(self, src: Rows, site: Site) -> Posted:
        """Boundary rows out; halo rows will come in."""
        boundary, num_halo = self.shard.boundary, self.shard.num_halo
        outgoing = {p: Outgoing(src, boundary[p]) for p in self.readers}
        incoming = {p: Incoming(num_halo[p]) for p in num_halo}
        return self.exchange.post(outgoing, incoming, RowLike.of(src), site)

    def send_back(self, grads: Mapping[int, Rows], like: Sequence[RowLike], site: Site) -> Posted:
        """Gradients of halo rows to their owners; those of my boundary rows will come in."""
        outgoing = {p: Outgoing(rows) for p, rows in grads.items()}
        incoming = {p: Incoming(len(index)) for p, index in self.shard.boundary.items()}
        return self.exchange.post(outgoing, incoming, like, site)

    @property
    def sources(self) -> list[int]:
        """Peers whose rows this part reads, the previous rank first: at any time each sends to another one."""
        return sorted(self.shard.halo, key=lambda p: (self.comm.rank - p) % self.comm.size)

    @property
    def readers(self) -> list[int]:
        """Peers that read rows of this part, the next rank first."""
        return sorted(self.shard.boundary, key=lambda p: (p - self.comm.rank) % self.comm.size)


class _Kept(Context):
    view: HaloGraph
    agg: Aggregator
    call: int
    split: SourceFold | None
    counts: tuple[int, int, int]
    num_kept: int
    num_partial: int
    like: tuple[RowLike, ...]


class _HaloFold(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: _Kept,
        view: HaloGraph,
        split: SourceFold | None,
        agg: Aggregator,
        call: int,
        counts: tuple[int, int, int],
        *flat: Tensor,
    ) -> Tensor:
        x = split_operands(counts, flat)
        early, late = view.edges.forward
        halos, state, partial = _fold(view, split, agg, x, early, late, view.site(call=call, phase="forward"))
        out, saved = agg.finish(state)
        kept = [*flat, *(t for p in halos for t in halos[p])] if agg.needs_src else []
        ctx.view, ctx.split, ctx.agg, ctx.call, ctx.counts = view, split, agg, call, counts
        ctx.num_kept, ctx.num_partial = len(kept), len(partial)
        ctx.like = RowLike.of(x.src)
        view.held.record(view.layer, call, [*kept[len(flat) :], *partial])
        ctx.save_for_backward(*kept, *partial, *saved)
        return out

    @staticmethod
    def backward(ctx: _Kept, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        (grad_out,) = grad_outputs
        tensors = ctx.saved_tensors
        kept, end = tensors[: ctx.num_kept], ctx.num_kept + ctx.num_partial
        partial, saved = tensors[ctx.num_kept : end], tensors[end:]
        asked = ctx.needs_input_grad[5:]
        num_flat = len(asked) if kept else 0
        x, halos = split_operands(ctx.counts, kept[:num_flat]), _by_peer(ctx.view, kept[num_flat:], ctx.counts[0])
        back = _Backward(ctx.view, ctx.split, ctx.agg, x, saved, partial, grad_out.contiguous(), asked, ctx.counts)
        site = ctx.view.site(call=ctx.call, phase="backward")
        return (None,) * 5 + tuple(wanted_gradients(back.gradients(halos, ctx.like, site), asked))


class _Fetched(Context):
    view: HaloGraph
    call: int
    like: tuple[RowLike, ...]


class _HaloRows(torch.autograd.Function):
    """Rows of all halo nodes, parts in ascending order; their gradients go to their owners. [N, ...] -> [H, ...]."""

    @staticmethod
    def forward(ctx: _Fetched, view: HaloGraph, call: int, *src: Tensor) -> Rows:
        found = dict(view.exchange.take_all(view.send(src, view.site(call=call, phase="forward"))))
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
        posted = view.send_back({p: sent[p] for p in view.sources}, like, view.site(call=ctx.call, phase="backward"))
        totals = tuple(each.empty(view.shard.num_inner).zero_() for each in like)
        for p in (p for p in view.readers if p in posted.incoming):
            add_returned(totals, view.shard.boundary[p], view.exchange.take(posted, p))
        found = dict(zip(wanted, totals, strict=True))
        return (None, None, *(found.get(i) for i in range(len(asked))))


def _fold(
    view: HaloGraph,
    split: SourceFold | None,
    agg: Aggregator,
    x: Operands,
    early: list[Block],
    late: list[Block],
    site: Site,
) -> tuple[dict[int, Rows], Rows, Rows]:
    """Exchange and fold. Returns the halo rows (when the gradient needs them), the state, and what the gradient reads
    of partial rows. Partial rows leave as soon as they can be folded: at once, or when the destinations' rows are
    there, meanwhile inner edges are folded."""
    asked = split.ask(x.dst, site) if split else None
    exchange, posted = view.exchange, view.send(x.src, site)
    folded = split.send(x, None, site) if split and not asked else None
    edge = view.edges.edge_rows
    there = dict(exchange.take_all(posted)) if view.edges.overlap == "none" else {}
    state = agg.init(view.shard.num_inner, x)
    for block in early:
        state = agg.update(state, block, x._replace(edge=edge(block, x.edge)))
    if split and asked:
        folded = split.send(x, asked, site)
    if view.edges.overlap == "central_marginal":
        there = dict(exchange.take_all(posted))
    for block in late:
        state = agg.update(state, block, x._replace(edge=edge(block, x.edge)))
    halos: dict[int, Rows] = {}
    for p in view.sources:  # a fixed order gives the same bits, whatever arrives first
        rows = there.pop(p, None) or exchange.take(posted, p)
        block = view.shard.halo[p]
        state = agg.update(state, block, x._replace(src=rows, edge=edge(block, x.edge)))
        if agg.needs_src:
            halos[p] = rows
    partial: Rows = ()
    if split and folded:
        state, partial = split.merge(state, folded)
    return halos, state, partial


def _by_peer(view: HaloGraph, rows: Rows, num_src: int) -> dict[int, Rows]:
    peers = view.sources if rows else []
    return {p: rows[i * num_src : (i + 1) * num_src] for i, p in enumerate(peers)}


class _Backward:
    """The gradient of one halo aggregation: partial rows and halo blocks, then inner blocks while gradients travel."""

    def __init__(
        self,
        view: HaloGraph,
        split: SourceFold | None,
        agg: Aggregator,
        x: Operands,
        saved: Rows,
        partial: Rows,
        grad_out: Tensor,
        asked: tuple[bool, ...],
        counts: tuple[int, int, int],
    ) -> None:
        self.view, self.split, self.agg, self.x, self.partial, self.grad_out = view, split, agg, x, partial, grad_out
        self.prepared = agg.prepare(saved, grad_out)
        self.wanted = asked[: counts[0]]
        self.shares = Shares(view.edges.slots, x.edge)

    def gradients(self, halos: dict[int, Rows], like: Sequence[RowLike], site: Site) -> Operands:
        view, shares, split = self.view, self.shares, self.split
        gone = split.send_back(self.partial, self.prepared, self.grad_out, site) if split else None
        travelling = [each for each, wanted in zip(like, self.wanted, strict=True) if wanted]
        sent: dict[int, Rows] = {}
        for p in view.sources:
            block = view.shard.halo[p]
            sent[p] = self._chosen(shares.add_halo(self._grad(block, halos.get(p, ())), block))
        posted = view.send_back(sent, travelling, site) if travelling else None
        early, late = view.edges.backward
        for block in early:
            shares.add_inner(self._grad(block, self.x.src), block)
        returned = None
        if split and gone:
            grads, returned = split.differentiate(self.partial, self.x, gone, site)
            shares.add_inner(grads, split.cover.block)
        back = {p: view.exchange.take(posted, p) for p in view.readers if p in posted.incoming} if posted else {}
        for block in late:
            shares.add_inner(self._grad(block, self.x.src), block)
        for p, rows in back.items():
            add_returned(self._chosen(shares.src), view.shard.boundary[p], rows)
        total = shares.finished(self.agg, self.prepared, self.grad_out)
        if split and returned:
            split.add_returned(total.dst, returned)
        return total

    def _chosen(self, src: Rows) -> Rows:
        return tuple(g for g, wanted in zip(src, self.wanted, strict=True) if wanted)

    def _grad(self, block: Block, src: Rows) -> Operands:
        edge = self.view.edges.edge_rows(block, self.x.edge)
        return self.agg.grad(block, self.x._replace(src=src, edge=edge), self.prepared, self.grad_out)
