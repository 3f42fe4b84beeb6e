"""The rows of one part, chunk by chunk, and what the order of an epoch makes of them.

A table of T rows holds the owned rows, chunk by chunk, then the halo rows by part and chunk. An aggregation reads two
tables: rows of chunks that had their turn come from this epoch's (fresh), the others from the history.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from gnnpar.folds.block import Block, ByType
from gnnpar.folds.edge_data import EdgeData
from gnnpar.parallel.keys import to_device
from gnnpar.parallel.torch_types import integers, unique
from gnnpar.partition.shard import Shard
from gnnpar_kernels import Csr, fold_key


@dataclass(frozen=True)
class Span:
    """Rows [first, last) of the table."""

    first: int
    last: int

    @property
    def rows(self) -> slice:
        return slice(self.first, self.last)

    def __len__(self) -> int:
        return self.last - self.first


class Part(NamedTuple):
    """Some edges of a block: their places [e], and the CSR rows that they make, `rows` as in Block."""

    edges: Tensor
    indptr: Tensor
    rows: Tensor | None

    @staticmethod
    def of(block: Block, keep: Tensor) -> Part:
        """Return the edges where `keep` [E] is true."""
        part = block.restrict(keep)
        return Part(keep.nonzero().flatten(), part.indptr, part.rows)


@dataclass(frozen=True, eq=False)
class Chunks:
    """The static structure. Shapes: order [N] own rows of the shard in table order; chunk_of [T]; edges below [E].

    `ids` [T]: the global id of a table row. Edges are sorted by (destination, source id).
    """

    num: int
    part: int
    order: Tensor
    chunk_of: Tensor
    ids: Tensor
    spans: dict[tuple[int, int], Span]  # (part, chunk) -> where its rows are that this part holds
    sent: dict[tuple[int, int], Tensor]  # (reader, chunk) -> rows within the chunk
    halo_rows: dict[int, Tensor]  # part -> table rows of its halo nodes, by ascending id
    dst: Tensor  # table row of an edge's destination, always an own one
    src: Tensor  # table row of its source
    held: EdgeData  # what edges carry

    @staticmethod
    def of(shard: Shard) -> Chunks:
        assert shard.chunk_of is not None
        assert shard.halo_chunk_of is not None
        num = shard.num_chunks
        device = shard.node_ids.device
        order = torch.argsort(shard.chunk_of, stable=True)
        place = torch.empty_like(order)
        place[order] = torch.arange(len(order), device=device)
        spans = _spans(shard.part, shard.chunk_of, num, base=0)
        chunk_of, ids = [shard.chunk_of[order]], [shard.node_ids[order]]
        dst, src = [place[shard.inner.edge_dst]], [place[shard.inner.indices.long()]]
        base, at = len(order), 0
        halo_rows: dict[int, Tensor] = {}
        for p, block in sorted(shard.halo.items()):
            theirs = shard.halo_chunk_of[at : at + block.num_src]
            their_order = torch.argsort(theirs, stable=True)
            their_place = torch.empty_like(their_order)
            their_place[their_order] = torch.arange(base, base + block.num_src, device=device)
            spans |= _spans(p, theirs, num, base=base)
            halo_rows[p] = their_place
            assert block.src_ids is not None
            chunk_of.append(theirs[their_order])
            ids.append(block.src_ids[their_order])
            dst.append(place[block.edge_dst])
            src.append(their_place[block.indices.long()])
            base, at = base + block.num_src, at + block.num_src
        all_ids, all_dst, all_src = torch.cat(ids), torch.cat(dst), torch.cat(src)
        by = torch.argsort(all_dst * shard.num_nodes + all_ids[all_src], stable=True)
        blocks = (shard.inner, *(b for _, b in sorted(shard.halo.items())))
        return Chunks(
            num=num,
            part=shard.part,
            order=order,
            chunk_of=torch.cat(chunk_of),
            ids=all_ids,
            spans=spans,
            sent=_sent(shard, place, spans, num),
            halo_rows=halo_rows,
            dst=all_dst[by],
            src=all_src[by],
            held=EdgeData.cat([b.edges for b in blocks]).at(by),
        )

    @property
    def num_rows(self) -> int:
        """T."""
        return len(self.chunk_of)

    @property
    def num_own(self) -> int:
        """N."""
        return len(self.order)

    @cached_property
    def peers(self) -> list[int]:
        """Parts whose rows are read here."""
        return sorted({part for part, _ in self.spans} - {self.part})

    @cached_property
    def readers(self) -> list[int]:
        """Parts that read rows of this one."""
        return sorted({part for part, _ in self.sent})

    def own(self, chunk: int) -> Span:
        return self.spans[self.part, chunk]

    @cached_property
    def offsets(self) -> Tensor:
        """[N + 1]: where the edges of each own row begin."""
        return _offsets(self.dst, self.num_own)

    @cached_property
    def edge_bounds(self) -> list[int]:
        """Where the edges of each chunk begin, and the end."""
        starts = [self.own(k).first for k in range(self.num)] + [self.num_own]
        return integers(self.offsets[torch.tensor(starts, device=self.offsets.device)])

    @cached_property
    def by_source(self) -> Tensor:
        """The edges in the order of their source's table row."""
        return torch.argsort(self.src, stable=True)

    def indptr(self, chunk: int) -> Tensor:
        if chunk not in self._indptr:
            span = self.own(chunk)
            pointers = self.offsets[span.first : span.last + 1]
            self._indptr[chunk] = (pointers - pointers[0]).to(self.index_type)
        return self._indptr[chunk]

    @cached_property
    def _indptr(self) -> dict[int, Tensor]:
        return {}

    @property
    def index_type(self) -> torch.dtype:
        return torch.int32 if max(len(self.src), 2 * self.num_rows) < 2**31 else torch.int64

    def edges(self, chunk: int) -> slice:
        return slice(self.edge_bounds[chunk], self.edge_bounds[chunk + 1])

    @cached_property
    def out_edges(self) -> tuple[Tensor, list[int]]:
        """[T + 1]: where the edges of each source begin in `by_source`; and the same on the host."""
        offsets = _offsets(self.src[self.by_source], self.num_rows)
        return offsets, integers(offsets)

    def out_indptr(self, span: Span) -> Tensor:
        """Of the out-edges of some table rows."""
        if span not in self._out_indptr:
            offsets = self.out_edges[0][span.first : span.last + 1]
            self._out_indptr[span] = (offsets - offsets[0]).to(self.index_type)
        return self._out_indptr[span]

    @cached_property
    def _out_indptr(self) -> dict[Span, Tensor]:
        return {}

    def split(self, chunk: int) -> tuple[Part, Part]:
        """Return the in-edges of a chunk from this part's rows, and from other parts' rows."""
        if chunk not in self._split:
            src = self.src[self.edges(chunk)].to(self.index_type)
            block = Block(self.indptr(chunk), src, len(self.own(chunk)), self.num_rows)
            own = src < self.num_own
            self._split[chunk] = Part.of(block, own), Part.of(block, ~own)
        return self._split[chunk]

    @cached_property
    def _split(self) -> dict[int, tuple[Part, Part]]:
        return {}

    @cached_property
    def _compact(self) -> dict[int, tuple[Block, Tensor]]:
        return {}

    def compact(self, chunk: int) -> tuple[Block, Tensor]:
        """Return the in-edges of a chunk, columns numbered by ascending id, and the table row of each column."""
        if chunk not in self._compact:
            src = self.src[self.edges(chunk)]
            columns, inverse = unique(self.ids[src])
            rows = torch.empty_like(columns)
            rows[inverse] = src
            block = Block(
                self.indptr(chunk),
                inverse.to(self.index_type),
                len(self.own(chunk)),
                len(columns),
                src_ids=columns,
                edges=self.held.at(self.edges(chunk)),
            )
            self._compact[chunk] = block, rows
        return self._compact[chunk]

    @cached_property
    def by_type(self) -> dict[tuple[int, Literal["all", "own", "halo"]], dict[int, ByType]]:
        """How edges of a chunk, or of a half of `split`, are sorted by their types: the same in every epoch."""
        return defaultdict(dict)

    @cached_property
    def held_by_source(self) -> EdgeData:
        """Weights and types, in the order of `by_source`."""
        return replace(self.held, ids=None).at(self.by_source)

    @property
    def nbytes(self) -> int:
        """Bytes of structure held, what is built at first use included once it is there."""
        held = [
            self.order,
            self.chunk_of,
            self.ids,
            self.dst,
            self.src,
            *self.held.tensors.values(),
            *self.__dict__.get("held_by_source", EdgeData()).tensors.values(),
            *self.sent.values(),
        ]
        held += [self.__dict__.get("offsets"), self.__dict__.get("by_source"), *self._indptr.values()]
        held += [*self.__dict__.get("out_edges", ())[:1], *self._out_indptr.values()]
        held += [t for parts in self._split.values() for part in parts for t in part]
        held += [t for kept in self.by_type.values() for each in kept.values() for t in each]
        compact = sum(b.nbytes + rows.nbytes for b, rows in self._compact.values())
        return compact + sum(t.numel() * t.element_size() for t in held if isinstance(t, Tensor))


def _spans(part: int, chunk_of: Tensor, num: int, *, base: int) -> dict[tuple[int, int], Span]:
    sizes = integers(torch.bincount(chunk_of, minlength=num))
    ends = [base]
    for size in sizes:
        ends.append(ends[-1] + size)
    return {(part, k): Span(ends[k], ends[k + 1]) for k in range(num)}


def _sent(shard: Shard, place: Tensor, spans: dict[tuple[int, int], Span], num: int) -> dict[tuple[int, int], Tensor]:
    """Return the rows of each chunk that each part reads, by ascending id as the reader has them."""
    assert shard.chunk_of is not None
    sent: dict[tuple[int, int], Tensor] = {}
    for p, index in shard.boundary.items():
        chunks = shard.chunk_of[index]
        for k in range(num):
            sent[p, k] = place[index[chunks == k]] - spans[shard.part, k].first
    return sent


def _offsets(sorted_rows: Tensor, num_rows: int) -> Tensor:
    counts = torch.bincount(sorted_rows, minlength=num_rows)
    return torch.cat([counts.new_zeros(1), counts.cumsum(0)])


def draw_order(num: int, *, seed: int, epoch: int, shuffled: bool) -> tuple[int, ...]:
    """Slot -> chunk in an epoch, the same on every rank: it follows from the seed and the epoch."""
    if not shuffled:
        return tuple(range(num))
    key = fold_key(seed, epoch, _ORDER) & 0xFFFFFFFF  # the CPU's generator ignores all other bits of a seed
    return tuple(integers(torch.randperm(num, generator=torch.Generator().manual_seed(key))))


_ORDER = 0x0DE5  # keeps these keys apart from those of masks


Turn = Literal["now", "before"]
"""Of the destinations that read a source's rows in an epoch: in its own slot or a later one, or in an earlier one."""


class EpochOrder:
    """One epoch's order on the table: the rows that are fresh for each reader.

    order[slot] = chunk, the same in every part. A row is fresh to a destination if its slot is not later. `fresh`,
    `stale`: where the two halves of the double table begin.
    """

    def __init__(self, chunks: Chunks, order: Sequence[int], *, fresh: int, stale: int) -> None:
        self.chunks, self.order, self.fresh, self.stale = chunks, order, fresh, stale
        slots = torch.empty(chunks.num, dtype=torch.int64)
        slots[list(order)] = torch.arange(chunks.num)
        self.slot_of = to_device(slots, chunks.chunk_of.device)[chunks.chunk_of]
        self.masks: dict[tuple[int, int, int, float], Tensor] = {}  # of dropout in this epoch, all own rows
        self._blocks: dict[int, Block] = {}
        self._split: dict[int, tuple[Block, Block]] = {}
        self._sources: dict[Turn, tuple[Tensor, list[int], Tensor, EdgeData]] = {}
        self._readers: dict[tuple[Turn, Span], Csr | None] = {}
        self._columns_of_turn: dict[Turn, Tensor] = {}

    @cached_property
    def _columns(self) -> Tensor:
        """Row of the double table that every edge reads."""
        chunks, slots = self.chunks, self.slot_of
        if chunks.num == 1:
            return (chunks.src + self.fresh).to(chunks.index_type)
        late = slots[chunks.src] > slots[chunks.dst]
        return (chunks.src + torch.where(late, self.stale, self.fresh)).to(chunks.index_type)

    def block(self, chunk: int) -> Block:
        """Return the in-edges of a chunk over the double table."""
        if chunk not in self._blocks:
            chunks = self.chunks
            columns = self._columns[chunks.edges(chunk)]
            self._blocks[chunk] = Block(
                chunks.indptr(chunk),
                columns,
                len(chunks.own(chunk)),
                self._height,
                edges=replace(chunks.held, ids=None).at(chunks.edges(chunk)),
                by_type=chunks.by_type[chunk, "all"],
            )
        return self._blocks[chunk]

    def split(self, chunk: int) -> tuple[Block, Block | None]:
        """Return the same edges in two blocks: columns of this part, and columns of other parts; None: no such
        parts."""
        if not self.chunks.peers:
            return self.block(chunk), None
        if chunk not in self._split:
            block = self.block(chunk)
            own, halo = (
                Block(
                    part.indptr,
                    block.indices[part.edges],
                    block.num_dst,
                    block.num_src,
                    part.rows,
                    edges=block.edges.at(part.edges),
                    by_type=self.chunks.by_type[chunk, half],
                )
                for half, part in zip(("own", "halo"), self.chunks.split(chunk), strict=True)
            )
            self._split[chunk] = own, halo
        return self._split[chunk]

    @property
    def _height(self) -> int:
        return self.chunks.num_rows * (1 if self.fresh == self.stale else 2)

    def compact(self, chunk: int) -> tuple[Block, Tensor, Tensor, Tensor]:
        """(block, rows of the double table, table rows, slots later than the source's) of a chunk's columns.

        The last is negative where the column is stale.
        """
        block, rows = self.chunks.compact(chunk)
        ahead = self.slot_of[self.chunks.own(chunk).first] - self.slot_of[rows]
        return block, rows + torch.where(ahead < 0, self.stale, self.fresh), rows, ahead

    def readers(self, turn: Turn, span: Span) -> Csr | None:
        """Return the out-edges of table rows to own rows that read them fresh (`now`), or from the history (`before`).

        Columns are rows of a table of gradients. On a GPU the edges of the other turn stay, and read the row behind the
        last, which is zero: so the rows are the same in every epoch, and nothing waits for their number.
        """
        if self.slot_of.is_cuda:
            return self._all_readers(turn, span)
        if (turn, span) not in self._readers:  # an empty span begins where the next one does
            self._readers[turn, span] = self._cut_readers(turn, span)
        return self._readers[turn, span]

    def _all_readers(self, turn: Turn, span: Span) -> Csr | None:
        chunks = self.chunks
        bounds = chunks.out_edges[1]
        first, last = bounds[span.first], bounds[span.last]
        if first == last:
            return None
        if turn not in self._columns_of_turn:
            src, dst = chunks.src[chunks.by_source], chunks.dst[chunks.by_source]
            ahead = self.slot_of[dst] - self.slot_of[src]
            read = torch.where(ahead >= 0 if turn == "now" else ahead < 0, dst, chunks.num_own)
            self._columns_of_turn[turn] = read.to(chunks.index_type)
        held = chunks.held_by_source.at(slice(first, last))
        columns = self._columns_of_turn[turn][first:last]
        return Csr(chunks.out_indptr(span), columns, weights=held.weight, types=held.type)

    def _cut_readers(self, turn: Turn, span: Span) -> Csr | None:
        chunks = self.chunks
        if turn not in self._sources:
            by = chunks.by_source
            src, dst = chunks.src[by], chunks.dst[by]
            ahead = self.slot_of[dst] - self.slot_of[src]
            keep = (ahead >= 0 if turn == "now" else ahead < 0).nonzero().flatten()
            offsets = _offsets(src[keep], chunks.num_rows)
            readers = dst[keep].to(chunks.index_type)
            self._sources[turn] = offsets, integers(offsets), readers, chunks.held_by_source.at(keep)
        offsets, bounds, readers, held = self._sources[turn]
        first, last = bounds[span.first], bounds[span.last]
        if first == last:
            return None
        pointers = offsets[span.first : span.last + 1] - first
        held = held.at(slice(first, last))
        return Csr(pointers.to(chunks.index_type), readers[first:last], weights=held.weight, types=held.type)
