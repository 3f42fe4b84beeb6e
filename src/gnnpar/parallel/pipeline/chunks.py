"""The rows and edges of one part, chunk by chunk, and which rows are fresh in the order of an epoch.

A table of T rows holds the owned rows, chunk by chunk, then the halo rows by part and chunk. An aggregation reads two
tables: rows of chunks at an earlier slot, or the same, come from this epoch's (fresh), the others from the history.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate, pairwise
from typing import Literal

import torch
from torch import Tensor

from gnnpar.comm import Communicator, Incoming, RowLists
from gnnpar.folds.block import Block, cached_results, chosen, held_nbytes, per_argument
from gnnpar.folds.edge_data import EdgeData
from gnnpar.parallel.local import to_device
from gnnpar.parallel.torch_types import integers, unique
from gnnpar.partition.shard import Shard
from gnnpar_kernels import Csr, fold_key


@dataclass(frozen=True)
class RowRange:
    """Rows [first, last) of the table."""

    first: int
    last: int

    @property
    def rows(self) -> slice:
        return slice(self.first, self.last)

    def __len__(self) -> int:
        return self.last - self.first


@dataclass(frozen=True, eq=False)
class Chunks:
    """The structure that is the same in every epoch. Edges are sorted by (destination, source id).

    Shapes: order [N] own rows of the shard in table order, in_degree, in_weight [N], type_degree [N, types] in this
    order; chunk_of, ids [T]: chunk and global id of each table row; dst, src [E]: table rows of the ends of each edge,
    `held`: its data. bounds: part -> first table row of each of its chunks, and the end; sent: reader -> own table rows
    that it reads, ascending; halo_rows: part -> table rows of its halo nodes, by ascending id.
    """

    num: int
    part: int
    order: Tensor
    in_degree: Tensor
    chunk_of: Tensor
    ids: Tensor
    bounds: dict[int, list[int]]
    sent: dict[int, Tensor]
    halo_rows: dict[int, Tensor]
    dst: Tensor
    src: Tensor
    held: EdgeData
    in_weight: Tensor | None = None
    type_degree: Tensor | None = None

    @staticmethod
    def of(shard: Shard) -> Chunks:
        assert shard.chunk_of is not None
        assert shard.halo_chunk_of is not None
        num, halo = shard.num_chunks, dict(sorted(shard.halo.items()))
        halo_chunks = torch.split(shard.halo_chunk_of, [block.num_src for block in halo.values()])
        chunks_of = {shard.part: shard.chunk_of, **dict(zip(halo, halo_chunks, strict=True))}
        blocks = {shard.part: shard.inner, **halo}
        order, places = dict[int, Tensor](), dict[int, Tensor]()
        bounds, base = dict[int, list[int]](), 0
        for p, chunk_of in chunks_of.items():
            order[p] = torch.argsort(chunk_of, stable=True)
            rows = torch.arange(base, base + len(chunk_of), device=chunk_of.device)
            places[p] = torch.empty_like(order[p]).index_copy_(0, order[p], rows)
            bounds[p] = list(accumulate(integers(torch.bincount(chunk_of, minlength=num)), initial=base))
            base = bounds[p][-1]
        own = places[shard.part]
        ids = torch.cat([_ids(shard, p)[order[p]] for p in order])
        dst = torch.cat([own[block.edge_dst] for block in blocks.values()])
        src = torch.cat([places[p][block.indices.long()] for p, block in blocks.items()])
        by = torch.argsort(dst * shard.num_nodes + ids[src], stable=True)
        return Chunks(
            num=num,
            part=shard.part,
            order=order[shard.part],
            in_degree=shard.in_degree[order[shard.part]],
            chunk_of=torch.cat([chunks_of[p][order[p]] for p in order]),
            ids=ids,
            bounds=bounds,
            sent={p: own[index].sort().values for p, index in sorted(shard.boundary.items())},
            halo_rows={p: places[p] for p in halo},
            dst=dst[by],
            src=src[by],
            held=EdgeData.cat([block.edges for block in blocks.values()]).at(by),
            in_weight=chosen(shard.in_weight, order[shard.part]),
            type_degree=chosen(shard.type_degree, order[shard.part]),
        )

    @property
    def num_rows(self) -> int:
        """T."""
        return len(self.chunk_of)

    @property
    def num_own(self) -> int:
        """N."""
        return len(self.order)

    @property
    def peers(self) -> list[int]:
        """Other parts with rows that this part reads."""
        return sorted(self.halo_rows)

    def span(self, part: int, chunk: int) -> RowRange:
        """Return the table rows of a chunk of a part."""
        return RowRange(*self.bounds[part][chunk : chunk + 2])

    def own(self, chunk: int) -> RowRange:
        return self.span(self.part, chunk)

    @cached_property
    def offsets(self) -> Tensor:
        """[N + 1]: where the edges of each own row begin."""
        return _offsets(self.dst, self.num_own)

    @property
    def _starts(self) -> Tensor:
        """[K + 1]: first own row of each chunk, and the end."""
        return torch.tensor(self.bounds[self.part], device=self.order.device)

    @cached_property
    def edge_bounds(self) -> list[int]:
        """Where the edges of each chunk begin, and the end."""
        return integers(self.offsets[self._starts])

    def edges(self, chunk: int) -> slice:
        return slice(self.edge_bounds[chunk], self.edge_bounds[chunk + 1])

    def indptr(self, chunk: int) -> Tensor:
        return _pointers(self.offsets, self.own(chunk)).to(self.index_type)

    @property
    def index_type(self) -> torch.dtype:
        return torch.int32 if max(len(self.src), 2 * self.num_rows) < 2**31 else torch.int64

    @cached_property
    def by_source(self) -> Tensor:
        """The edges in the order of their source's table row."""
        return torch.argsort(self.src, stable=True)

    @cached_property
    def held_by_source(self) -> EdgeData:
        """Weights and types, in the order of `by_source`."""
        return replace(self.held, ids=None).at(self.by_source)

    @cached_property
    def out_edges(self) -> tuple[Tensor, list[int]]:
        """[T + 1]: where the edges of each source begin in `by_source`; and the same on the host."""
        offsets = _offsets(self.src[self.by_source], self.num_rows)
        return offsets, integers(offsets)

    @per_argument
    def out_indptr(self, span: RowRange) -> Tensor:
        """Return the row pointers of all out-edges of some table rows."""
        return _pointers(self.out_edges[0], span).to(self.index_type)

    @per_argument
    def parts(self, chunk: int) -> tuple[tuple[Block, Tensor | slice], ...]:
        """Return the in-edges of a chunk without columns and data, and their places in it: all of them, or with other
        parts those from this part's rows and those from theirs."""
        src = self.src[self.edges(chunk)]
        block = Block(self.indptr(chunk), src, len(self.own(chunk)), self.num_rows)
        found: tuple[tuple[Block, Tensor | slice], ...] = ((block, slice(None)),)
        if self.peers:
            own = src < self.num_own
            found = tuple((block.restrict(keep), keep.nonzero().flatten()) for keep in (own, ~own))
        return tuple((replace(part, indices=src[:0]), places) for part, places in found)

    @per_argument
    def compact(self, chunk: int) -> tuple[Block, Tensor]:
        """Return the in-edges of a chunk, columns numbered by ascending id, and the table row of each column."""
        src = self.src[self.edges(chunk)]
        columns, inverse = unique(self.ids[src])
        rows = torch.empty_like(columns)
        rows[inverse] = src
        indptr, indices, edges = self.indptr(chunk), inverse.to(self.index_type), self.held.at(self.edges(chunk))
        block = Block(indptr, indices, len(self.own(chunk)), len(columns), src_ids=columns, edges=edges)
        return block, rows

    @cached_property
    def outgoing(self) -> tuple[dict[int, tuple[Tensor, int]], ...]:
        """By chunk: reader -> rows of the chunk that it reads, and where they begin in the list of all that it
        reads."""
        found = tuple(dict[int, tuple[Tensor, int]]() for _ in range(self.num))
        for p, rows in self.sent.items():
            for k, (first, last) in enumerate(pairwise(integers(torch.searchsorted(rows, self._starts)))):
                if first < last:
                    found[k][p] = rows[first:last] - self.own(k).first, first
        return found

    @cached_property
    def incoming(self) -> tuple[dict[int, Incoming], ...]:
        """By chunk: part -> rows of its chunk that are read here, and where they begin among all of them."""
        spans = ({p: self.span(p, k) for p in self.peers} for k in range(self.num))
        return tuple(
            {p: Incoming(len(span), span.first - self.bounds[p][0]) for p, span in each.items() if len(span)}
            for each in spans
        )

    def row_lists(self, parts: int) -> RowLists:
        """Return the rows between parts, both lists in table order."""
        read = {p: self.ids[self.bounds[p][0] : self.bounds[p][-1]] for p in self.peers}
        return RowLists(self.part, parts, self.ids[: self.num_own], self.sent, read)

    def boundary_lists(self, stages: Communicator) -> RowLists:
        """Return the rows between stages: all own rows, in table order."""
        ids, others = self.ids[: self.num_own], [p for p in range(stages.size) if p != stages.rank]
        everything = torch.arange(len(ids), device=ids.device)
        return RowLists(stages.rank, stages.size, ids, dict.fromkeys(others, everything), dict.fromkeys(others, ids))

    @property
    def nbytes(self) -> int:
        """Bytes of the structure held; tensors that are built at first use count once they are there."""
        built = self.__dict__
        carried = (*self.held.tensors.values(), *built.get("held_by_source", EdgeData()).tensors.values())
        fixed = self.order, self.chunk_of, self.ids, self.dst, self.src, *self.sent.values(), *carried
        later = [built.get(name) for name in ("offsets", "by_source", "out_edges")]
        return held_nbytes([*fixed, *later, *cached_results(self)])


def _ids(shard: Shard, part: int) -> Tensor:
    """Return the global ids of the rows of a part that are held here."""
    ids = shard.node_ids if part == shard.part else shard.halo[part].src_ids
    assert ids is not None
    return ids


def _offsets(sorted_rows: Tensor, num_rows: int) -> Tensor:
    counts = torch.bincount(sorted_rows, minlength=num_rows)
    return torch.cat([counts.new_zeros(1), counts.cumsum(0)])


def _pointers(offsets: Tensor, span: RowRange) -> Tensor:
    """Return the row pointers of a span, from 0."""
    return offsets[span.first : span.last + 1] - offsets[span.first]


def draw_order(num: int, *, seed: int, epoch: int, shuffled: bool) -> tuple[int, ...]:
    """Return slot -> chunk in an epoch, a function of the seed and the epoch alone."""
    if not shuffled:
        return tuple(range(num))
    key = fold_key(seed, epoch, _ORDER) & 0xFFFFFFFF  # the CPU's generator ignores all other bits of a seed
    return tuple(integers(torch.randperm(num, generator=torch.Generator().manual_seed(key))))


_ORDER = 0x0DE5  # separates these keys from the keys of masks


Turn = Literal["now", "before"]
"""Destinations that read a source in its own slot or a later one (fresh), or in an earlier one (from the history)."""


class EpochOrder:
    """One epoch's order on the table: the rows that are fresh for each reader.

    order[slot] = chunk, the same in every part. A row is fresh to a destination if its slot is not later. `fresh`,
    `stale`: first rows of the two halves of the double table.
    """

    def __init__(self, chunks: Chunks, order: Sequence[int], *, fresh: int, stale: int) -> None:
        self.chunks, self.order, self.fresh, self.stale = chunks, order, fresh, stale
        slots = torch.empty(chunks.num, dtype=torch.int64)
        slots[list(order)] = torch.arange(chunks.num)
        self.slot_of = to_device(slots, chunks.chunk_of.device)[chunks.chunk_of]
        self.masks: dict[tuple[int, int, int, float], Tensor] = {}  # of dropout in this epoch, all own rows

    @cached_property
    def _columns(self) -> Tensor:
        """Row of the double table that every edge reads."""
        chunks, slots = self.chunks, self.slot_of
        if chunks.num == 1:
            return (chunks.src + self.fresh).to(chunks.index_type)
        late = slots[chunks.src] > slots[chunks.dst]
        return (chunks.src + torch.where(late, self.stale, self.fresh)).to(chunks.index_type)

    @per_argument
    def blocks(self, chunk: int) -> tuple[Block, ...]:
        """Return the in-edges of a chunk over the double table: first columns of this part, then columns of other
        parts."""
        chunks, edges = self.chunks, self.chunks.edges(chunk)
        columns, carried = self._columns[edges], replace(chunks.held, ids=None).at(edges)
        num_src = chunks.num_rows * (1 if self.fresh == self.stale else 2)
        return tuple(
            replace(part, indices=columns[places], num_src=num_src, edges=carried.at(places))
            for part, places in chunks.parts(chunk)
        )

    def compact(self, chunk: int) -> tuple[Block, Tensor, Tensor, Tensor]:
        """Return (block, rows of the double table, table rows, destination's slot minus source's) of the columns of a
        chunk. A column with a negative difference is stale."""
        block, rows = self.chunks.compact(chunk)
        ahead = self.slot_of[self.chunks.own(chunk).first] - self.slot_of[rows]
        return block, rows + torch.where(ahead < 0, self.stale, self.fresh), rows, ahead

    @per_argument
    def readers(self, turn: Turn, span: RowRange) -> Csr | None:
        """Return the out-edges of table rows to own rows that read them fresh (`now`), or from the history (`before`);
        None: there are none. Columns are rows of a table of gradients."""
        offsets, bounds, columns, held = self._by_source(turn)
        edges = slice(bounds[span.first], bounds[span.last])
        if edges.start == edges.stop:
            return None
        on_gpu, carried = self.slot_of.is_cuda, held.at(edges)
        indptr = self.chunks.out_indptr(span) if on_gpu else _pointers(offsets, span).to(columns.dtype)
        return Csr(indptr, columns[edges], weights=carried.weight, types=carried.type)

    @per_argument
    def _by_source(self, turn: Turn) -> tuple[Tensor, list[int], Tensor, EdgeData]:
        """Return the edges of a turn by source: offsets [T + 1], the same on the host, columns [e], their data. On a
        GPU the edges of the other turn stay, and read the row behind the last, which is zero: so row pointers are the
        same tensors in every epoch, and the host never waits for their number."""
        chunks = self.chunks
        by, held = chunks.by_source, chunks.held_by_source
        src, dst = chunks.src[by], chunks.dst[by]
        ahead = self.slot_of[dst] - self.slot_of[src]
        reads = ahead >= 0 if turn == "now" else ahead < 0
        if self.slot_of.is_cuda:
            columns = torch.where(reads, dst, chunks.num_own)
            return *chunks.out_edges, columns.to(chunks.index_type), held
        keep = reads.nonzero().flatten()
        offsets = _offsets(src[keep], chunks.num_rows)
        return offsets, integers(offsets), dst[keep].to(chunks.index_type), held.at(keep)
