"""Messages between the parts of a stage, slot by slot: rows of the chunks in the slot, and gradients back.

A codec sees the rows that a part reads of another as one list, chunk by chunk in table order; a slot sends the piece
that begins at `site.first`. So its numbers depend neither on the order of chunks nor on the number of stages.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from gnnpar.comm import CodedExchange, Incoming, Outgoing, Posted, RowLike, RowLists, Site
from gnnpar.folds.block import Rows
from gnnpar.parallel.pipeline.chunks import Chunks, Span


@dataclass(frozen=True, eq=False)
class Slots:
    """`exchange`: of the parts of a stage. All methods are collective: a chunk of every part is in the slot. One part
    exchanges nothing."""

    chunks: Chunks
    exchange: CodedExchange

    def send(self, own: Rows, chunk: int, site: Site) -> Posted | None:
        """Send rows of a chunk to the parts that read them. `own`: all rows of this part, in table order."""
        if self.exchange.comm.size == 1:
            return None
        outgoing = {p: Outgoing(own, rows, first) for p, (rows, first) in self._read_by(chunk).items()}
        return self.exchange.post(outgoing, self._read_of_others(chunk), RowLike.of(own), site)

    def received(self, posted: Posted | None, chunk: int) -> Iterator[tuple[Span, Rows]]:
        """Yield (place in the table, rows) of every other part's chunk."""
        for p, rows in self.exchange.take_all(posted) if posted else ():
            yield self.chunks.spans[p, chunk], rows

    def send_back(self, theirs: Mapping[int, Rows], chunk: int, like: Sequence[RowLike], site: Site) -> Posted | None:
        """Send gradients of halo rows, by part, to their owners."""
        if self.exchange.comm.size == 1:
            return None
        outgoing = {p: Outgoing(theirs[p], None, piece.first) for p, piece in self._read_of_others(chunk).items()}
        incoming = {p: Incoming(len(rows), first) for p, (rows, first) in self._read_by(chunk).items()}
        return self.exchange.post(outgoing, incoming, like, site)

    def returned(self, posted: Posted | None, chunk: int) -> Iterator[tuple[Tensor, Rows]]:
        """Yield (rows within the chunk, gradients) from every part that reads it."""
        for p, rows in self.exchange.take_all(posted) if posted else ():
            yield self.chunks.sent[p, chunk], rows

    def _read_by(self, chunk: int) -> dict[int, tuple[Tensor, int]]:
        """Part -> own rows of a chunk that it reads; no entry where there are none."""
        pieces = {p: self._pieces[p, chunk] for p in self.chunks.readers}
        return {p: piece for p, piece in pieces.items() if len(piece[0])}

    def _read_of_others(self, chunk: int) -> dict[int, Incoming]:
        """Part -> rows of its chunk that are read here, and where they begin among all of it."""
        spans = self.chunks.spans
        incoming = {
            p: Incoming(len(spans[p, chunk]), spans[p, chunk].first - spans[p, 0].first) for p in self.chunks.peers
        }
        return {p: piece for p, piece in incoming.items() if piece.num_rows}

    @cached_property
    def _pieces(self) -> dict[tuple[int, int], tuple[Tensor, int]]:
        """(reader, chunk) -> own table rows that it reads, and where they begin in its list."""
        pieces, chunks = dict[tuple[int, int], tuple[Tensor, int]](), self.chunks
        for p in chunks.readers:
            first = 0
            for k in range(chunks.num):
                rows = chunks.sent[p, k]
                pieces[p, k] = rows + chunks.own(k).first, first
                first += len(rows)
        return pieces


def slot_lists(chunks: Chunks, parts: int) -> RowLists:
    """Return the rows between parts, both lists in table order."""
    sent = {p: torch.cat([chunks.sent[p, k] + chunks.own(k).first for k in range(chunks.num)]) for p in chunks.readers}
    read = {p: chunks.ids[chunks.spans[p, 0].first : chunks.spans[p, chunks.num - 1].last] for p in chunks.peers}
    return RowLists(chunks.part, parts, chunks.ids[: chunks.num_own], sent, read)
