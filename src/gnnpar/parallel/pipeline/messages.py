"""Messages of a batch between stages, forward and backward, and the lists of rows that codecs of a pipeline see.

Receives are posted when the schedule says so: one message ahead of its use, so that messages travel while chunks are
computed. A message is named by its receive.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
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


def slot_lists(chunks: Chunks, parts: int) -> RowLists:
    """Return the rows between parts, both lists in table order."""
    sent = {p: torch.cat([chunks.sent[p, k] + chunks.own(k).first for k in range(chunks.num)]) for p in chunks.readers}
    read = {p: chunks.ids[chunks.spans[p, 0].first : chunks.spans[p, chunks.num - 1].last] for p in chunks.peers}
    return RowLists(chunks.part, parts, chunks.ids[: chunks.num_own], sent, read)


class Entry(NamedTuple):
    """First layer of a virtual stage, and the rows that enter it."""

    layer: int
    like: tuple[RowLike, ...]


@dataclass(eq=False)
class Boundary:
    """One rank's end of the boundaries during one pass of a lowered schedule.

    `exchange`: of the stages of this part, in order. `entries`: by virtual stage. `spans`: table rows of each slot.
    `phase`: the phase that bytes are counted in.
    """

    exchange: CodedExchange
    schedule: Schedule
    entries: Sequence[Entry]
    spans: Sequence[RowRange]
    epoch: int
    phase: Phase
    _posted: dict[Action, tuple[Posted, int]] = field(default_factory=dict[Action, tuple[Posted, int]], init=False)
    _ready: dict[Action, Rows] = field(default_factory=dict[Action, Rows], init=False)
    """Rows to be sent, or to be read by another stage of this rank."""

    def give(self, receive: Action, rows: Rows) -> None:
        """Hold rows until they are sent, or taken on this rank."""
        self._ready[receive] = rows

    def send(self, action: Action) -> None:
        _, peer, receive = message_of(self.schedule, action)
        rows = self._ready.pop(receive)
        self._exchange(receive, {peer: Outgoing(rows, None, self.spans[receive.slot].first)}, {})

    def post(self, receive: Action) -> None:
        """Post the receive of a message. A lowered schedule receives in the order in which the other rank sends."""
        peer, _, _ = message_of(self.schedule, receive)
        span = self.spans[receive.slot]
        self._posted[receive] = self._exchange(receive, {}, {peer: Incoming(len(span), span.first)}), peer

    def take(self, receive: Action) -> Rows:
        """Return the rows of a message, once; wait for them if another rank sends them."""
        if receive in self._ready:
            return self._ready.pop(receive)
        return self.exchange.take(*self._posted.pop(receive))

    def _exchange(self, receive: Action, outgoing: Mapping[int, Outgoing], incoming: Mapping[int, Incoming]) -> Posted:
        direction: Phase = "forward" if receive.kind == "receive_forward" else "backward"
        entry = self.entries[receive.stage + (direction == "backward")]
        tag = MessageTag(self.epoch, entry.layer, 0, direction)
        counted = MessageTag(self.epoch, -1, 0, self.phase, chunk=receive.slot)
        return self.exchange.post(outgoing, incoming, entry.like, tag, counted=counted)


def boundary_codec(config: CodecConfig, ids: Tensor, comm: Communicator, seed: int) -> Codec:
    """Return a codec for rows in table order. Its noise is keyed by node. ids: of the part's rows [N]."""
    everything = torch.arange(len(ids), device=ids.device)
    others = [p for p in range(comm.size) if p != comm.rank]
    lists = RowLists(comm.rank, comm.size, ids, dict.fromkeys(others, everything), dict.fromkeys(others, ids))
    return config.build(lists, comm, fold_key(seed, _BOUNDARY))


_BOUNDARY = 0xB0DA  # keeps this noise apart from that of halo rows
