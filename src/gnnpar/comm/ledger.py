"""The record of every transfer: exact bytes by phase, and how long receivers waited and for what."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from gnnpar.comm.clock import union_seconds


class Receipt(NamedTuple):
    """One received message on the receiver's clock: posted, waited for from, there, wait over.

    `staged`: it crossed a boundary between pipeline stages, where waiting for the sender is a bubble.
    """

    peer: int
    posted: float
    wait_began: float
    arrived: float
    wait_ended: float
    staged: bool = False


@dataclass(frozen=True)
class EpochTraffic:
    """What one rank sent and waited for since the last drain.

    Units: bytes are payload plus metadata (`metadata` counts the latter again); seconds are wall time. `exposed_skew`
    is the part of waiting before the sender had posted, `bubble` the same of messages between pipeline stages,
    `exposed_wire` the rest; `comm_total` is the time with a
    transfer in flight towards this rank, overlapped or not.
    """

    bytes: dict[str, int]
    metadata: int
    messages: int
    exposed_wire: float
    exposed_skew: float
    comm_total: float
    bubble: float = 0.0
    layer_bytes: dict[int, int] = field(default_factory=dict[int, int])  # of `bytes`, what aggregations sent, by layer


@dataclass
class Ledger:
    """Filled by one rank's communicator, drained by the runner once per epoch.

    `shared_clock`: do all ranks read the same monotonic clock (one host)? Otherwise skew cannot be told from wire.
    """

    shared_clock: bool = True
    _bytes: dict[str, int] = field(default_factory=lambda: defaultdict(int))
    _layer_bytes: dict[int, int] = field(default_factory=lambda: defaultdict(int))
    _metadata: int = 0
    _messages: int = 0
    _receipts: list[Receipt] = field(default_factory=list[Receipt])
    _posts: dict[int, list[float]] = field(default_factory=lambda: defaultdict(list))
    _their_posts: dict[int, Sequence[float]] = field(default_factory=dict[int, Sequence[float]])

    def sent(self, phase: str, nbytes: int, *, peer: int, layer: int) -> None:
        """A message to `peer` is being posted now."""
        self._bytes[phase] += nbytes
        self._layer_bytes[layer] += nbytes
        self._messages += 1
        self._posts[peer].append(now())

    def counted(self, phase: str, nbytes: int) -> None:
        """Bytes that a collective moves, without a single peer."""
        self._bytes[phase] += nbytes

    def add_metadata(self, nbytes: int) -> None:
        self._metadata += nbytes

    def received(self, receipt: Receipt) -> None:
        self._receipts.append(receipt)

    @property
    def posts(self) -> Mapping[int, Sequence[float]]:
        """peer -> post times of the messages sent to it since the last drain, in order."""
        return self._posts

    def learn_posts(self, peer: int, times: Sequence[float]) -> None:
        """The post times of the messages `peer` sent to this rank, in order."""
        self._their_posts[peer] = times

    def drain(self) -> EpochTraffic:
        """Everything since the last drain; starts afresh."""
        wire = skew = bubble = 0.0
        in_flight: list[tuple[float, float]] = []
        taken: dict[int, int] = defaultdict(int)
        for r in self._receipts:
            theirs = self._their_posts.get(r.peer, ())
            posted = theirs[taken[r.peer]] if self.shared_clock and taken[r.peer] < len(theirs) else r.posted
            taken[r.peer] += 1
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
        self._posts, self._their_posts = defaultdict(list), {}
        self._metadata = self._messages = 0
        self._receipts = []
        return traffic


def now() -> float:
    """Seconds on the host's monotonic clock, the same for every process of the host."""
    return time.monotonic()
