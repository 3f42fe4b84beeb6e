"""What the ways of a stage send each other, slot by slot: rows of the chunks whose turn it is, and gradients back.

A codec sees the rows that a way reads of another as one list, chunk by chunk in table order, of which a slot sends the
piece that begins at `site.first`. So its numbers depend neither on the order of chunks nor on the number of stages.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from gnnpar.codecs.codec import Codec, CodecConfig, RowLike, codec_of_lists
from gnnpar.comm import Communicator, Pending, Site
from gnnpar.folds.block import Rows
from gnnpar.parallel.pipeline.chunks import Chunks, Span

Arriving = Mapping[int, Pending[Tensor]]
Pieces = dict[tuple[int, int], tuple[Tensor, int]]
"""(reader, chunk) -> own table rows that it reads, and where they begin in its list."""


@dataclass(frozen=True, eq=False)
class Slots:
    """`comm`: the ways of a stage. All four methods are collective: a chunk of every way is in the slot."""

    chunks: Chunks
    comm: Communicator
    codec: Codec

    def send(self, own: Rows, chunk: int, site: Site) -> Arriving:
        """Rows of a chunk to the ways that read them; what will come. `own`: all rows of this way, in table order."""
        like, pieces = RowLike.of(own), self._read_by(chunk)
        with self.comm.clock("encode"):
            outgoing = {p: self.codec.encode(own, rows, _at(site, first), p) for p, (rows, first) in pieces.items()}
        sizes = {p: (len(rows), first) for p, (rows, first) in pieces.items()}
        return self._exchange(outgoing, sizes, self._read_of_others(chunk), like, site)

    def received(
        self, arriving: Arriving, chunk: int, like: Sequence[RowLike], site: Site
    ) -> Iterator[tuple[Span, Rows]]:
        """(where in the table, rows) of every other way's chunk."""
        for p, (num_rows, first) in self._read_of_others(chunk).items():
            yield self.chunks.spans[p, chunk], self._decoded(arriving[p], num_rows, like, _at(site, first), p)

    def send_back(self, theirs: Mapping[int, Rows], chunk: int, like: Sequence[RowLike], site: Site) -> Arriving:
        """Gradients of halo rows, by way, to their owners; what will come for this chunk's rows."""
        sizes = self._read_of_others(chunk)
        with self.comm.clock("encode"):
            outgoing = {p: self.codec.encode(theirs[p], None, _at(site, first), p) for p, (_, first) in sizes.items()}
        incoming = {p: (len(rows), first) for p, (rows, first) in self._read_by(chunk).items()}
        return self._exchange(outgoing, sizes, incoming, like, site)

    def returned(
        self, arriving: Arriving, chunk: int, like: Sequence[RowLike], site: Site
    ) -> Iterator[tuple[Tensor, Rows]]:
        """(rows within the chunk, gradients) from every way that reads it."""
        for p, (rows, first) in self._read_by(chunk).items():
            yield self.chunks.sent[p, chunk], self._decoded(arriving[p], len(rows), like, _at(site, first), p)

    def _exchange(
        self,
        outgoing: Mapping[int, Tensor],
        sent: Mapping[int, tuple[int, int]],
        wanted: Mapping[int, tuple[int, int]],
        like: Sequence[RowLike],
        site: Site,
    ) -> Arriving:
        codec = self.codec
        incoming = {p: codec.nbytes(n, like, _at(site, first), p) for p, (n, first) in wanted.items()}
        extra = sum(codec.metadata_nbytes(n, like, _at(site, first), p) for p, (n, first) in sent.items())
        return self.comm.exchange(outgoing, incoming, site, metadata=extra)

    def _decoded(self, pending: Pending[Tensor], num_rows: int, like: Sequence[RowLike], site: Site, p: int) -> Rows:
        buffer = pending.wait()
        with self.comm.clock("encode"):
            return self.codec.decode(buffer, num_rows, like, site, p)

    def _read_by(self, chunk: int) -> dict[int, tuple[Tensor, int]]:
        """Way -> own rows of a chunk that it reads; no entry where there are none."""
        pieces = {p: self._pieces[p, chunk] for p in self.chunks.readers}
        return {p: piece for p, piece in pieces.items() if len(piece[0])}

    def _read_of_others(self, chunk: int) -> dict[int, tuple[int, int]]:
        """Way -> (how many rows of its chunk are read here, where they begin among all of it)."""
        spans = self.chunks.spans
        found = {p: (len(spans[p, chunk]), spans[p, chunk].first - spans[p, 0].first) for p in self.chunks.peers}
        return {p: piece for p, piece in found.items() if piece[0]}

    @cached_property
    def _pieces(self) -> Pieces:
        pieces, chunks = {}, self.chunks
        for p in chunks.readers:
            first = 0
            for k in range(chunks.num):
                rows = chunks.sent[p, k]
                pieces[p, k] = rows + chunks.own(k).first, first
                first += len(rows)
        return pieces


def slot_codec(config: CodecConfig, chunks: Chunks, comm: Communicator, seed: int) -> Codec:
    """A codec for the rows between ways, told of both lists in table order."""
    own, peers = chunks.ids[: chunks.num_own], chunks.peers
    boundary = {
        p: torch.cat([chunks.sent[p, k] + chunks.own(k).first for k in range(chunks.num)]) for p in chunks.readers
    }
    halo = {p: chunks.ids[chunks.spans[p, 0].first : chunks.spans[p, chunks.num - 1].last] for p in peers}
    return codec_of_lists(config, comm, seed, part=chunks.way, node_ids=own, sent=boundary, read=halo)


def _at(site: Site, first: int) -> Site:
    return site._replace(first=first)
