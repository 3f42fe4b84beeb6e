"""One quiet TCP connection from every rank to rank 0, by which all learn within seconds that a rank or a host is lost.

gloo itself notices a peer whose process ended, in a text that names nobody, and a host that is cut off not at all. Here
the kernels keep asking each other (TCP keepalive): they answer also while a process computes, holds Python's lock or is
stopped, so that slowness is never taken for a loss. Rank 0 learns of all and informs the others.
"""

from __future__ import annotations

import errno
import json
import selectors
import socket
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field

from gnnpar.durable import JsonObject
from gnnpar.launch.rendezvous import JoinedWorld

_GATHER_SECONDS = 1.0  # losses of one cause come one after the other
_TICK_SECONDS = 0.2
_LINE = 1 << 16
_ENDED = (errno.ECONNRESET, errno.EPIPE, errno.ECONNABORTED)


@dataclass(frozen=True)
class PeerFailure:
    """Why the run cannot go on. `lost`: ranks that are gone. `reported_on`: the host that has reported the line."""

    line: str
    lost: tuple[int, ...]
    reported_on: tuple[str, str] | None = None


def keep_alive(connection: socket.socket, seconds: float) -> None:
    """The kernel asks the other side, and gives it up after so many seconds without an answer."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (
        ("TCP_KEEPIDLE", max(1, round(seconds / 3))),
        ("TCP_KEEPINTVL", max(1, round(seconds / 6))),
        ("TCP_KEEPCNT", 4),
        ("TCP_USER_TIMEOUT", round(1000 * seconds)),
    ):
        if hasattr(socket, name):  # Linux
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


class PeerMonitor:
    """`on_failure` is called once, in a thread of its own, when the run cannot go on."""

    def __init__(self, world: JoinedWorld, *, lost_seconds: float, on_failure: Callable[[PeerFailure], None]) -> None:
        self._world, self._seconds, self._on_failure = world, lost_seconds, on_failure
        self._over, self._ended = threading.Event(), threading.Event()
        self._sending = threading.Lock()
        self.failure: PeerFailure | None = None
        self._to_hub = None if world.me == 0 else self._connect()
        self._hub = _Hub(world, lost_seconds) if world.me == 0 else None
        self._thread = threading.Thread(target=self._watch, name="peers", daemon=True)
        self._thread.start()

    def wait(self) -> PeerFailure | None:
        """The failure that must be known soon, now that a peer was lost; None: nobody is."""
        self._ended.wait(self._seconds + 4 * _GATHER_SECONDS)
        return self.failure

    def report(self, line: str) -> None:
        """This rank ends, and why."""
        home = self._world.members[self._world.me].home
        if self._hub is not None:
            self._hub.send_all({"failed": line, "lost": [0], "reported_on": home})
        elif self._to_hub is not None:
            self._send({"failed": line})

    def close(self) -> None:
        """This rank is done: nobody is to miss it."""
        self._over.set()
        if self._hub is not None:
            self._hub.send_all({"bye": True})
            self._thread.join(2 * _TICK_SECONDS + _GATHER_SECONDS)
            self._hub.close()
        elif self._to_hub is not None:
            self._send({"bye": True})
            with suppress(OSError):
                self._to_hub.shutdown(socket.SHUT_WR)

    def _connect(self) -> socket.socket:
        hub = self._world.members[0]
        self._world.listener.close()
        connection = socket.create_connection((hub.address, hub.port), self._seconds)
        connection.settimeout(None)
        keep_alive(connection, self._seconds)
        connection.sendall(_line({"token": self._world.token, "rank": self._world.me}))
        return connection

    def _send(self, message: JsonObject) -> None:
        with self._sending, suppress(OSError):
            assert self._to_hub is not None
            self._to_hub.sendall(_line(message))

    def _watch(self) -> None:
        failure = self._hub.watch(self._over) if self._hub is not None else self._listen()
        if failure is not None and not self._over.is_set():
            self.failure = failure
            self._ended.set()
            self._on_failure(failure)

    def _listen(self) -> PeerFailure | None:
        """What rank 0 says, or that it is lost."""
        assert self._to_hub is not None
        reason = ""
        try:
            with self._to_hub.makefile("rb") as lines:
                for line in lines:
                    message = json.loads(line)
                    if "bye" in message:
                        return None
                    home = message.get("reported_on")
                    return PeerFailure(message["failed"], tuple(message["lost"]), home and (home[0], home[1]))
        except OSError as error:
            reason = _reason(error, self._seconds)
        except ValueError:  # cut off in the middle of a line
            pass
        return PeerFailure(lost_line(self._world, {0: reason or _ended()}, self._seconds), (0,))


@dataclass
class _Peer:
    connection: socket.socket
    rank: int | None = None
    received: bytes = b""
    done: bool = False


@dataclass
class _Hub:
    """Rank 0's ends."""

    world: JoinedWorld
    seconds: float
    peers: list[_Peer] = field(default_factory=list)
    lost: dict[int, str] = field(default_factory=dict)
    failed: tuple[int, str] | None = None

    def watch(self, over: threading.Event) -> PeerFailure | None:
        """Until this rank is done, or the run cannot go on."""
        began, first_loss = time.monotonic(), None
        self.world.listener.setblocking(False)
        with selectors.DefaultSelector() as selector:
            selector.register(self.world.listener, selectors.EVENT_READ)
            while not over.is_set():
                for key, _ in selector.select(_TICK_SECONDS):
                    self._accept(selector) if key.data is None else self._receive(selector, key.data)
                late = time.monotonic() - began > self.seconds
                if late and (absent := self._absent()):
                    self.lost |= dict.fromkeys(absent, f"it has not come within {self.seconds:g} s")
                first_loss = first_loss or (time.monotonic() if self.lost or self.failed else None)
                if first_loss is not None and time.monotonic() - first_loss > _GATHER_SECONDS:
                    return self._decide()
        return None

    def _absent(self) -> set[int]:
        return set(range(1, len(self.world.members))) - {peer.rank for peer in self.peers if peer.rank is not None}

    def _accept(self, selector: selectors.BaseSelector) -> None:
        with suppress(OSError):
            connection, _ = self.world.listener.accept()
            connection.setblocking(False)
            keep_alive(connection, self.seconds)
            peer = _Peer(connection)
            self.peers.append(peer)
            selector.register(connection, selectors.EVENT_READ, peer)

    def _receive(self, selector: selectors.BaseSelector, peer: _Peer) -> None:
        try:
            data, reason = peer.connection.recv(_LINE), _ended()
        except BlockingIOError:
            return
        except OSError as error:
            data, reason = b"", _reason(error, self.seconds)
        if not data:
            selector.unregister(peer.connection)
            if peer.rank is not None and not peer.done:
                self.lost[peer.rank] = reason
            return
        peer.received += data
        *lines, peer.received = peer.received.split(b"\n")
        for line in lines:
            self._take(peer, line)

    def _take(self, peer: _Peer, line: bytes) -> None:
        try:
            message = json.loads(line)
        except ValueError:
            return
        if peer.rank is None:
            if isinstance(message, dict) and message.get("token") == self.world.token:
                peer.rank = message["rank"]
        elif "bye" in message:
            peer.done = True
        elif "failed" in message:
            peer.done = True
            self.failed = self.failed or (peer.rank, message["failed"])

    def _decide(self) -> PeerFailure:
        """The line, sent to all that are left. A rank that gave a reason is the cause of whatever else was lost."""
        members = self.world.members
        if self.failed is not None:
            rank, line = self.failed
            failure = PeerFailure(line, (rank, *self.lost), members[rank].home)
        else:
            silent = {members[rank].home for rank, reason in self.lost.items() if reason != _ended()}
            reason = next((reason for reason in self.lost.values() if reason != _ended()), "")
            self.lost |= {m.rank: reason for m in members if m.rank and m.home in silent and m.rank not in self.lost}
            failure = PeerFailure(lost_line(self.world, self.lost, self.seconds), tuple(sorted(self.lost)))
        self.send_all({"failed": failure.line, "lost": failure.lost, "reported_on": failure.reported_on})
        return failure

    def send_all(self, message: JsonObject) -> None:
        for peer in list(self.peers):
            if peer.rank is not None:
                with suppress(OSError):
                    peer.connection.send(_line(message))

    def close(self) -> None:
        self.world.listener.close()
        for peer in self.peers:
            peer.connection.close()


def lost_line(world: JoinedWorld, lost: Mapping[int, str], seconds: float) -> str:
    """'host node-b (10.0.0.2) with ranks 2, 3 is lost: ...'; ranks of one host that ended are named alone."""
    here, parts = world.members[world.me], []
    for home in dict.fromkeys(world.members[rank].home for rank in sorted(lost)):
        there = [m for m in world.members if m.home == home]
        gone = [m.rank for m in there if m.rank in lost]
        reason = lost[gone[0]]
        if reason != _ended() and home != here.home:
            gone = [m.rank for m in there]
        numbers = f"rank{'s' if len(gone) > 1 else ''} {', '.join(map(str, gone))}"
        if len(gone) == len(there) and home != here.home:
            parts.append(f"host {there[0].place} with {numbers} is lost: {reason}")
        else:
            parts.append(f"{numbers} on {there[0].place} {'are' if len(gone) > 1 else 'is'} lost: {reason}")
    return "; ".join(parts)


def _ended() -> str:
    return "ended without a message (killed, or out of memory?)"


def _reason(error: OSError, seconds: float) -> str:
    if error.errno in _ENDED:
        return _ended()
    return f"no answer for {seconds:g} s (comm.lost_seconds); is the host down, or a link cut?"


def _line(message: JsonObject) -> bytes:
    return json.dumps(message).encode() + b"\n"
