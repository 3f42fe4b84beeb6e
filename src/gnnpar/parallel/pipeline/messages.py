"""Messages of a pipeline, forward and backward: of a batch between stages, of halo rows between the parts of a stage.

Between stages receives are posted in the order in which the other rank sends, when the schedule says so: one message
ahead of its use, so that messages travel while chunks are computed. A message is named by its receive.

Between parts the rows of the chunks in a slot travel, and their gradients. A codec sees the rows that a part reads of
another as one list, chunk by chunk in table order; a slot sends the piece that begins at `tag.first`. So its numbers
depend neither on the order of chunks nor on the number of stages.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from gnnpar.codecs.codec import Codec, CodecConfig
from gnnpar.comm import CodedExchange, Communicator, Incoming, MessageTag, Outgoing, Posted, RowLike, RowLists
from gnnpar.comm.communicator import Phase
from gnnpar.folds.block import Rows
from gnnpar.parallel.pipeline.chunks import Chunks, RowRange
from gnnpar.parallel.pipeline.schedule.action import Action, Schedule
from gnnpar.parallel.pipeline.schedule.lower import message_of
from gnnpar_kernels import fold_key


@dataclass(frozen=True, eq=False)
class ChunkHalo:
    """`exchange`: of the parts of a stage. All methods are collective: a chunk of every part is in the slot. One part
    exchanges nothing."""

    chunks: Chunks
    exchange: CodedExchange

    def send(self, own: Rows, chunk: int, tag: MessageTag) -> Posted | None:
        """Send rows of a chunk to the parts that read them. `own`: all rows of this part, in table order."""
        if self.exchange.comm.size == 1:
            return None
        outgoing = {p: Outgoing(own, rows, first) for p, (rows, first) in self._read_by(chunk).items()}
        return self.exchange.post(outgoing, self._read_of_others(chunk), RowLike.of(own), tag)

    def received(self, posted: Posted | None, chunk: int) -> Iterator[tuple[RowRange, Rows]]:
        """Yield (place in the table, rows) of every other part's chunk."""
        for p, rows in self.exchange.take_all(posted) if posted else ():
            yield self.chunks.spans[p, chunk], rows

    def send_back(
        self, grads: Mapping[int, Rows], chunk: int, like: Sequence[RowLike], tag: MessageTag
    ) -> Posted | None:
        """Send gradients of halo rows, by part, to their owners."""
        if self.exchange.comm.size == 1:
            return None
        outgoing = {p: Outgoing(grads[p], None, piece.first) for p, piece in self._read_of_others(chunk).items()}
        incoming = {p: Incoming(len(rows), first) for p, (rows, first) in self._read_by(chunk).items()}
        return self.exchange.post(outgoing, incoming, like, tag)

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


class Entry(NamedTuple):
    """First layer of a virtual stage, and the rows that enter it."""

    layer: int
    like: tuple[RowLike, ...]


class Boundary:
    """One rank's end of the boundaries during one pass of a lowered schedule.

    `exchange`: of the stages of this part, in order. `entries`: by virtual stage. `spans`: table rows of each slot.
    `phase`: the phase that bytes are counted in.
    """

    def __init__(
        self,
        exchange: CodedExchange,
        schedule: Schedule,
        entries: Sequence[Entry],
        spans: Sequence[RowRange],
        *,
        epoch: int,
        phase: Phase,
    ) -> None:
        self._exchange, self._schedule, self._entries, self._spans = exchange, schedule, entries, spans
        self._epoch = epoch
        self._phase: Phase = phase
        self._waiting = incoming(schedule, exchange.comm.rank)
        self._posted: dict[Action, tuple[Posted, int]] = {}
        self._ready: dict[Action, Rows] = {}  # to be sent, or to be read by another stage of this rank

    def give(self, receive: Action, rows: Rows) -> None:
        """Hold rows until they are sent, or taken on this rank."""
        self._ready[receive] = rows

    def send(self, action: Action) -> None:
        _, peer, receive = message_of(self._schedule, action)
        rows = self._ready.pop(receive)
        self._exchange_with(receive, {peer: Outgoing(rows, None, self._spans[receive.slot].first)}, {})

    def post(self, receive: Action) -> None:
        """Post the receive of a message, and of the messages that its sender sends before it."""
        peer, _, _ = message_of(self._schedule, receive)
        while receive not in self._posted:
            following = self._waiting[peer].pop(0)
            span = self._spans[following.slot]
            posted = self._exchange_with(following, {}, {peer: Incoming(len(span), span.first)})
            self._posted[following] = posted, peer

    def take(self, receive: Action) -> Rows:
        """Return the rows of a message, once; wait for them if another rank sends them."""
        if receive in self._ready:
            return self._ready.pop(receive)
        self.post(receive)
        return self._exchange.take(*self._posted.pop(receive))

    def _exchange_with(
        self, receive: Action, outgoing: Mapping[int, Outgoing], incoming: Mapping[int, Incoming]
    ) -> Posted:
        direction: Phase = "forward" if receive.kind == "receive_forward" else "backward"
        entry = self._entries[receive.stage + (direction == "backward")]
        tag = MessageTag(self._epoch, entry.layer, 0, direction)
        counted = MessageTag(self._epoch, -1, 0, self._phase, chunk=receive.slot)
        return self._exchange.post(outgoing, incoming, entry.like, tag, counted=counted)


def incoming(schedule: Schedule, rank: int) -> dict[int, list[Action]]:
    """Return peer -> receives of its messages to this rank, in the order in which it sends them."""
    found: dict[int, list[Action]] = {}
    for peer, actions in enumerate(schedule.actions):
        messages = [message_of(schedule, a) for a in actions if a.kind.startswith("send")]
        found[peer] = [receive for _, target, receive in messages if target == rank]
    return found


def boundary_codec(config: CodecConfig, ids: Tensor, comm: Communicator, seed: int) -> Codec:
    """Return a codec for rows in table order. Its noise is keyed by node. ids: of the part's rows [N]."""
    everything = torch.arange(len(ids), device=ids.device)
    others = [p for p in range(comm.size) if p != comm.rank]
    lists = RowLists(comm.rank, comm.size, ids, dict.fromkeys(others, everything), dict.fromkeys(others, ids))
    return config.build(lists, comm, fold_key(seed, _BOUNDARY))


_BOUNDARY = 0xB0DA  # keeps this noise apart from that of halo rows
