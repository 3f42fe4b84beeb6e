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

from gnnpar.codecs.codec import Codec, CodecConfig, RowLike, codec_of_lists
from gnnpar.comm import Communicator, Pending, Site
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
    """One rank's end of the boundaries during one epoch. `comm`: the stages of this way, in order."""

    def __init__(
        self, comm: Communicator, codec: Codec, lanes: Lanes, *, epoch: int, form: Callable[[Message], Form]
    ) -> None:
        self._comm, self._codec, self._epoch, self._form = comm, codec, epoch, form
        self._queues = {peer: list(messages) for peer, messages in lanes.incoming.items()}
        self._sender = {m: peer for peer, messages in lanes.incoming.items() for m in messages}
        self._place = {m: i for messages in lanes.incoming.values() for i, m in enumerate(messages)}
        self._posted = dict.fromkeys(self._queues, 0)
        self._arriving: dict[Message, Pending[Tensor]] = {}

    def send(self, message: Message, rows: Rows, peer: int) -> None:
        form = self._form(message)
        with self._comm.clock("encode"):
            buffer = self._codec.encode(rows, None, self._codec_site(message, form), peer)
        extra = self._codec.metadata_nbytes(len(form.span), form.like, self._codec_site(message, form), peer)
        self._comm.exchange({peer: buffer}, {}, self._wire_site(message), metadata=extra)

    def post(self, message: Message) -> None:
        """Be ready for a message, and for those sent before it."""
        peer = self._sender[message]
        queue = self._queues[peer]
        while self._posted[peer] <= self._place[message]:
            each = queue[self._posted[peer]]
            form = self._form(each)
            nbytes = self._codec.nbytes(len(form.span), form.like, self._codec_site(each, form), peer)
            self._arriving[each] = self._comm.exchange({}, {peer: nbytes}, self._wire_site(each))[peer]
            self._posted[peer] += 1

    def take(self, message: Message) -> Rows:
        """Wait for a message."""
        self.post(message)
        peer, buffer = self._sender[message], self._arriving.pop(message).wait()
        form = self._form(message)
        with self._comm.clock("encode"):
            return self._codec.decode(buffer, len(form.span), form.like, self._codec_site(message, form), peer)

    def _codec_site(self, message: Message, form: Form) -> Site:
        return Site(self._epoch, form.layer, 0, message.direction, first=form.span.first)

    def _wire_site(self, message: Message) -> Site:
        return Site(self._epoch, -1, 0, "stage", chunk=message.slot)


def boundary_codec(config: CodecConfig, ids: Tensor, comm: Communicator, seed: int) -> Codec:
    """A codec for rows in table order, whose noise goes by node. `ids` [N] of the way's rows in table order."""
    everything = torch.arange(len(ids), device=ids.device)
    others = [p for p in range(comm.size) if p != comm.rank]
    return codec_of_lists(
        config,
        comm,
        fold_key(seed, _BOUNDARY),
        part=comm.rank,
        node_ids=ids,
        sent=dict.fromkeys(others, everything),
        read=dict.fromkeys(others, ids),
    )


_BOUNDARY = 0xB0DA  # keeps this noise apart from that of halo rows
