"""What crosses the boundaries between stages: the carry of a chunk forward, its gradient backward.

Receives are posted in the order in which the other rank sends, when the schedule says so: one message ahead of its use,
so that messages travel while chunks are computed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from gnnpar.codecs.codec import Codec, CodecConfig
from gnnpar.comm import CodedExchange, Communicator, Incoming, Outgoing, Posted, RowLike, RowLists, Site
from gnnpar.folds.block import Rows
from gnnpar.parallel.pipeline.chunks import Span
from gnnpar.parallel.pipeline.schedule.action import Schedule
from gnnpar_kernels import fold_key

Direction = Literal["forward", "backward"]


class Message(NamedTuple):
    """The carry entering stage `stage` (forward), or its gradient (backward), of the chunk in a slot."""

    direction: Direction
    stage: int
    slot: int


class Form(NamedTuple):
    """What a message looks like: its operands, and the table rows that it is of."""

    layer: int
    like: tuple[RowLike, ...]
    span: Span


@dataclass(frozen=True)
class Lanes:
    """Every message between two ranks of a pipeline, in the order of sending."""

    incoming: Mapping[int, Sequence[Message]]

    @staticmethod
    def of(schedule: Schedule, rank: int) -> Lanes:
        stages = schedule.stages
        incoming: dict[int, list[Message]] = {}
        for peer, actions in enumerate(schedule.actions):
            for a in actions:
                if a.kind == "send_forward":
                    message = Message("forward", a.stage + 1, a.slot)
                    target = message.stage % stages
                elif a.kind == "send_backward":
                    message = Message("backward", a.stage, a.slot)
                    target = (a.stage - 1) % stages
                else:
                    continue
                if target == rank and peer != rank:
                    incoming.setdefault(peer, []).append(message)
        return Lanes(incoming)


class Boundary:
    """One rank's end of the boundaries during one epoch. `exchange`: of the stages of this part, in order."""

    def __init__(self, exchange: CodedExchange, lanes: Lanes, *, epoch: int, form: Callable[[Message], Form]) -> None:
        self._exchange, self._epoch, self._form = exchange, epoch, form
        self._queues = {peer: list(messages) for peer, messages in lanes.incoming.items()}
        self._sender = {m: peer for peer, messages in lanes.incoming.items() for m in messages}
        self._place = {m: i for messages in lanes.incoming.values() for i, m in enumerate(messages)}
        self._next = dict.fromkeys(self._queues, 0)
        self._posted: dict[Message, Posted] = {}

    def send(self, message: Message, rows: Rows, peer: int) -> None:
        self._exchange_with(message, {peer: Outgoing(rows, None, self._form(message).span.first)}, {})

    def post(self, message: Message) -> None:
        """Be ready for a message, and for those sent before it."""
        peer = self._sender[message]
        queue = self._queues[peer]
        while self._next[peer] <= self._place[message]:
            each = queue[self._next[peer]]
            span = self._form(each).span
            self._posted[each] = self._exchange_with(each, {}, {peer: Incoming(len(span), span.first)})
            self._next[peer] += 1

    def take(self, message: Message) -> Rows:
        """Wait for a message."""
        self.post(message)
        return self._exchange.take(self._posted.pop(message), self._sender[message])

    def _exchange_with(
        self, message: Message, outgoing: Mapping[int, Outgoing], incoming: Mapping[int, Incoming]
    ) -> Posted:
        form = self._form(message)
        site = Site(self._epoch, form.layer, 0, message.direction)
        counted = Site(self._epoch, -1, 0, "stage", chunk=message.slot)
        return self._exchange.post(outgoing, incoming, form.like, site, counted=counted)


def boundary_codec(config: CodecConfig, ids: Tensor, comm: Communicator, seed: int) -> Codec:
    """Return a codec for rows in table order, whose noise goes by node. `ids` [N] of the part's rows in table order."""
    everything = torch.arange(len(ids), device=ids.device)
    others = [p for p in range(comm.size) if p != comm.rank]
    lists = RowLists(comm.rank, comm.size, ids, dict.fromkeys(others, everything), dict.fromkeys(others, ids))
    return config.build(lists, comm, fold_key(seed, _BOUNDARY))


_BOUNDARY = 0xB0DA  # keeps this noise apart from that of halo rows
