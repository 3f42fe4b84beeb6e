"""Encode, count, send and decode rows: every strategy sends its rows through this module."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from torch import Tensor

from gnnpar.comm.communicator import Communicator, MessageTag, Pending, SavedTag
from gnnpar.comm.rows import Decoder, Incoming, Outgoing, RowLike, Wire
from gnnpar.folds.block import Rows

Observer = Callable[[MessageTag, int, Rows], None]


@dataclass(eq=False)
class Posted:
    """A posted message: incoming rows not taken yet, by peer."""

    tag: MessageTag
    like: tuple[RowLike, ...]
    incoming: Mapping[int, Incoming]
    pending: dict[int, Pending[Tensor]]
    decoded: dict[int, Rows] = field(default_factory=dict[int, Rows])  # received by `drain`
    decoders: Mapping[int, Decoder] = field(default_factory=dict[int, Decoder])

    @property
    def peers(self) -> list[int]:
        """Return the peers whose rows have not been taken, in the order of posting."""
        return [p for p in self.incoming if p in self.pending or p in self.decoded]


class CodedExchange:
    """Exchange rows between the ranks of `comm`, encoded by `codec`. Counts bytes and metadata, and marks the clock.

    A message may be taken in a later epoch than it was posted in: `store` keeps it under a key until `retrieve`. Its
    bytes belong to the epoch of posting, and it is decoded with the codec's state at posting. observe(tag, peer,
    rows): called with all rows that are taken.
    """

    def __init__(self, comm: Communicator, codec: Wire, *, observe: Observer | None = None) -> None:
        self.comm, self.codec, self._observe = comm, codec, observe
        self._in_flight: dict[Posted, None] = {}  # an ordered set
        self._stored: dict[Hashable, Posted] = {}

    def observed(self, observe: Observer) -> CodedExchange:
        """Return an exchange of the same ranks and codec that also passes taken rows to `observe`."""
        return CodedExchange(self.comm, self.codec, observe=observe)

    def post(
        self,
        outgoing: Mapping[int, Outgoing],
        incoming: Mapping[int, Incoming],
        like: Sequence[RowLike],
        tag: MessageTag,
        *,
        counted: MessageTag | None = None,
    ) -> Posted:
        """Encode and send rows by peer, and post receives of rows of the shapes and types `like`. Rows of a wider type
        are rounded. All ranks post the same messages in the same order. tag: key of the codec's bits and noise.
        counted: tag for the ledger, by default `tag`."""
        comm, codec = self.comm, self.codec
        outgoing = {p: _as_like(out, like) for p, out in outgoing.items()}
        buffers: Mapping[int, Tensor] = {}
        if outgoing:
            with comm.clock("encode"):
                buffers = codec.encode_all(outgoing, tag)
        sizes = {p: codec.nbytes(part.num_rows, like, at(tag, part), p) for p, part in incoming.items()}
        metadata = sum(
            codec.metadata_nbytes(part.num_rows, RowLike.of(part.rows), at(tag, part), p)
            for p, part in outgoing.items()
        )
        pending = comm.exchange(buffers, sizes, counted or tag, metadata=metadata)
        decoders = {p: codec.decoder(part.num_rows, tuple(like), at(tag, part), p) for p, part in incoming.items()}
        posted = Posted(tag, tuple(like), incoming, dict(pending), decoders=decoders)
        if pending:
            self._in_flight[posted] = None
        return posted

    def take(self, posted: Posted, peer: int) -> Rows:
        """Return the rows of a peer, once. Waiting for them counts as exposed communication."""
        rows = posted.decoded.pop(peer) if peer in posted.decoded else self._receive(posted, peer)
        if self._observe is not None:
            self._observe(posted.tag, peer, rows)
        return rows

    def take_all(self, posted: Posted) -> Iterator[tuple[int, Rows]]:
        """Yield (peer, rows) in the order of posting."""
        for peer in posted.peers:
            yield peer, self.take(posted, peer)

    def store(self, key: Hashable, posted: Posted) -> None:
        """Keep a message for a later epoch. Raise ValueError if the key is in use."""
        if key in self._stored:
            raise ValueError(f"a message is stored under {key} already: retrieve it before the next one is stored")
        self._stored[key] = posted

    def retrieve(self, key: Hashable) -> Posted | None:
        """Remove and return the message stored under a key; None if there is none."""
        return self._stored.pop(key, None)

    def as_received(self, rows: Rows, index: Tensor, tag: MessageTag, peer: int) -> Rows:
        """Return rows[index] of the rows posted under a tag, as the peer decodes them."""
        with self.comm.clock("encode"):
            return self.codec.as_received(rows, index, tag, peer)

    def drain(self) -> None:
        """Wait for everything in flight; rows not taken are kept."""
        for posted in list(self._in_flight):
            for peer in list(posted.pending):
                posted.decoded[peer] = self._receive(posted, peer)

    @property
    def nbytes(self) -> int:
        """Return the bytes of decoded rows in stored messages."""
        rows = (t for posted in self._stored.values() for rows in posted.decoded.values() for t in rows)
        return sum(t.numel() * t.element_size() for t in rows)

    def state_dict(self) -> dict[Hashable, tuple[MessageTag, dict[int, Rows]]]:
        """Return the stored messages. Call `drain` first."""
        if self._in_flight:
            raise RuntimeError("messages are in flight: drain the exchange before its state is read")
        return {key: (posted.tag, dict(posted.decoded)) for key, posted in self._stored.items()}

    def load_state_dict(self, state: Mapping[Hashable, tuple[SavedTag, Mapping[int, Rows]]]) -> None:
        for key, (tag, decoded) in state.items():
            incoming = {p: Incoming(len(rows[0])) for p, rows in decoded.items()}
            like = next((RowLike.of(rows) for rows in decoded.values()), ())
            self._stored[key] = Posted(MessageTag(*tag), like, incoming, {}, dict(decoded))

    def _receive(self, posted: Posted, peer: int) -> Rows:
        buffer = posted.pending.pop(peer).wait()
        if not posted.pending:
            self._in_flight.pop(posted, None)
        with self.comm.clock("encode"):
            return posted.decoders[peer](buffer)


def _as_like(out: Outgoing, like: Sequence[RowLike]) -> Outgoing:
    """Return the rows in the types that the receiver expects."""
    if all(t.dtype == each.dtype for t, each in zip(out.rows, like, strict=True)):
        return out
    return replace(out, rows=tuple(t.to(each.dtype) for t, each in zip(out.rows, like, strict=True)))


def at(tag: MessageTag, part: Incoming | Outgoing) -> MessageTag:
    """Return the tag of a piece of a list."""
    return tag._replace(first=part.first)
