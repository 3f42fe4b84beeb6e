"""One quiet TCP connection from every rank to rank 0, by which all learn within seconds that a rank or a host is lost.

gloo itself notices a peer whose process ended, in words that name nobody, and a host that is cut off not at all. Here
the kernels keep asking each other (TCP keepalive): they answer also while a process computes, holds Python's lock or is
stopped, so that slowness is never taken for a loss. Rank 0 hears of all, and tells the others.
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
from typing import Any

from gnnpar.launch.rendezvous import Met

_GATHER_SECONDS = 1.0  # losses of one cause come one after the other
_TICK_SECONDS = 0.2
_LINE = 1 << 16
_ENDED = (errno.ECONNRESET, errno.EPIPE, errno.ECONNABORTED)


@dataclass(frozen=True)
class Verdict:
    """Why the run cannot go on. `lost`: ranks that are gone. `said_on`: the host where the line stands already."""

    line: str
    lost: tuple[int, ...]
    said_on: tuple[str, str] | None = None


def keep_asking(connection: socket.socket, seconds: float) -> None:
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


class Ties:
    """`on_verdict` is called once, in a thread of its own, when the run cannot go on."""

    def __init__(self, met: Met, *, lost_seconds: float, on_verdict: Callable[[Verdict], None]) -> None:
        self._met, self._seconds, self._on_verdict = met, lost_seconds, on_verdict
        self._over, self._decided = threading.Event(), threading.Event()
        self._sending = threading.Lock()
        self.verdict: Verdict | None = None
        self._to_hub = None if met.me == 0 else self._tie()
        self._hub = _Hub(met, lost_seconds) if met.me == 0 else None
        self._thread = threading.Thread(target=self._watch, name="ties", daemon=True)
        self._thread.start()

    def wait(self) -> Verdict | None:
        """The verdict that must come now that a peer was lost; None: nobody is."""
        self._decided.wait(self._seconds + 4 * _GATHER_SECONDS)
        return self.verdict

    def tell(self, line: str) -> None:
        """This rank ends, and why."""
        home = self._met.members[self._met.me].home
        if self._hub is not None:
            self._hub.tell_all({"failed": line, "lost": [0], "said_on": home})
        elif self._to_hub is not None:
            self._send({"failed": line})

    def close(self) -> None:
        """This rank is done: nobody is to miss it."""
        self._over.set()
        if self._hub is not None:
            self._hub.tell_all({"bye": True})
            self._thread.join(2 * _TICK_SECONDS + _GATHER_SECONDS)
            self._hub.close()
        elif self._to_hub is not None:
            self._send({"bye": True})
            with suppress(OSError):
                self._to_hub.shutdown(socket.SHUT_WR)

    def _tie(self) -> socket.socket:
        hub = self._met.members[0]
        self._met.listener.close()
        connection = socket.create_connection((hub.address, hub.port), self._seconds)
        connection.settimeout(None)
        keep_asking(connection, self._seconds)
        connection.sendall(_line({"token": self._met.token, "rank": self._met.me}))
        return connection

    def _send(self, message: Mapping[str, Any]) -> None:
        with self._sending, suppress(OSError):
            assert self._to_hub is not None
            self._to_hub.sendall(_line(message))

    def _watch(self) -> None:
        found = self._hub.watch(self._over) if self._hub is not None else self._listen()
        if found is not None and not self._over.is_set():
            self.verdict = found
            self._decided.set()
            self._on_verdict(found)

    def _listen(self) -> Verdict | None:
        """What rank 0 says, or that it is lost."""
        assert self._to_hub is not None
        reason = ""
        try:
            with self._to_hub.makefile("rb") as lines:
                for line in lines:
                    message = json.loads(line)
                    if "bye" in message:
                        return None
                    said_on = message.get("said_on")
                    return Verdict(message["failed"], tuple(message["lost"]), said_on and (said_on[0], said_on[1]))
        except OSError as error:
            reason = _reason(error, self._seconds)
        except ValueError:  # cut off in the middle of a line
            pass
        return Verdict(lost_line(self._met, {0: reason or _ended()}, self._seconds), (0,))


@dataclass
class _Peer:
    connection: socket.socket
    rank: int | None = None
    heard: bytes = b""
    done: bool = False


@dataclass
class _Hub:
    """Rank 0's ends."""

    met: Met
    seconds: float
    peers: list[_Peer] = field(default_factory=list)
    lost: dict[int, str] = field(default_factory=dict)
    failed: tuple[int, str] | None = None

    def watch(self, over: threading.Event) -> Verdict | None:
        """Until this rank is done, or the run cannot go on."""
        began, first_loss = time.monotonic(), None
        self.met.listener.setblocking(False)
        with selectors.DefaultSelector() as selector:
            selector.register(self.met.listener, selectors.EVENT_READ)
            while not over.is_set():
                for key, _ in selector.select(_TICK_SECONDS):
                    self._accept(selector) if key.data is None else self._hear(selector, key.data)
                late = time.monotonic() - began > self.seconds
                if late and (absent := self._absent()):
                    self.lost |= dict.fromkeys(absent, f"it has not come within {self.seconds:g} s")
                first_loss = first_loss or (time.monotonic() if self.lost or self.failed else None)
                if first_loss is not None and time.monotonic() - first_loss > _GATHER_SECONDS:
                    return self._decide()
        return None

    def _absent(self) -> set[int]:
        return set(range(1, len(self.met.members))) - {peer.rank for peer in self.peers if peer.rank is not None}

    def _accept(self, selector: selectors.BaseSelector) -> None:
        with suppress(OSError):
            connection, _ = self.met.listener.accept()
            connection.setblocking(False)
            keep_asking(connection, self.seconds)
            peer = _Peer(connection)
            self.peers.append(peer)
            selector.register(connection, selectors.EVENT_READ, peer)

    def _hear(self, selector: selectors.BaseSelector, peer: _Peer) -> None:
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
        peer.heard += data
        *lines, peer.heard = peer.heard.split(b"\n")
        for line in lines:
            self._take(peer, line)

    def _take(self, peer: _Peer, line: bytes) -> None:
        try:
            message = json.loads(line)
        except ValueError:
            return
        if peer.rank is None:
            if isinstance(message, dict) and message.get("token") == self.met.token:
                peer.rank = message["rank"]
        elif "bye" in message:
            peer.done = True
        elif "failed" in message:
            peer.done = True
            self.failed = self.failed or (peer.rank, message["failed"])

    def _decide(self) -> Verdict:
        """The line, told to all that are left. A rank that said why is the cause of whatever else was lost."""
        members = self.met.members
        if self.failed is not None:
            rank, line = self.failed
            found = Verdict(line, (rank, *self.lost), members[rank].home)
        else:
            silent = {members[rank].home for rank, reason in self.lost.items() if reason != _ended()}
            reason = next((reason for reason in self.lost.values() if reason != _ended()), "")
            self.lost |= {m.rank: reason for m in members if m.rank and m.home in silent and m.rank not in self.lost}
            found = Verdict(lost_line(self.met, self.lost, self.seconds), tuple(sorted(self.lost)))
        self.tell_all({"failed": found.line, "lost": found.lost, "said_on": found.said_on})
        return found

    def tell_all(self, message: Mapping[str, Any]) -> None:
        for peer in list(self.peers):
            if peer.rank is not None:
                with suppress(OSError):
                    peer.connection.send(_line(message))

    def close(self) -> None:
        self.met.listener.close()
        for peer in self.peers:
            peer.connection.close()


def lost_line(met: Met, lost: Mapping[int, str], seconds: float) -> str:
    """'host node-b (10.0.0.2) with ranks 2, 3 is lost: ...'; ranks of one host that ended are named alone."""
    here, parts = met.members[met.me], []
    for home in dict.fromkeys(met.members[rank].home for rank in sorted(lost)):
        there = [m for m in met.members if m.home == home]
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
    return "ended without a word (killed, or out of memory?)"


def _reason(error: OSError, seconds: float) -> str:
    if error.errno in _ENDED:
        return _ended()
    return f"no answer for {seconds:g} s (comm.lost_seconds); is the host down, or a link cut?"


def _line(message: Mapping[str, Any]) -> bytes:
    return json.dumps(message).encode() + b"\n"
