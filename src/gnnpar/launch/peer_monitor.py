"""One quiet TCP connection from every rank to rank 0, by which all learn within seconds that a rank or a host is lost.

gloo itself notices a peer whose process ended, in a text that names nobody, and a host that is cut off not at all. Here
the kernels keep asking each other (TCP keepalive): they answer also while a process computes, holds Python's lock or is
stopped, so that slowness is never taken for a loss. Rank 0 learns of all and informs the others.

Nothing of a connection is read before both sides have proved the key of the meeting, each for a challenge of the other;
every line after that is proved again, with its number, so that none can be made, changed or repeated by a stranger.
"""

from __future__ import annotations

import errno
import hmac
import json
import secrets
import selectors
import socket
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field

from gnnpar.comm.authentication import NotOfThisRun, proof
from gnnpar.durable import JsonDict, JsonObject, parse_json
from gnnpar.launch.monitor import why_killed
from gnnpar.launch.rendezvous import JoinedWorld

_GATHER_SECONDS = 1.0  # losses of one cause come one after the other
_TICK_SECONDS = 0.2
_LINE = 1 << 16
_GREETING_LINE = 256
_GREETING_SECONDS = 30.0  # rank 0 prepares the run before it listens
_MOST_STRANGERS = 64
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
        self._channel: Channel | None = None
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
        connection = socket.create_connection((hub.address, hub.port), max(self._seconds, _GREETING_SECONDS))
        self._channel = greet(connection, self._world.key, self._world.me)
        connection.settimeout(None)
        keep_alive(connection, self._seconds)
        return connection

    def _send(self, message: JsonObject) -> None:
        with self._sending, suppress(OSError):
            assert self._to_hub is not None
            assert self._channel is not None
            self._to_hub.sendall(self._channel.line(message))

    def _watch(self) -> None:
        failure = self._hub.watch(self._over) if self._hub is not None else self._listen()
        if failure is not None and not self._over.is_set():
            self.failure = failure
            self._ended.set()
            self._on_failure(failure)

    def _listen(self) -> PeerFailure | None:
        """What rank 0 says, or that it is lost."""
        assert self._to_hub is not None
        assert self._channel is not None
        reason = ""
        try:
            with self._to_hub.makefile("rb") as lines:
                while line := lines.readline(2 * _LINE):  # a longer one is cut, and proves nothing
                    message = self._channel.read(line)
                    if "bye" in message:
                        return None
                    home = message.get("reported_on")
                    return PeerFailure(message["failed"], tuple(message["lost"]), home and (home[0], home[1]))
        except NotOfThisRun:  # cut off in the middle of a line
            pass
        except OSError as error:
            reason = _reason(error, self._seconds)
        return PeerFailure(lost_line(self._world, {0: reason or _ended()}, self._seconds), (0,))


@dataclass(eq=False)
class _Peer:
    connection: socket.socket
    challenge: bytes
    since: float
    rank: int | None = None
    channel: Channel | None = None
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
    complete: bool = False  # every rank has come
    sending: threading.Lock = field(default_factory=threading.Lock)

    def watch(self, over: threading.Event) -> PeerFailure | None:
        """Until this rank is done, or the run cannot go on."""
        began, first_loss = time.monotonic(), None
        self.world.listener.setblocking(False)
        with selectors.DefaultSelector() as selector:
            selector.register(self.world.listener, selectors.EVENT_READ)
            while not over.is_set():
                for key, _ in selector.select(_TICK_SECONDS):
                    self._accept(selector) if key.data is None else self._receive(selector, key.data)
                self._drop_strangers(selector)
                if not self.complete and not self._absent():  # a flood would take time from the training
                    self.complete = True
                    selector.unregister(self.world.listener)
                    self.world.listener.close()
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
            strangers = [peer for peer in self.peers if peer.rank is None]
            if len(strangers) > _MOST_STRANGERS + len(self.world.members):
                self._drop(selector, strangers[0])  # who has been silent longest: a rank answers at once
            connection.setblocking(False)
            keep_alive(connection, self.seconds)
            peer = _Peer(connection, secrets.token_hex(16).encode(), time.monotonic())
            self.peers.append(peer)
            selector.register(connection, selectors.EVENT_READ, peer)
            connection.send(peer.challenge + b"\n")

    def _drop_strangers(self, selector: selectors.BaseSelector) -> None:
        """Connections that have not proved anything in time."""
        for peer in [p for p in self.peers if p.rank is None and time.monotonic() - p.since > _GREETING_SECONDS]:
            self._drop(selector, peer)

    def _drop(self, selector: selectors.BaseSelector, peer: _Peer) -> None:
        with suppress(KeyError, ValueError):  # it was dropped before
            selector.unregister(peer.connection)
        peer.connection.close()
        if peer in self.peers:
            self.peers.remove(peer)

    def _receive(self, selector: selectors.BaseSelector, peer: _Peer) -> None:
        if peer not in self.peers:  # dropped since it was found to have sent something
            return
        try:
            data, reason = peer.connection.recv(_LINE), _ended()
        except BlockingIOError:
            return
        except OSError as error:
            data, reason = b"", _reason(error, self.seconds)
        if not data:
            if peer.rank is None:
                self._drop(selector, peer)
                return
            selector.unregister(peer.connection)
            if peer.rank is not None and not peer.done:
                self.lost[peer.rank] = reason
            return
        peer.received += data
        *lines, peer.received = peer.received.split(b"\n")
        try:
            if len(peer.received) > (_LINE if peer.rank is not None else _GREETING_LINE):
                raise NotOfThisRun("a line without an end")
            for line in lines:
                self._take(peer, line)
        except (NotOfThisRun, OSError) as error:
            self._drop(selector, peer)
            if peer.rank is not None and not peer.done:
                carried = "its connection carried what it has not sent"
                self.lost[peer.rank] = _reason(error, self.seconds) if isinstance(error, OSError) else carried

    def _take(self, peer: _Peer, line: bytes) -> None:
        """NotOfThisRun where a line proves nothing."""
        if peer.rank is None or peer.channel is None:
            peer.rank, peer.channel, answer = admit(line, self.world.key, peer.challenge, len(self.world.members))
            peer.connection.send(answer)
            return
        message = peer.channel.read(line)
        if "bye" in message:
            peer.done = True
        elif "failed" in message:
            peer.done = True
            self.failed = self.failed or (peer.rank, str(message["failed"]))

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
        with self.sending:  # the thread that watches and the main thread: numbers go out in order
            for peer in list(self.peers):
                if peer.channel is not None:
                    with suppress(OSError):
                        peer.connection.send(peer.channel.line(message))

    def close(self) -> None:
        self.world.listener.close()
        for peer in self.peers:
            peer.connection.close()


class Channel:
    """Lines of one connection, each with the proof of its number and its direction."""

    def __init__(self, session: bytes, *, mine: bytes, theirs: bytes) -> None:
        self._session, self._mine, self._theirs, self._sent, self._read = session, mine, theirs, 0, 0

    def line(self, message: JsonObject) -> bytes:
        """The next line to send."""
        data = json.dumps(message).encode()
        self._sent += 1
        return proof(self._session, self._mine, b"%d" % self._sent, data).hex().encode() + b" " + data + b"\n"

    def read(self, line: bytes) -> JsonDict:
        """The next line that has come. Raises NotOfThisRun before it is parsed."""
        given, _, data = line.rstrip(b"\n").partition(b" ")
        self._read += 1
        expected = proof(self._session, self._theirs, b"%d" % self._read, data).hex().encode()
        if not hmac.compare_digest(given, expected):
            raise NotOfThisRun("a line that proves nothing")
        return parse_json(data)


def greet(connection: socket.socket, key: bytes, rank: int) -> Channel:
    """A rank's side of the greeting with rank 0. Raises NotOfThisRun where the other side is another's."""
    challenge, nonce, number = _greeting_line(connection), secrets.token_hex(16).encode(), b"%d" % rank
    proven = proof(key, b"rank", challenge, nonce, number).hex().encode()
    connection.sendall(b" ".join((number, nonce, proven)) + b"\n")
    expected = proof(key, b"hub", challenge, nonce, number).hex().encode()
    if not hmac.compare_digest(_greeting_line(connection), expected):
        raise NotOfThisRun("who listens at rank 0's address does not prove the key of this run")
    return Channel(proof(key, b"session", challenge, nonce), mine=number, theirs=b"hub")


def admit(line: bytes, key: bytes, challenge: bytes, num_ranks: int) -> tuple[int, Channel, bytes]:
    """Rank 0's side: the rank, its channel and the answer to it. Raises NotOfThisRun."""
    number, nonce, given = [*line.split(b" "), b"", b""][:3]
    expected = proof(key, b"rank", challenge, nonce, number).hex().encode()
    if not hmac.compare_digest(given, expected) or not 0 < int(number) < num_ranks:
        raise NotOfThisRun("a greeting that proves nothing")
    channel = Channel(proof(key, b"session", challenge, nonce), mine=b"hub", theirs=number)
    return int(number), channel, proof(key, b"hub", challenge, nonce, number).hex().encode() + b"\n"


def _greeting_line(connection: socket.socket) -> bytes:
    """Within the connection's time for one answer, however slowly the other side writes."""
    data, began, patience = b"", time.monotonic(), connection.gettimeout()
    while not data.endswith(b"\n"):
        late = patience is not None and time.monotonic() - began > patience
        if late or len(data) > _GREETING_LINE or not (more := connection.recv(1)):
            raise NotOfThisRun("who listens at rank 0's address does not greet as rank 0 does")
        data += more
    return data[:-1]


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
    return f"ended without a message (killed, or {why_killed()}?)"


def _reason(error: OSError, seconds: float) -> str:
    if error.errno in _ENDED:
        return _ended()
    return f"no answer for {seconds:g} s (comm.lost_seconds); is the host down, or a link cut?"
