"""Ledger of transfers: exact bytes by phase, and the receivers' waiting time by cause."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from gnnpar.comm.clock import monotonic as now
from gnnpar.comm.clock import union_seconds


class Receipt(NamedTuple):
    """Times of one received message on the receiver's clock: posted, wait started, arrived, wait over.

    number: index among all messages from this peer, in the order of posting. staged: the message crossed a boundary
    between pipeline stages, where waiting for the sender is a bubble.
    """

    peer: int
    posted: float
    wait_began: float
    arrived: float
    wait_ended: float
    number: int
    staged: bool = False


@dataclass(frozen=True)
class EpochTraffic:
    """Traffic and waiting time of one rank since the last drain.

    Units: bytes are payload plus metadata (`metadata` counts the latter again); seconds are wall time. exposed_skew is
    the part of waiting before the sender had posted, bubble the same for messages between pipeline stages, exposed_wire
    the rest. comm_total is the time with a transfer in flight towards this rank, overlapped or not.
    """

    bytes: dict[str, int]
    metadata: int
    messages: int
    exposed_wire: float
    exposed_skew: float
    comm_total: float
    bubble: float = 0.0
    layer_bytes: dict[int, int] = field(default_factory=dict[int, int])  # share of aggregations, by layer


@dataclass
class Ledger:
    """Filled by one rank's communicator, drained by the runner once per epoch.

    A message may be received in a later epoch than it was posted in, so both ends number the messages of a pair, and
    post times are kept until their messages are received. shared_clock: all ranks read the same monotonic clock (one
    host). Otherwise all waiting counts as wire.
    """

    shared_clock: bool = True
    _bytes: dict[str, int] = field(default_factory=lambda: defaultdict(int))
    _layer_bytes: dict[int, int] = field(default_factory=lambda: defaultdict(int))
    _metadata: int = 0
    _messages: int = 0
    _receipts: list[Receipt] = field(default_factory=list[Receipt])
    _posts: dict[int, dict[int, float]] = field(default_factory=lambda: defaultdict(dict))
    _num_sent: dict[int, int] = field(default_factory=lambda: defaultdict(int))
    _num_expected: dict[int, int] = field(default_factory=lambda: defaultdict(int))
    _outstanding: dict[int, set[int]] = field(default_factory=lambda: defaultdict(set))
    _their_posts: dict[int, dict[int, float]] = field(default_factory=lambda: defaultdict(dict))

    def sent(self, phase: str, nbytes: int, *, peer: int, layer: int) -> None:
        """Count a message to `peer` that is posted now. layer=-1: outside aggregations."""
        self._bytes[phase] += nbytes
        if layer >= 0:
            self._layer_bytes[layer] += nbytes
        self._messages += 1
        self._posts[peer][self._num_sent[peer]] = now()
        self._num_sent[peer] += 1

    def counted(self, phase: str, nbytes: int) -> None:
        """Count the bytes of a collective, which has no single peer."""
        self._bytes[phase] += nbytes

    def add_metadata(self, nbytes: int) -> None:
        self._metadata += nbytes

    def repeat(self, traffic: EpochTraffic) -> None:
        """Count earlier traffic once more, for a replayed CUDA graph."""
        for phase, nbytes in traffic.bytes.items():
            self._bytes[phase] += nbytes
        for layer, nbytes in traffic.layer_bytes.items():
            self._layer_bytes[layer] += nbytes
        self._metadata += traffic.metadata
        self._messages += traffic.messages

    def expected(self, peer: int) -> int:
        """Expect a non-empty message from `peer`. Return its number, for the receipt."""
        number = self._num_expected[peer]
        self._num_expected[peer] += 1
        self._outstanding[peer].add(number)
        return number

    def received(self, receipt: Receipt) -> None:
        self._outstanding[receipt.peer].discard(receipt.number)
        self._receipts.append(receipt)

    @property
    def posts(self) -> Mapping[int, Mapping[int, float]]:
        """Return peer -> number -> post time of the messages sent since the last drain."""
        return self._posts

    def learn_posts(self, peer: int, times: Mapping[int, float]) -> None:
        """Record the post times of messages that `peer` sent to this rank, by number."""
        self._their_posts[peer].update(times)

    def drain(self) -> EpochTraffic:
        """Return the traffic since the last drain, and reset."""
        wire = skew = bubble = 0.0
        in_flight: list[tuple[float, float]] = []
        for r in self._receipts:
            posted = self._their_posts[r.peer].get(r.number, r.posted) if self.shared_clock else r.posted
            late = min(max(posted - r.wait_began, 0.0), r.wait_ended - r.wait_began)
            if r.staged:
                bubble += late
            else:
                skew += late
            wire += r.wait_ended - r.wait_began - late
            in_flight.append((posted, max(posted, r.arrived)))
        traffic = EpochTraffic(
            dict(self._bytes),
            self._metadata,
            self._messages,
            wire,
            skew,
            union_seconds(in_flight),
            bubble,
            dict(self._layer_bytes),
        )
        self._bytes, self._layer_bytes = defaultdict(int), defaultdict(int)
        self._posts = defaultdict(dict)
        for peer, times in self._their_posts.items():
            self._their_posts[peer] = {n: t for n, t in times.items() if n in self._outstanding[peer]}
        self._metadata = self._messages = 0
        self._receipts = []
        return traffic
