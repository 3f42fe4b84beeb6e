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
from typing import Self

import torch
from torch import Tensor

from gnnpar.comm import CodedExchange, Communicator, Incoming, MessageTag, Outgoing, RowLike, RowLists
from gnnpar.folds.aggregator import Aggregator
from gnnpar.folds.block import Block, Rows
from gnnpar.parallel.blocks import walk
from gnnpar.parallel.broadcast import BroadcastGraph, Grid
from gnnpar.parallel.edges import Edges, in_edges
from gnnpar.parallel.torch_types import Context, apply
from gnnpar.partition.shard import Shard


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
