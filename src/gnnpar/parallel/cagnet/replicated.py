"""Sums over groups of ranks: Y[N_G, F] = sum_j sum_q A[N_G, N_q] X[N_q, F], rank j of group G over its parts q.

Forward: rows of a part go to the column of ranks that folds them; each rank has partial sums of all rows of its group,
and sends every other rank of the group those of its rows. Backward: gradients of results go to the group, those of
sources from the column to their owner.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Self

import torch
from torch import Tensor

from gnnpar.comm import CodedExchange, Communicator, Incoming, Outgoing, Posted, RowLike, Site
from gnnpar.comm.communicator import Phase
from gnnpar.folds.aggregator import Aggregator
from gnnpar.folds.block import Operands, Rows
from gnnpar.parallel.cagnet.grid import Grid, Pieces
from gnnpar.parallel.torch_types import Context, apply
from gnnpar.parallel.view import View


def refuse_fold(name: str, layer: int, copies: int, *, linear: bool) -> None:
    """ValueError for a fold whose partial results of some edges do not add up to its result."""
    if not linear:
        raise ValueError(
            f"strategy.replication={copies} adds up partial sums of ranks, but {name} of layer {layer} "
            "is no sum of its source rows: set strategy.replication=1, or choose a model of sums: gcn, sage, gin, gcnii"
        )


@dataclass(eq=False)
class ReplicatedGraph(View):
    """`rows`, `home`: exchanges of source rows and their gradients, of partial sums and the gradients of results.

    `once`: both for what is sent once and kept over epochs (first_layer=cached); None: these.
    """

    pieces: Pieces = field(kw_only=True)
    rows: CodedExchange = field(kw_only=True)
    home: CodedExchange = field(kw_only=True)
    prefetch: int = field(default=1, kw_only=True)
    once: tuple[CodedExchange, CodedExchange] | None = field(default=None, kw_only=True)

    @property
    def comm(self) -> Communicator:
        return self.rows.comm

    @property
    def grid(self) -> Grid:
        return self.pieces.grid

    @property
    def rank(self) -> int:
        return self.pieces.rank

    @property
    def others(self) -> list[int]:
        """Of the group, the next one first."""
        group = self.grid.group(self.rank)
        return [group[(self.rank - group[0] + step) % len(group)] for step in range(1, len(group))]

    def site(self, call: int, phase: Phase) -> Site:
        return Site(self.run.epoch, self.layer, call, phase if self.run.counted else "evaluate")

    def exactly(self) -> Self:
        """This view with the exchanges of what is sent once."""
        return self if self.once is None else replace(self, rows=self.once[0], home=self.once[1])

    def aggregate(self, agg: Aggregator, src: Rows, dst: Rows = (), edge: Rows = (), shared: Rows = ()) -> Tensor:
        call = self.next_call()
        if (kept := self.kept_result(call, agg, src)) is not None:
            return kept
        refuse_fold(type(agg).__name__, self.layer, self.grid.copies, linear=agg.linear)
        view = self.exactly() if self.cache is not None and self._constant(agg, src) else self
        return self.keep_result(call, agg, src, apply(_ReplicatedFold, view, agg, call, *src))

    def post_rows(self, stage: int, src: Rows, site: Site) -> Posted:
        """A part a column sends its rows, and every rank of the column receives them."""
        part, outgoing = self.grid.source(self.grid.column(self.rank), stage), dict[int, Outgoing]()
        readers = self.grid.readers(self.rank)
        if self.grid.source(readers.start, stage) == self.rank:
            every = torch.arange(len(src[0]), device=src[0].device)
            outgoing = {p: Outgoing(src, every) for p in readers if p != self.rank}
        incoming = {} if part == self.rank else {part: Incoming(self.pieces.blocks[part].num_src)}
        self.rows.comm.flush(keep=self.prefetch)
        return self.rows.post(outgoing, incoming, RowLike.of(src), site)

    def post_gradients(self, stage: int, grads: Rows, like: tuple[RowLike, ...], site: Site) -> Posted:
        """The gradients of a part a column to their owner."""
        part, readers = self.grid.source(self.grid.column(self.rank), stage), self.grid.readers(self.rank)
        outgoing = {} if part == self.rank else {part: Outgoing(grads)}
        incoming: dict[int, Incoming] = {}
        if self.grid.source(readers.start, stage) == self.rank:
            incoming = {p: Incoming(self.shard.num_inner) for p in readers if p != self.rank}
        self.rows.comm.flush(keep=self.prefetch)
        return self.rows.post(outgoing, incoming, like, site)

    def summed(self, partial: Tensor, rows_type: torch.dtype, site: Site) -> Tensor:
        """My rows of the sum over the group, ranks in ascending order; partial sums travel as `rows_type`. Shapes:
        partial [N_G, F] -> [N, F]."""
        places = self.pieces.places
        order = torch.arange(self.pieces.num_rows, device=partial.device)
        outgoing = {p: Outgoing((partial,), order[places[p]]) for p in self.others}
        incoming = {p: Incoming(self.shard.num_inner) for p in self.others}
        like = RowLike.of((partial,))[0]._replace(dtype=rows_type)
        posted = self.home.post(outgoing, incoming, (like,), site)
        found = {p: rows for p, (rows,) in self.home.take_all(posted)} | {self.rank: partial[places[self.rank]]}
        total = found[min(found)].to(partial.dtype, copy=True)
        for p in sorted(found)[1:]:
            total += found[p]
        return total

    def of_group(self, rows: Tensor, site: Site) -> Tensor:
        """Everybody's rows of the group, as they travel. Shapes: rows [N, F] -> [N_G, F]."""
        places = self.pieces.places
        outgoing = {p: Outgoing((rows,)) for p in self.others}
        incoming = {p: Incoming(len(self.pieces.ids[p])) for p in self.others}
        like = RowLike.of((rows,))
        table = like[0].empty(self.pieces.num_rows)
        table[places[self.rank]] = rows
        for p, (theirs,) in self.home.take_all(self.home.post(outgoing, incoming, like, site)):
            table[places[p]] = theirs
        return table


class _Kept(Context):
    view: ReplicatedGraph
    agg: Aggregator
    call: int
    like: tuple[RowLike, ...]


class _ReplicatedFold(torch.autograd.Function):
    @staticmethod
    def forward(ctx: _Kept, view: ReplicatedGraph, agg: Aggregator, call: int, *src: Tensor) -> Tensor:
        site, num_stages = view.site(call, "forward"), view.grid.stages
        state, posts = agg.init(view.pieces.num_rows, Operands(src)), list[Posted]()
        for stage in range(num_stages):
            while len(posts) <= stage + view.prefetch and len(posts) < num_stages:
                posts.append(view.post_rows(len(posts), src, site))
            part = view.grid.source(view.grid.column(view.rank), stage)
            rows = src if part == view.rank else view.rows.take(posts[stage], part)
            state = agg.update(state, view.pieces.blocks[part], Operands(rows))
            del rows
        partial, saved = agg.finish(state)
        ctx.view, ctx.agg, ctx.call, ctx.like = view, agg, call, RowLike.of(src)
        ctx.save_for_backward(*saved)
        return view.summed(partial, src[0].dtype, site)

    @staticmethod
    def backward(ctx: _Kept, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        (grad_out,) = grad_outputs
        view, agg, asked = ctx.view, ctx.agg, ctx.needs_input_grad[3:]
        none = (None,) * 3
        if not any(asked):
            return (*none, *(None for _ in asked))
        site = view.site(ctx.call, "backward")
        table = view.of_group(grad_out.to(ctx.like[0].dtype).contiguous(), site)
        prepared = agg.prepare(ctx.saved_tensors, table)
        returned: Posted | None = None
        own: Rows = ()
        for stage in range(view.grid.stages):
            part = view.grid.source(view.grid.column(view.rank), stage)
            grads = agg.grad(view.pieces.blocks[part], Operands(()), prepared, table).src
            own = grads if part == view.rank else own
            posted = view.post_gradients(stage, grads, ctx.like, site)
            if view.grid.source(view.grid.readers(view.rank).start, stage) == view.rank:
                returned = posted
        assert returned is not None
        total = own or tuple(each.widened.empty(view.shard.num_inner).zero_() for each in ctx.like)
        for peer in sorted(returned.peers):
            for into, rows in zip(total, view.rows.take(returned, peer), strict=True):
                into.add_(rows)
        return (*none, *total)
