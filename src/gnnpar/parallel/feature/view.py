"""All edges on this rank's share of the columns: Y[N_P, F] = home(A[N, N] . columns(X[N_P, F])).

Forward: rows go to the ranks by columns (all-to-all), each folds the whole graph, results return to the owners of the
nodes (all-to-all). Backward: the same with gradients, in the opposite order. `columns` carries rows and the gradients
of rows, `home` results and the gradients of results: each has a codec for its row lists. `Slices` divide the operands
and the result of a fold over ranks: by columns, by heads, or by values. A rank without a column or head is idle in this
fold.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

import torch
from torch import Tensor

from gnnpar.comm import CodedExchange, Communicator, Incoming, MessageTag, Outgoing, Posted, RowLike, RowLists
from gnnpar.folds.aggregator import Aggregator
from gnnpar.folds.block import Block, Operands, Rows
from gnnpar.folds.edge_data import EdgeData
from gnnpar.parallel.blocks import fold_block
from gnnpar.parallel.edges import Edges, in_edges
from gnnpar.parallel.torch_types import Context, apply_to_rows
from gnnpar.parallel.view import View
from gnnpar.partition.shard import Shard

How = Literal["columns", "heads", "values"]


@dataclass(frozen=True)
class Slices:
    """Ranks share the indices [0, width) of one dimension of an operand; the first ranks have one more if P does not
    divide it. `whole`: positions of the operands (sources, then destinations) that every rank with a share reads whole.
    """

    how: How
    width: int
    ranks: int
    whole: frozenset[int] = frozenset()

    def span(self, rank: int) -> tuple[int, int]:
        """Return [first, last) of a rank; equal if it is idle."""
        size, more = divmod(self.width, self.ranks)
        first = rank * size + min(rank, more)
        return first, first + size + (rank < more)

    def works(self, rank: int) -> bool:
        first, last = self.span(rank)
        return last > first

    @property
    def classes(self) -> list[list[int]]:
        """Return the working ranks, grouped by the width of their shares."""
        size, more = divmod(self.width, self.ranks)
        found = [list(range(more)), list(range(more, self.ranks)) if size else []]
        return [members for members in found if members]

    @property
    def dim(self) -> int:
        return -1 if self.how == "values" else 1

    def rows(self, rows: Rows, rank: int) -> Rows:
        """Return a rank's slice of these operands: [n, ...] each."""
        return tuple(self.of(t, rank) if i not in self.whole else t for i, t in enumerate(rows))

    def of(self, t: Tensor, rank: int) -> Tensor:
        """Return a rank's share of one operand or of the result. Columns count in the flattened row."""
        first, last = self.span(rank)
        flat = t.flatten(1) if self.how == "columns" else t
        return flat.narrow(self.dim, first, last - first)

    def shared(self, shared: Rows, rank: int) -> Rows:
        """Return a rank's share of replicated tensors with heads in dimension 0."""
        first, last = self.span(rank)
        return tuple(t[first:last] for t in shared) if self.how == "heads" else shared

    def like(self, like: Sequence[RowLike], rank: int) -> tuple[RowLike, ...]:
        """Return `rows` of operands of these shapes."""
        return RowLike.of(self.rows(tuple(each.empty(0) for each in like), rank))


def slices_of(agg: Aggregator, src: Sequence[RowLike], num_dst: int, ranks: int, layer: int) -> Slices:
    """Return the slices of a fold. Raises ValueError if it is not separable. `num_dst`: operands of destinations."""
    if agg.separates == "columns":
        return Slices("columns", src[0].width, ranks)
    heads = src[0].shape[0] if src[0].shape else 0
    if agg.separates == "heads" and (heads >= ranks or not agg.separates_values):
        return Slices("heads", heads, ranks)
    if agg.separates_values:
        return Slices("values", src[0].shape[-1], ranks, frozenset(range(1, len(src) + num_dst)))
    raise ValueError(
        f"strategy=feature divides the columns or heads of a fold over ranks, but {type(agg).__name__} of layer "
        f"{layer} separates by neither: use strategy=graph_parallel or sar, or world_size=1"
    )


@dataclass(frozen=True, eq=False)
class Structure:
    """The whole graph, as every rank holds it. Shapes: block [N, N]; ids[p]: [N_p] nodes of part p, ascending."""

    block: Block
    ids: tuple[Tensor, ...]

    @property
    def nbytes(self) -> int:
        return sum(held.nbytes for held in (self.block, *self.ids))


def structure_of(shard: Shard, comm: Communicator, *, edge_ids: bool) -> Structure:
    """Return the structure of all parts. Collective. Not counted, as part of the set-up. Edges are in the order of
    (destination, source)."""
    everyone = comm.all_gather((in_edges(shard, ids=edge_ids), shard.node_ids.cpu()))
    src, dst, data = Edges.cat([edges for edges, _ in everyone])
    order = torch.argsort(dst * shard.num_nodes + src, stable=True) if data.ids is None else data.ids.argsort()
    block = Block.from_edges(
        dst[order],
        src[order],
        num_dst=shard.num_nodes,
        num_src=shard.num_nodes,
        src_ids=torch.arange(shard.num_nodes),
        edges=data.at(order),
    )
    return Structure(block.to(comm.device), tuple(ids.to(comm.device) for _, ids in everyone))


def row_lists(structure: Structure, me: int) -> tuple[RowLists, RowLists]:
    """Return the lists of `columns`, by which a rank sends its rows to all others, and of `home`, by which it sends
    results."""
    ids, own_ids = structure.ids, structure.ids[me]
    others = [p for p in range(len(ids)) if p != me]
    every = torch.arange(len(own_ids), device=own_ids.device)
    nodes = torch.arange(structure.block.num_dst, device=own_ids.device)
    other_ids = {p: ids[p] for p in others}
    columns = RowLists(me, len(ids), own_ids, dict.fromkeys(others, every), other_ids)
    return columns, RowLists(me, len(ids), nodes, other_ids, dict.fromkeys(others, own_ids))


@dataclass(eq=False)
class FeatureGraph(View):
    """A rank's rows, folded by all ranks together."""

    structure: Structure = field(kw_only=True)
    columns: CodedExchange = field(kw_only=True)
    home: CodedExchange = field(kw_only=True)

    @property
    def comm(self) -> Communicator:
        return self.columns.comm

    @property
    def rank(self) -> int:
        return self.columns.comm.rank

    @property
    def ranks(self) -> int:
        return self.columns.comm.size

    @property
    def peers(self) -> list[int]:
        """Return the other ranks, the next one first: at any time each sends to a different one."""
        return [(self.rank + step) % self.ranks for step in range(1, self.ranks)]

    @property
    def own_ids(self) -> Tensor:
        """Return the global ids [N_P] of this rank's rows, which are their positions in a table."""
        return self.structure.ids[self.rank]

    def fold(self, agg: Aggregator, call: int, src: Rows, dst: Rows, edge: Rows, shared: Rows) -> Tensor:
        if self.ranks == 1:
            return fold_block(agg, self.shard.inner, src, dst, edge, shared)
        slices = slices_of(agg, RowLike.of(src), len(dst), self.ranks, self.layer)
        if edge:
            raise ValueError(
                f"strategy=feature folds all edges on every rank, but the rows of edges that {type(agg).__name__} of "
                f"layer {self.layer} reads lie on the ranks of their destinations: use strategy=graph_parallel or sar"
            )
        x, home = Operands(src, dst, (), shared), replace(slices, whole=frozenset())
        result = _result_like(agg, x)._replace(dtype=src[0].dtype)
        columns = _AllToAll(self, self.columns, slices, call, RowLike.of((*src, *dst)))
        tables = apply_to_rows(_Moved, columns, True, *src, *dst)
        if slices.works(self.rank):
            mine = slices.shared(shared, self.rank)
            results = fold_block(agg, self.structure.block, tables[: len(src)], tables[len(src) :], (), mine)
        else:  # nothing; its gradient takes part in the exchanges of backward
            results = torch.cat([t.flatten()[:0].to(result.dtype) for t in (*tables, *shared)])
        return apply_to_rows(_Moved, _AllToAll(self, self.home, home, call, (result,)), False, results)[0]


@dataclass(frozen=True, eq=False)
class _AllToAll:
    """An exchange of the operands `like`, in both directions: whole rows of some nodes <-> a rank's share of all rows.

    In forward, the codec knows the rows by their lists.
    """

    view: FeatureGraph
    exchange: CodedExchange
    slices: Slices
    call: int
    like: tuple[RowLike, ...]

    def only(self, wanted: Sequence[int]) -> _AllToAll:
        """Return the exchange of some of the operands."""
        whole = frozenset(n for n, i in enumerate(wanted) if i in self.slices.whole)
        return replace(self, slices=replace(self.slices, whole=whole), like=tuple(self.like[i] for i in wanted))

    def gather(self, rows: Rows, *, forward: bool) -> Rows:
        """Return this rank's share of all rows: operands [N_P, ...] -> tables [N, ...], without rows if it is idle."""
        view, slices, ids = self.view, self.slices, self.view.structure.ids
        every = torch.arange(len(view.own_ids), device=view.own_ids.device) if forward else None
        outgoing = {
            q: Outgoing(tuple(t.contiguous() for t in slices.rows(rows, q)), every)
            for q in view.peers
            if slices.works(q)
        }
        works = slices.works(view.rank)
        incoming = {p: Incoming(len(ids[p])) for p in view.peers} if works else {}
        like = slices.like(RowLike.of(rows), view.rank)
        posted = self.exchange.post(outgoing, incoming, like, self._tag(forward))
        if not works:
            return tuple(t.new_empty(0) for t in rows)
        tables = tuple(each.empty(view.shard.num_nodes) for each in like)
        for p, part in ((view.rank, slices.rows(rows, view.rank)), *self.exchange.take_all(posted)):
            for table, got in zip(tables, part, strict=True):
                table[ids[p]] = got
        return tables

    def give_back(self, tables: Rows, *, forward: bool) -> Rows:
        """Return the local rows from the shares of all working ranks: tables [N, ...] -> [N_P, ...]. Gradients of an
        operand that ranks read whole add up, in the order of ranks."""
        view, slices, ids = self.view, self.slices, self.view.structure.ids
        posts: list[Posted] = []
        shares: dict[int, Rows] = {}
        for members in slices.classes:  # ranks with equally wide shares: a message has one shape
            outgoing: dict[int, Outgoing] = {}
            if view.rank in members:
                shares[view.rank] = tuple(t[view.own_ids] for t in tables)
                for p in view.peers:
                    outgoing[p] = Outgoing(tables, ids[p]) if forward else Outgoing(tuple(t[ids[p]] for t in tables))
            incoming = {q: Incoming(len(view.own_ids)) for q in view.peers if q in members}
            posts.append(self.exchange.post(outgoing, incoming, slices.like(self.like, members[0]), self._tag(forward)))
        for posted in posts:
            shares.update(self.exchange.take_all(posted))
        total = tuple((each if forward else each.widened).empty(len(view.own_ids)).zero_() for each in self.like)
        for q, rows in sorted(shares.items()):
            for i, (mine, got) in enumerate(zip(slices.rows(total, q), rows, strict=True)):
                mine.add_(got) if i in slices.whole else mine.copy_(got)
        return total

    def _tag(self, forward: bool) -> MessageTag:
        return self.view.message_tag(self.call, "forward" if forward else "backward")


class _Kept(Context):
    exchange: _AllToAll
    gathers: bool


class _Moved(torch.autograd.Function):
    """`gather` or `give_back`. The gradient of each takes the way of the other."""

    @staticmethod
    def forward(ctx: _Kept, exchange: _AllToAll, gathers: bool, *rows: Tensor) -> Rows:
        ctx.exchange, ctx.gathers = exchange, gathers
        moved = (exchange.gather if gathers else exchange.give_back)(rows, forward=True)
        ctx.mark_non_differentiable(*(t for t, asked in zip(moved, ctx.needs_input_grad[2:], strict=True) if not asked))
        return moved

    @staticmethod
    def backward(ctx: _Kept, *grads: Tensor) -> tuple[Tensor | None, ...]:
        asked = ctx.needs_input_grad[2:]
        wanted = [i for i, each in enumerate(asked) if each]
        exchange = ctx.exchange.only(wanted)
        moved = (exchange.give_back if ctx.gathers else exchange.gather)(tuple(grads[i] for i in wanted), forward=False)
        found = iter(moved)
        return (None, None, *(next(found) if each else None for each in asked))


@torch.no_grad()
def _result_like(agg: Aggregator, x: Operands) -> RowLike:
    """Return the shape of the whole result's rows, taken from a node without edges."""
    one = x._replace(src=tuple(t.new_zeros(1, *t.shape[1:]) for t in x.src))
    one = one._replace(dst=tuple(t.new_zeros(1, *t.shape[1:]) for t in x.dst))
    none = torch.zeros(0, dtype=torch.long, device=x.src[0].device)
    first = torch.zeros(1, dtype=torch.long, device=none.device)
    alone = Block(
        none.new_zeros(2).int(), none.int(), 1, 1, src_ids=first, edges=EdgeData(ids=none)
    )  # from_edges would wait
    out, _ = agg.finish(agg.update(agg.init(1, one), alone, one))
    return RowLike.of((out,))[0]
