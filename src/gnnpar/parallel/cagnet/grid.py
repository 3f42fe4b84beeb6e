"""CAGNET in 1.5 dimensions: Y[N_G, F] = sum_j sum_q A[N_G, N_q] X[N_q, F], rank j of group G over its parts q.

Rank g c + j is column j of group g; there are P / c groups of c ranks. Column j folds, for all rows of its group, the
in-edges from groups j P / c^2, ..., (j + 1) P / c^2 - 1; the sum over a group's columns is the result.

Forward: rows of a part go to the column of ranks that folds them; each rank has partial sums of all rows of its group
and sends every other rank of the group its rows. Backward: gradients of results go to the group, of sources from
the column to their owner.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import NamedTuple, Self

import torch
from torch import Tensor

from gnnpar.comm import CodedExchange, Communicator, Incoming, MessageTag, Outgoing, RowLike, RowLists
from gnnpar.folds.aggregator import Aggregator
from gnnpar.folds.block import Block, Rows
from gnnpar.folds.edge_data import EdgeData
from gnnpar.parallel.blocks import walk
from gnnpar.parallel.broadcast import BroadcastGraph
from gnnpar.parallel.torch_types import Context, apply
from gnnpar.partition.shard import Shard


class Grid(NamedTuple):
    """A grid of ranks. `copies`: c; c^2 divides the number of ranks."""

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
        ids = sum(t.numel() * t.element_size() for t in self.ids.values())
        return ids + sum(block.nbytes for block in self.blocks.values())

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
    host = torch.device("cpu")
    mine = {q: block.to(host) for q, block in {shard.part: shard.inner, **shard.halo}.items()}
    everyone = comm.broadcast(comm.gather((shard.node_ids.cpu(), mine)))
    assert everyone is not None
    ids = [node_ids for node_ids, _ in everyone]
    read = [grid.source(grid.column(me), stage) for stage in range(grid.stages)]
    there = {q: _stacked([(ids[p], everyone[p][1].get(q)) for p in grid.group(me)], ids[q]) for q in read}
    held = {q: ids[q].to(comm.device) for q in {*read, *grid.group(me)}}
    return Pieces(grid, me, {q: block.to(comm.device) for q, block in there.items()}, held)


def without_edges(shard: Shard) -> Shard:
    """Return a shard's rows without edges; the edges are in the pieces of its group."""
    inner = shard.inner.restrict(torch.zeros_like(shard.inner.indices, dtype=torch.bool))
    return replace(shard, inner=inner, halo={}, boundary={}, halo_in_degree=shard.in_degree[:0], halo_in_weight=None)


def _stacked(pieces: list[tuple[Tensor, Block | None]], columns: Tensor) -> Block:
    """Return the in-edges of several parts from one part, with stacked rows. Shapes: columns [N_q] global ids,
    ascending."""
    dsts: list[Tensor] = [columns[:0]]
    srcs: list[Tensor] = [columns[:0]]
    held: list[EdgeData] = []
    start = 0
    for ids, block in pieces:
        if block is not None:
            assert block.src_ids is not None or block.num_src == len(columns)
            place = None if block.src_ids is None else torch.searchsorted(columns, block.src_ids)
            src = block.indices.long()
            dsts.append(block.edge_dst + start)
            srcs.append(src if place is None else place[src])
            held.append(replace(block.edges, ids=None))
        start += len(ids)
    return Block.from_edges(
        torch.cat(dsts),
        torch.cat(srcs),
        num_dst=start,
        num_src=len(columns),
        src_ids=columns,
        edges=EdgeData.cat(held),
        compress=True,
    )


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

    @property
    def grid(self) -> Grid:
        return self.pieces.grid

    @property
    def num_stages(self) -> int:
        return self.grid.stages

    @property
    def first(self) -> int:
        return self.grid.source(self.grid.column(self.rank), 0)

    @property
    def readers(self) -> list[int]:
        return [p for p in self.grid.readers(self.rank) if p != self.rank]

    def block(self, part: int) -> Block:
        return self.pieces.blocks[part]

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
