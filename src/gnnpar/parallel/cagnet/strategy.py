"""CAGNET in 1 and 1.5 dimensions: Y[N_P, F] = sum_q A[N_P, N_q] X[N_q, F], part q's rows broadcast in turn, exact.

Tripathy, Yelick, Buluc, Reducing Communication in Graph Neural Network Training, SC 2020 (arXiv 2005.03300).
Specification, bytes and deviations from the paper and the public code: docs/strategies/cagnet.md.

CAGNET in 1.5 dimensions: Y[N_G, F] = sum_j sum_q A[N_G, N_q] X[N_q, F], rank j of group G over its parts q.

Rank g c + j is column j of group g; there are P / c groups of c ranks. Column j folds, for all rows of its group, the
in-edges from groups j P / c^2, ..., (j + 1) P / c^2 - 1; the sum over a group's columns is the result.

Forward: rows of a part go to the column of ranks that folds them; each rank has partial sums of all rows of its group
and sends every other rank of the group its rows. Backward: gradients of results go to the group, of sources from
the column to their owner.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import isqrt
from typing import Annotated, Self

import torch
from annotated_types import Ge
from torch import Tensor

from gnnpar.codecs.adaptive.codec import Adaptive
from gnnpar.codecs.codec import Identity, is_constant
from gnnpar.codecs.delta import refuse_delta
from gnnpar.comm import CodedExchange, Communicator, Incoming, MessageTag, Outgoing, RowLike, RowLists
from gnnpar.folds.aggregator import Aggregator
from gnnpar.folds.block import Block, Rows
from gnnpar.folds.edge_data import ALL_KINDS, IN_BLOCKS
from gnnpar.parallel.blocks import walk
from gnnpar.parallel.broadcast import BroadcastGraph, Grid, broadcast_engine
from gnnpar.parallel.context import BuildContext
from gnnpar.parallel.declared import Declaration, Problem, Proposes
from gnnpar.parallel.edges import EdgeOrder, Edges, in_edges
from gnnpar.parallel.engine import Engine, FlatEngine
from gnnpar.parallel.row_bytes import RowBytes
from gnnpar.parallel.shape_trace import shape_trace
from gnnpar.parallel.strategy import HALO, Capabilities, CodedStrategy, name_of
from gnnpar.parallel.torch_types import Context, apply
from gnnpar.partition.shard import Shard
from gnnpar.pricing.candidate import Scope, Values
from gnnpar.pricing.price import Traffic
from gnnpar.pricing.regrouped import Regrouped
from gnnpar.pricing.steps import Step
from gnnpar.pricing.work import Work


@dataclass(frozen=True, eq=False)
class Pieces:
    """Edges of one rank. Shapes: blocks[q] from all rows of part q to all rows of its group, parts in ascending order;
    ids[q] [N_q], of its group and of the parts that it reads."""

    grid: Grid
    rank: int
    blocks: dict[int, Block]
    ids: dict[int, Tensor]

    @cached_property
    def places(self) -> dict[int, slice]:
        """Return the positions of each part of the group among the group's rows."""
        places: dict[int, slice] = {}
        start = 0
        for part in self.grid.group(self.rank):
            places[part] = slice(start, start + len(self.ids[part]))
            start += len(self.ids[part])
        return places

    @property
    def num_rows(self) -> int:
        """Return the number of rows of the group."""
        return self.places[self.grid.group(self.rank)[-1]].stop

    @property
    def nbytes(self) -> int:
        return sum(held.nbytes for held in (*self.ids.values(), *self.blocks.values()))

    def row_lists(self) -> tuple[RowLists, RowLists]:
        """Return the lists of rows sent to a column, and of partial sums sent to the owners of their rows."""
        mine, me, size = self.ids[self.rank], self.rank, self.grid.ranks
        every = torch.arange(len(mine), device=mine.device)
        readers = [p for p in self.grid.readers(me) if p != me]
        rows = RowLists(me, size, mine, dict.fromkeys(readers, every), {q: self.ids[q] for q in self.blocks if q != me})
        group = torch.cat([self.ids[p] for p in self.grid.group(me)])
        place = torch.arange(len(group), device=mine.device)
        others = {p: place[at] for p, at in self.places.items() if p != me}
        return rows, RowLists(me, size, group, others, dict.fromkeys(others, mine))


def pieces_of(shard: Shard, comm: Communicator, copies: int) -> Pieces:
    """Return the pieces. Collective. Not counted, as part of the set-up."""
    grid, me = Grid(comm.size, copies), comm.rank
    everyone = comm.all_gather((shard.node_ids.cpu(), in_edges(shard)))
    ids = [node_ids for node_ids, _ in everyone]
    src, dst, data = Edges.cat([everyone[p][1] for p in grid.group(me)])
    rows = torch.cat([ids[p] for p in grid.group(me)])
    row, column = torch.full((2, shard.num_nodes), -1)
    row[rows] = torch.arange(len(rows))
    blocks: dict[int, Block] = {}
    for q in (grid.source(grid.column(me), stage) for stage in range(grid.stages)):
        column.fill_(-1)
        column[ids[q]] = torch.arange(len(ids[q]))
        read = column[src] >= 0
        blocks[q] = Block.from_edges(
            row[dst[read]],
            column[src[read]],
            num_dst=len(rows),
            num_src=len(ids[q]),
            src_ids=ids[q],
            edges=data.at(read),
            compress=True,
        ).to(comm.device)
    return Pieces(grid, me, blocks, {q: ids[q].to(comm.device) for q in {*blocks, *grid.group(me)}})


def without_edges(shard: Shard) -> Shard:
    """Return a shard's rows without edges; the edges are in the pieces of its group."""
    inner = shard.inner.restrict(torch.zeros_like(shard.inner.indices, dtype=torch.bool))
    return replace(shard, inner=inner, halo={}, boundary={}, halo_in_degree=shard.in_degree[:0], halo_in_weight=None)


def refuse_fold(name: str, layer: int, copies: int, *, linear: bool) -> None:
    """Raise ValueError for a fold with partial results that do not add up to its result."""
    if not linear:
        raise ValueError(
            f"strategy.replication={copies} adds up partial sums of ranks, but {name} of layer {layer} "
            "is no sum of its source rows: set strategy.replication=1, or choose a model of sums: gcn, sage, gin, gcnii"
        )


@dataclass(eq=False)
class ReplicatedGraph(BroadcastGraph):
    """A rank's partial sums of all rows of its group. `home`: exchange of partial sums and of gradients of results.

    `home_once`: the exchange for rows that are sent once and kept over epochs, like `once`.
    """

    pieces: Pieces = field(kw_only=True)
    home: CodedExchange = field(kw_only=True)
    home_once: CodedExchange | None = field(default=None, kw_only=True)

    @property
    def num_rows(self) -> int:
        return self.pieces.num_rows

    def block(self, part: int) -> Block:
        return self.pieces.blocks[part]

    @property
    def others(self) -> list[int]:
        """Return the other ranks of the group, the next one first."""
        return self.grid.others(self.grid.group(self.rank), self.rank)

    def exactly(self) -> Self:
        return self if self.home_once is None else replace(super().exactly(), home=self.home_once)

    def fold(self, agg: Aggregator, call: int, src: Rows, dst: Rows, edge: Rows, shared: Rows) -> Tensor:
        refuse_fold(type(agg).__name__, self.layer, self.grid.copies, linear=agg.linear)
        return apply(_Home, self, call, src[0].dtype, walk(self, agg, call, src, (), (), ()))

    def summed(self, partial: Tensor, rows_type: torch.dtype, tag: MessageTag) -> Tensor:
        """Return this rank's rows of the sum over the group, ranks in ascending order; partial sums are sent as
        `rows_type`. Shapes: partial [N_G, F] -> [N, F]."""
        places = self.pieces.places
        order = torch.arange(self.pieces.num_rows, device=partial.device)
        outgoing = {p: Outgoing((partial,), order[places[p]]) for p in self.others}
        incoming = {p: Incoming(self.shard.num_inner) for p in self.others}
        like = RowLike.of((partial,))[0]._replace(dtype=rows_type)
        posted = self.home.post(outgoing, incoming, (like,), tag)
        found = {p: rows for p, (rows,) in self.home.take_all(posted)} | {self.rank: partial[places[self.rank]]}
        total = found[min(found)].to(partial.dtype, copy=True)
        for p in sorted(found)[1:]:
            total += found[p]
        return total

    def of_group(self, rows: Tensor, tag: MessageTag) -> Tensor:
        """Return all rows of the group, as sent. Shapes: rows [N, F] -> [N_G, F]."""
        places = self.pieces.places
        outgoing = {p: Outgoing((rows,)) for p in self.others}
        incoming = {p: Incoming(len(self.pieces.ids[p])) for p in self.others}
        like = RowLike.of((rows,))
        table = like[0].empty(self.pieces.num_rows)
        table[places[self.rank]] = rows
        for p, (theirs,) in self.home.take_all(self.home.post(outgoing, incoming, like, tag)):
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
        return view.summed(partial, rows_type, view.message_tag(call, "forward"))

    @staticmethod
    def backward(ctx: _Homeward, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        rows = grad_outputs[0].to(ctx.rows_type).contiguous()
        return None, None, None, ctx.view.of_group(rows, ctx.view.message_tag(ctx.call, "backward"))


@dataclass(frozen=True, kw_only=True)
class Cagnet(CodedStrategy, Proposes):
    """Parameters of CAGNET. `prefetch`: parts in flight while one is folded. `codec`: of rows and their gradients.

    `replication`: c of 1.5 dimensions; c^2 divides the number of ranks. Groups of c ranks share the in-edges of their
    rows and add partial sums. Evaluation is exact and broadcasts too.
    """

    replication: Annotated[int, Ge(1)] = 1
    prefetch: Annotated[int, Ge(0)] = 1
    mode = "broadcast"

    @property
    def capabilities(self) -> Capabilities:
        """Return the capabilities. Groups that share in-edges do not hold all rows of their edges."""
        edge_data = ALL_KINDS if self.replication == 1 else IN_BLOCKS
        constant = is_constant(self.codec)
        return replace(HALO, edge_data=edge_data, whole_neighborhoods=False, row_order=False, captured=constant)

    def __post_init__(self) -> None:
        refuse_delta(self.codec, "cagnet", "sends whole parts, and every rank would hold all rows of the graph")
        if isinstance(self.codec, Adaptive):
            raise ValueError(
                "codec=adaptive weighs halo rows by the edges that read them, and strategy=cagnet sends all rows, read "
                "or not: use codec=uniform, random, bf16, drop or identity"
            )

    def check(self, num_ranks: int, num_layers: int, epochs: int) -> None:
        super().check(num_ranks, num_layers, epochs)
        self.check_ranks(num_ranks)

    def check_ranks(self, num_ranks: int) -> None:
        if num_ranks % (square := self.replication**2):
            raise ValueError(
                f"strategy.replication={self.replication} on {num_ranks} ranks: its square, {square}, does not divide "
                f"{num_ranks}; set strategy.replication=1, or another number of ranks"
            )

    def declared(self) -> Declaration:
        """Declare whole parts to all ranks, one after the other; in 1.5 dimensions to the ranks of a grid's column."""
        step, words = Step("parts", prefetch=self.prefetch), []
        if self.replication > 1:
            step = Step("grid", prefetch=self.prefetch, groups=self._groups)
            words = [f"replication {self.replication}"]
        options = {"prefetch": self.prefetch, "replication": self.replication}
        return Declaration(family="cagnet", step=step, words=words, options=options, sent=self._sent)

    def _groups(self, ranks: int) -> Regrouped:
        self.check_ranks(ranks)
        grid = Grid(ranks, self.replication)
        read = (tuple((grid.source(grid.column(r), s),) for s in range(grid.stages)) for r in range(ranks))
        return Regrouped(tuple(map(grid.group, range(ranks))), tuple(read))

    def _sent(self, traffic: Traffic, work: Work, rows: RowBytes, problem: Problem) -> Traffic:
        """Raise ValueError for a fold that is not a sum, if replication > 1. Return the bytes unchanged."""
        for layer in range(problem.ir.num_layers if self.replication > 1 else 0):
            for fold in problem.ir.folds(layer):
                refuse_fold(fold.kind, layer, self.replication, linear=fold.linear)
        return traffic

    def proposals(self, scope: Scope, ranks: int) -> Iterable[Values]:
        """Return replications, each with 32 and 16 bits; above 1 only if all folds are sums."""
        sums = all(f.linear for f in scope.ir.every_fold)
        grids = [c for c in range(1, (isqrt(ranks) if sums else 1) + 1) if ranks > 1 and ranks % c**2 == 0]
        return [{"replication": copies, "bits": bits} for copies in grids for bits in (32, 16)]

    @property
    def how(self) -> str:
        how = f"{name_of(self.codec)}, {self.prefetch} parts ahead"
        return how + (f", in-edges of {self.replication} parts shared" if self.replication > 1 else "")

    def build(self, context: BuildContext) -> Engine:
        if self.replication == 1:
            return broadcast_engine(context, self, prefetch=self.prefetch)
        context = context.normalised_for(self.exactness)
        shard, model, comm = context.shard, context.model, context.comm
        for use in shape_trace(model, replace(shard, x=shard.x.new_zeros(1, model.in_dim), learned=None)):
            refuse_fold(type(use.agg).__name__, use.layer, self.replication, linear=use.agg.linear)
        pieces = pieces_of(shard, comm, self.replication)
        context = replace(context, shard=without_edges(shard))
        lists = pieces.row_lists()
        codecs = [self.codec.build(each, comm, context.seed) for each in lists]
        rows, home = (CodedExchange(comm, codec) for codec in codecs)
        exact_rows, exact_home = (CodedExchange(comm, Identity().build(each, comm, context.seed)) for each in lists)
        view = ReplicatedGraph(
            context.shard,
            context.start,
            cache=context.new_cache(),
            pieces=pieces,
            exchange=rows,
            edges=EdgeOrder(context.shard, "none"),
            home=home,
            grid=pieces.grid,
            prefetch=self.prefetch,
            once=None if "exact" in self.exactness else exact_rows,
            home_once=None if "exact" in self.exactness else exact_home,
        )
        exact = replace(view, exchange=exact_rows, home=exact_home, cache=context.new_cache())
        parts = {"cache": view.cache}
        return FlatEngine(context, view=view, exact=exact, codecs=codecs, structure=[pieces], parts=parts)
