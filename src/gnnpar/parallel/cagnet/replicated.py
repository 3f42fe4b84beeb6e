"""Sums over groups of ranks: Y[N_G, F] = sum_j sum_q A[N_G, N_q] X[N_q, F], rank j of group G over its parts q.

Forward: rows of a part go to the column of ranks that folds them; each rank has partial sums of all rows of its group
and sends every other rank of the group its rows. Backward: gradients of results go to the group, those of sources from
the column to their owner.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Self

import torch
from torch import Tensor

from gnnpar.comm import CodedExchange, Incoming, Outgoing, Posted, RowLike, Site
from gnnpar.folds.aggregator import Aggregator
from gnnpar.folds.block import Block, Operands, Rows
from gnnpar.parallel.blocks import ExchangingView, Gradient, walk
from gnnpar.parallel.broadcast import add_whole_parts
from gnnpar.parallel.cagnet.grid import Grid, Pieces
from gnnpar.parallel.torch_types import Context, apply


def refuse_fold(name: str, layer: int, copies: int, *, linear: bool) -> None:
    """Raise ValueError for a fold with partial results that do not add up to its result."""
    if not linear:
        raise ValueError(
            f"strategy.replication={copies} adds up partial sums of ranks, but {name} of layer {layer} "
            "is no sum of its source rows: set strategy.replication=1, or choose a model of sums: gcn, sage, gin, gcnii"
        )


@dataclass(eq=False)
class ReplicatedGraph(ExchangingView):
    """A rank's partial sums of all rows of its group. `home`: exchange of partial sums and of gradients of results.

    `home_once`: the exchange for rows that are sent once and kept over epochs, like `once`.
    """

    pieces: Pieces = field(kw_only=True)
    home: CodedExchange = field(kw_only=True)
    home_once: CodedExchange | None = field(default=None, kw_only=True)
    prefetch: int = field(default=1, kw_only=True)

    @property
    def num_rows(self) -> int:
        return self.pieces.num_rows

    @property
    def grid(self) -> Grid:
        return self.pieces.grid

    @property
    def rank(self) -> int:
        return self.pieces.rank

    @property
    def others(self) -> list[int]:
        """Return the other ranks of the group, the next one first."""
        group = self.grid.group(self.rank)
        return [group[(self.rank - group[0] + step) % len(group)] for step in range(1, len(group))]

    def exactly(self) -> Self:
        return self if self.home_once is None else replace(super().exactly(), home=self.home_once)

    def fold(self, agg: Aggregator, call: int, src: Rows, dst: Rows, edge: Rows, shared: Rows) -> Tensor:
        refuse_fold(type(agg).__name__, self.layer, self.grid.copies, linear=agg.linear)
        return apply(_Home, self, call, src[0].dtype, walk(self, agg, call, src, (), (), ()))

    def blocks(self, agg: Aggregator, x: Operands, call: int) -> Iterator[tuple[Block, Rows | None]]:
        site, stages, posts = self.site(call, "forward"), self.grid.stages, list[Posted]()
        for stage in range(stages):
            while len(posts) <= stage + self.prefetch and len(posts) < stages:
                posts.append(self.post_rows(len(posts), x.src, site))
            part = self.grid.source(self.grid.column(self.rank), stage)
            yield self.pieces.blocks[part], None if part == self.rank else self.exchange.take(posts[stage], part)

    def differentiate(self, gradient: Gradient) -> Operands:
        site = self.site(gradient.call, "backward")
        returned: Posted | None = None
        for stage in range(self.grid.stages):
            part = self.grid.source(self.grid.column(self.rank), stage)
            sent: Rows = ()
            if part == self.rank:
                gradient.add_own(self.pieces.blocks[part])
            else:
                sent = gradient.of_block(self.pieces.blocks[part], ())
            posted = self.post_gradients(stage, sent, gradient.like, site)
            if self.grid.source(self.grid.readers(self.rank).start, stage) == self.rank:
                returned = posted
        if not gradient.into:
            gradient.begin(self.shard.num_inner)
        assert returned is not None
        add_whole_parts(gradient.into, self.exchange, returned)
        return gradient.total()

    def post_rows(self, stage: int, src: Rows, site: Site) -> Posted:
        """Send the rows of one part per column to every rank of the column."""
        part, outgoing = self.grid.source(self.grid.column(self.rank), stage), dict[int, Outgoing]()
        readers = self.grid.readers(self.rank)
        if self.grid.source(readers.start, stage) == self.rank:
            every = torch.arange(len(src[0]), device=src[0].device)
            outgoing = {p: Outgoing(src, every) for p in readers if p != self.rank}
        incoming = {} if part == self.rank else {part: Incoming(self.pieces.blocks[part].num_src)}
        self.comm.flush(keep=self.prefetch)
        return self.exchange.post(outgoing, incoming, RowLike.of(src), site)

    def post_gradients(self, stage: int, grads: Rows, like: tuple[RowLike, ...], site: Site) -> Posted:
        """Send the gradients of one part per column to their owner."""
        part, readers = self.grid.source(self.grid.column(self.rank), stage), self.grid.readers(self.rank)
        outgoing = {} if part == self.rank else {part: Outgoing(grads)}
        incoming: dict[int, Incoming] = {}
        if self.grid.source(readers.start, stage) == self.rank:
            incoming = {p: Incoming(self.shard.num_inner) for p in readers if p != self.rank}
        self.comm.flush(keep=self.prefetch)
        return self.exchange.post(outgoing, incoming, like, site)

    def summed(self, partial: Tensor, rows_type: torch.dtype, site: Site) -> Tensor:
        """Return this rank's rows of the sum over the group, ranks in ascending order; partial sums travel as
        `rows_type`. Shapes: partial [N_G, F] -> [N, F]."""
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
        """Return all rows of the group, as they travel. Shapes: rows [N, F] -> [N_G, F]."""
        places = self.pieces.places
        outgoing = {p: Outgoing((rows,)) for p in self.others}
        incoming = {p: Incoming(len(self.pieces.ids[p])) for p in self.others}
        like = RowLike.of((rows,))
        table = like[0].empty(self.pieces.num_rows)
        table[places[self.rank]] = rows
        for p, (theirs,) in self.home.take_all(self.home.post(outgoing, incoming, like, site)):
            table[places[p]] = theirs
        return table


class _Homeward(Context):
    view: ReplicatedGraph
    call: int
    rows_type: torch.dtype


class _Home(torch.autograd.Function):
    """Partial sums of the group's rows -> sums of this rank's rows. Shapes: [N_G, F] -> [N, F]."""

    @staticmethod
    def forward(ctx: _Homeward, view: ReplicatedGraph, call: int, rows_type: torch.dtype, partial: Tensor) -> Tensor:
        ctx.view, ctx.call, ctx.rows_type = view, call, rows_type
        return view.summed(partial, rows_type, view.site(call, "forward"))

    @staticmethod
    def backward(ctx: _Homeward, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        rows = grad_outputs[0].to(ctx.rows_type).contiguous()
        return None, None, None, ctx.view.of_group(rows, ctx.view.site(ctx.call, "backward"))
