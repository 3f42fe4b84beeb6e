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
from gnnpar.parallel.blocks import split_operands
from gnnpar.parallel.edges import Edges, in_edges
from gnnpar.parallel.torch_types import Context, apply
from gnnpar.parallel.view import View
from gnnpar.parallel.whole import fold_block
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


Counts = tuple[int, int]  # operands of sources, of destinations


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
        return apply(_FeatureFold, self, agg, slices, call, (len(src), len(dst)), *src, *dst, *shared)

    def gathered(
        self, exchange: CodedExchange, slices: Slices, rows: Rows, tag: MessageTag, index: Tensor | None = None
    ) -> Rows:
        """Return this rank's share of all rows: operands [N_P, ...] -> tables [N, ...], without rows if it is idle.

        `index`: of all rows of this rank, for a codec that looks up their nodes.
        """
        ids = self.structure.ids
        outgoing = {
            q: Outgoing(tuple(t.contiguous() for t in slices.rows(rows, q)), index)
            for q in self.peers
            if slices.works(q)
        }
        works = slices.works(self.rank)
        incoming = {p: Incoming(len(ids[p])) for p in self.peers} if works else {}
        like = slices.like(RowLike.of(rows), self.rank)
        posted = exchange.post(outgoing, incoming, like, tag)
        if not works:
            return ()
        tables = tuple(each.empty(self.shard.num_nodes) for each in like)
        for p, part in ((self.rank, slices.rows(rows, self.rank)), *exchange.take_all(posted)):
            for table, got in zip(tables, part, strict=True):
                table[ids[p]] = got
        return tables

    def shares(
        self,
        exchange: CodedExchange,
        slices: Slices,
        tables: Rows,
        like: Sequence[RowLike],
        tag: MessageTag,
        *,
        listed: bool,
    ) -> dict[int, Rows]:
        """Return every working rank's share of the local rows, by rank in ascending order: tables [N, ...] -> [N_P,
        ...].

        `like`: the operands of which the tables are shares. `listed`: the codec knows the rows by their lists.
        """
        ids = self.structure.ids
        posts: list[Posted] = []
        shares: dict[int, Rows] = {}
        for members in slices.classes:  # ranks with equally wide shares: a message has one shape
            outgoing: dict[int, Outgoing] = {}
            if self.rank in members:
                shares[self.rank] = tuple(t[self.own_ids] for t in tables)
                for p in self.peers:
                    outgoing[p] = Outgoing(tables, ids[p]) if listed else Outgoing(tuple(t[ids[p]] for t in tables))
            incoming = {q: Incoming(len(self.own_ids)) for q in self.peers if q in members}
            posts.append(exchange.post(outgoing, incoming, slices.like(like, members[0]), tag))
        for posted in posts:
            shares.update(exchange.take_all(posted))
        return dict(sorted(shares.items()))


class _Kept(Context):
    view: FeatureGraph
    agg: Aggregator
    slices: Slices
    call: int
    counts: Counts
    num_kept: int
    like: tuple[RowLike, ...]
    shared: tuple[torch.Size, ...]


class _FeatureFold(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: _Kept, view: FeatureGraph, agg: Aggregator, slices: Slices, call: int, counts: Counts, *flat: Tensor
    ) -> Tensor:
        x, tag = split_operands((*counts, 0), flat), view.message_tag(call, "forward")
        every = torch.arange(len(view.own_ids), device=view.own_ids.device)
        tables = view.gathered(view.columns, slices, (*x.src, *x.dst), tag, every)
        operands, results, saved = Operands(()), (), ()
        if slices.works(view.rank):
            operands = Operands(tables[: counts[0]], tables[counts[0] :], (), slices.shared(x.shared, view.rank))
            block = view.structure.block
            result, saved = agg.finish(agg.update(agg.init(block.num_dst, operands), block, operands))
            results = (result,)
        like = _result_like(agg, x)._replace(dtype=x.src[0].dtype)
        out = like.empty(len(view.own_ids))
        home = replace(slices, whole=frozenset())
        for q, (rows,) in view.shares(view.home, home, results, (like,), tag, listed=True).items():
            home.of(out, q).copy_(rows)
        kept = [t for group in operands for t in group] if agg.needs_src else []
        ctx.view, ctx.agg, ctx.slices, ctx.call, ctx.counts, ctx.num_kept = view, agg, slices, call, counts, len(kept)
        ctx.like, ctx.shared = RowLike.of((*x.src, *x.dst)), tuple(t.shape for t in x.shared)
        ctx.save_for_backward(*kept, *saved)
        return out

    @staticmethod
    def backward(ctx: _Kept, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        (grad_out,) = grad_outputs
        view, agg, slices, (num_src, num_dst) = ctx.view, ctx.agg, ctx.slices, ctx.counts
        asked, tag = ctx.needs_input_grad[5:], view.message_tag(ctx.call, "backward")
        kept, saved = ctx.saved_tensors[: ctx.num_kept], ctx.saved_tensors[ctx.num_kept :]
        home = replace(slices, whole=frozenset())
        wanted = [i for i in range(num_src + num_dst) if asked[i]]
        tables, shared = (), [grad_out.new_zeros(shape) for shape in ctx.shared]
        received = view.gathered(view.home, home, (grad_out,), tag)
        if received:
            (own_ids,) = received
            prepared = agg.prepare(saved, own_ids)
            operands = split_operands((num_src, num_dst, 0), kept)
            grads = agg.grad(view.structure.block, operands, prepared, own_ids)
            every = (*grads.src, *(grads.dst or agg.grad_dst(prepared, own_ids)))
            tables = tuple(every[i] for i in wanted)
            for total, part in zip(slices.shared(tuple(shared), view.rank), grads.shared, strict=False):
                total.copy_(part)
        part_of = replace(slices, whole=frozenset(n for n, i in enumerate(wanted) if i in slices.whole))
        like = [ctx.like[i] for i in wanted]
        totals = [each.widened.empty(len(view.own_ids)).zero_() for each in like]
        if wanted:
            for q, rows in view.shares(view.columns, part_of, tables, like, tag, listed=False).items():
                for total, into, got in zip(totals, part_of.rows(tuple(totals), q), rows, strict=True):
                    into.add_(got) if into is total else into.copy_(got)
        flat: list[Tensor | None] = [None] * (num_src + num_dst)
        for i, total in zip(wanted, totals, strict=True):
            flat[i] = total
        return (None, None, None, None, None, *flat, *(g for g in shared))


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
