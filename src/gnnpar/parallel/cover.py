"""halo=cover: the halo rows that travel, and the destinations that are folded at their sources.

Every rank finds the covers of its own in-edges (`gnnpar.folds.cover`) and tells the owners of their sources which
edges to fold. So ranks share the work, and a graph from shards on disk needs nothing else.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from gnnpar.comm import CodedExchange, Communicator, Incoming, MessageTag, Outgoing, Posted, RowLike, RowLists
from gnnpar.comm.clock import perf_counter
from gnnpar.comm.rows import PartEdges
from gnnpar.files import JsonDict
from gnnpar.folds.aggregator import Aggregator
from gnnpar.folds.block import Block, Operands, Rows
from gnnpar.folds.cover import least_cover
from gnnpar.folds.edge_data import EdgeData
from gnnpar.folds.mergeable import Merging
from gnnpar.models.gnn import GNN
from gnnpar.parallel.edges import EdgeOrder, Overlap, exchange_edges
from gnnpar.parallel.row_bytes import RowBytes
from gnnpar.parallel.shape_trace import shape_trace
from gnnpar.parallel.torch_types import floats, unique
from gnnpar.partition.shard import Shard

Exchanges = tuple[CodedExchange, CodedExchange, CodedExchange]
"""Of rows under a cover, of partial rows and their gradients, and of destinations' rows, exactly."""
PARTIAL = 64
"""Added to the number of an aggregation in the tags of partial rows: their bits and noise are their own."""


@dataclass(frozen=True, eq=False)
class Cover:
    """A rank's part of a cover.

    `edges`: of the part with the halo rows that travel alone. `block`: edges folded here for other ranks; its sources
    are the rows of this part, its destinations the partial rows of all readers, reader by reader (one unused row if
    there is none). `into`: owner -> the inner rows of its partial rows, ascending; pairs row * types + type if types
    are not 0. `lists`: of partial rows, with ids distinct from node ids; each is read by one destination, with weight
    1. `linear`: for linear folds alone.
    """

    edges: EdgeOrder
    block: Block
    into: Mapping[int, Tensor]
    lists: RowLists
    linear: bool = False

    @property
    def nbytes(self) -> int:
        """Return the bytes of structure in addition to the shard's."""
        shard, of = self.edges.shard, self.lists
        lists = of.node_ids, *of.sent.values(), *of.read.values(), *self.into.values(), *shard.boundary.values()
        return sum(each.nbytes for each in (self.block, *shard.halo.values(), *lists))


def make_covers(
    shard: Shard, model: GNN, rows: RowBytes, comm: Communicator, overlap: Overlap
) -> tuple[dict[int, Cover], JsonDict, bool]:
    """Return the covers that a strategy with these bytes of rows takes, by types of partial rows, their facts over all
    ranks, and whether folds remain that none splits. Collective."""
    covers: dict[int, Cover] = {}
    if rows.halo == "rows" or comm.size == 1 or not rows.sends:
        return covers, {}, True
    began = perf_counter()
    uses = shape_trace(model, shard)
    rows = replace(rows, number=uses[0].src[0].dtype.itemsize) if uses else rows
    counts = torch.zeros(3, dtype=torch.float64)  # all halo rows, halo rows to send, partial rows
    for types, weights in rows.weights([use.fold for use in uses]).items():
        cover = make_cover(shard, comm, weights, types=types, overlap=overlap)
        halo = [sum(each.num_halo.values()) for each in (shard, cover.edges.shard)]
        mine = torch.tensor([*halo, sum(map(len, cover.into.values()))], dtype=torch.float64)
        found = comm.all_reduce(mine.to(comm.device)).cpu()
        if rows.pays(floats(found), weights):
            covers[types] = replace(cover, linear=rows.linear)
            counts += found
    names = ("cover/halo_rows", "cover/rows", "cover/partial_rows")
    facts: JsonDict = {name: int(count) for name, count in zip(names, counts, strict=True)}
    rest = any(rows.types_of(use.fold) not in covers for use in uses)
    return covers, {**facts, "time/cover_seconds": perf_counter() - began} if covers else {}, rest


def make_cover(
    shard: Shard, comm: Communicator, weights: tuple[int, int], *, types: int = 0, overlap: Overlap = "edges"
) -> Cover:
    """Find the least cover of this rank's halo blocks, and exchange with its peers the edges that they fold.
    Collective."""
    kept, into, read_ids = dict[int, Tensor](), dict[int, Tensor](), dict[int, Tensor]()
    messages, read, of_each = dict[int, dict[str, Tensor]](), dict[int, Block](), max(1, types)
    for q in sorted(shard.halo):
        block = shard.halo[q]
        pair = block.edge_dst * of_each + (block.types if types and block.types is not None else 0)
        there = least_cover(pair, block.indices, weights)
        kept[q] = ~there
        at, number = unique(pair[there])
        order = torch.argsort(number, stable=True)
        ids = shard.node_ids[at // of_each] * of_each + at % of_each + shard.num_nodes
        edges = block.edges.at(there).at(order)
        messages[q] = (replace(edges, type=None) if types else edges).tensors
        messages[q] |= {"columns": unique(block.indices[kept[q]].long())[0], "partial": ids}
        messages[q] |= {"dst": number[order], "src": block.indices[there][order].long()}
        if len(at):
            into[q], read_ids[q] = at, ids
            ends = at // of_each, torch.arange(len(at), device=at.device)
            read[q] = Block.from_edges(*ends, num_dst=shard.num_inner, num_src=len(at), compress=True)
    received = exchange_edges(comm, messages)
    boundary = {p: shard.boundary[p][columns] for p, each in received.items() if len(columns := each.pop("columns"))}
    block, sent, ids = _fold_locally(shard, received)
    edges = PartEdges(shard.inner, read, shard.in_degree, shard.in_degree.new_ones(sum(map(len, into.values()))))
    lists = RowLists(shard.part, shard.parts, ids, sent, read_ids, edges)
    return Cover(EdgeOrder(shard.narrowed(kept, boundary), overlap), block, into, lists)


def _fold_locally(shard: Shard, received: Mapping[int, dict[str, Tensor]]) -> tuple[Block, dict[int, Tensor], Tensor]:
    """Return the block of edges folded for others, reader -> its partial rows, and the ids of the partial rows."""
    none, start, sent = shard.node_ids[:0], 0, dict[int, Tensor]()
    dst, src, ids, edges = [none], [none], [none], list[EdgeData]()
    for p, each in received.items():
        ids.append(each.pop("partial"))
        dst.append(each.pop("dst") + start)
        src.append(shard.boundary[p][each.pop("src")])
        edges.append(EdgeData(**each))
        if count := len(ids[-1]):
            sent[p] = torch.arange(start, start + count, device=none.device)
        start += count
    if not sent:  # an inner edge, so that a user's functions are not called for no edge at all
        first = none.new_zeros(1 if shard.inner.num_edges else 0)
        dst, src, edges = [first], [shard.inner.indices[first].long()], [shard.inner.edges.at(first)]
    ends, edge_data = (torch.cat(dst), torch.cat(src)), EdgeData.cat(edges)
    block = Block.from_edges(*ends, num_dst=max(1, start), num_src=shard.num_inner, edges=edge_data)
    return replace(block, src_ids=shard.node_ids, ascends=shard.inner.ascends), sent, torch.cat(ids)


@dataclass(eq=False)
class SourceFold:
    """One aggregation under a cover. `fold`: at the sources. `partial`: exchange of partial rows and their gradients;
    `exact`: of destinations' rows.

    Forward: `ask`, `send`, `merge`. Backward: `send_back`, `backward`, `add_returned`. Every rank calls all of
    them, in this order. Autograd keeps the rows that backward reads, from `merge` to `saved`.
    """

    cover: Cover
    fold: Aggregator
    merging: Merging
    partial: CodedExchange
    exact: CodedExchange
    _posted: Posted | None = None
    _folded: Rows = ()  # from send to merge: destinations' rows, and what `finish` saved
    _num_dst: int = 0
    _num_folded: int = 0
    _like: tuple[RowLike, ...] = ()

    def ask(self, dst: Rows, tag: MessageTag) -> Posted | None:
        """Send the destinations' rows to the ranks that fold them, if the fold reads any."""
        outgoing = {q: Outgoing(dst, at) for q, at in self.cover.into.items()}
        incoming = {p: Incoming(len(at)) for p, at in self.cover.lists.sent.items()}
        return self.exact.post(outgoing, incoming, RowLike.of(dst), tag) if dst else None

    def send(self, x: Operands, asked: Posted | None, tag: MessageTag) -> None:
        """Fold for other ranks and send the results."""
        block, fold = self.cover.block, self.fold
        dst = () if asked is None else self._table(asked, self.exact)
        there = x._replace(dst=dst)
        result, saved = fold.finish(fold.update(fold.init(block.num_dst, there), block, there))
        rows = self.merging.partial(result, saved, x.src[0].dtype)
        self._folded, self._num_dst, self._num_folded = (*dst, *saved), len(dst), len(dst) + len(saved)
        self._like = RowLike.of(rows)
        self._posted = self._to_readers(self.partial, rows, self._like, tag._replace(call=tag.call + PARTIAL))

    def merge(self, state: Rows) -> tuple[Rows, Rows]:
        """Merge all partial rows. Return (the state, the rows that backward reads)."""
        posted, kept, into = self._posted, self._folded, self.cover.into
        assert posted is not None
        for q in sorted(into):
            rows = self.partial.take(posted, q)
            state = self.merging.merge(state, into[q], rows)
            kept += rows[1:]
        self._folded, self._posted = (), None
        return state, kept

    def send_back(self, saved: Rows, prepared: Rows, grad_out: Tensor, tag: MessageTag) -> Posted:
        """Send the gradients of the received partial rows to the ranks that folded them."""
        into, merging = self.cover.into, self.merging
        exact, each = saved[self._num_folded :], len(self._like) - 1
        rows_of = {q: exact[i * each : (i + 1) * each] for i, q in enumerate(sorted(into))}
        outgoing = {q: Outgoing(merging.grad_partial(rows_of[q], at, prepared, grad_out)) for q, at in into.items()}
        nothing = tuple(like.empty(0) for like in self._like[1:])
        none = torch.zeros(0, dtype=torch.int64, device=grad_out.device)
        first, *rest = RowLike.of(merging.grad_partial(nothing, none, prepared, grad_out))
        like = first._replace(dtype=self._like[0].dtype), *rest
        incoming = {p: Incoming(len(at)) for p, at in self.cover.lists.sent.items()}
        return self.partial.post(outgoing, incoming, like, tag._replace(call=tag.call + PARTIAL))

    def backward(self, saved: Rows, x: Operands, posted: Posted, tag: MessageTag) -> tuple[Operands, Posted | None]:
        """Differentiate the partial rows folded here. Return (gradients of sources, edges and shared rows; the posted
        gradients of destinations)."""
        dst, mine = saved[: self._num_dst], saved[self._num_dst : self._num_folded]
        prepared, grad_out = self.merging.prepare_partial(mine, self._table(posted, self.partial))
        grads = self.fold.grad(self.cover.block, x._replace(dst=dst), prepared, grad_out)
        if not dst:
            return grads, None
        rows = grads.dst or self.fold.grad_dst(prepared, grad_out)
        like = tuple(each._replace(dtype=grad.dtype) for each, grad in zip(RowLike.of(dst), rows, strict=True))
        return grads._replace(dst=()), self._to_readers(self.exact, rows, like, tag)

    def add_returned(self, dst: Rows, returned: Posted) -> None:
        """Add the gradients of destinations that other ranks have computed."""
        into = self.cover.into
        for q in sorted(into):
            for total, rows in zip(dst, self.exact.take(returned, q), strict=True):
                total.index_add_(0, into[q], rows.to(total.dtype))

    def _to_readers(self, exchange: CodedExchange, rows: Rows, like: Sequence[RowLike], tag: MessageTag) -> Posted:
        outgoing = {p: Outgoing(rows, at) for p, at in self.cover.lists.sent.items()}
        incoming = {q: Incoming(len(at)) for q, at in self.cover.into.items()}
        return exchange.post(outgoing, incoming, like, tag)

    def _table(self, posted: Posted, exchange: CodedExchange) -> Rows:
        """Return the rows of all readers in the order of `cover.block`, zeros for missing ones."""
        table = tuple(each.empty(self.cover.block.num_dst).zero_() for each in posted.like)
        for p, at in self.cover.lists.sent.items():
            if p in posted.incoming:
                for into, rows in zip(table, exchange.take(posted, p), strict=True):
                    into[at] = rows
        return table
