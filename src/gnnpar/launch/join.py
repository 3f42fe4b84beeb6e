"""Join ranks that torchrun, srun or a user started, and end all of them when one is lost.

Ranks compare what must agree in torch's TCPStore before a process group exists. Afterwards every rank keeps one idle
connection to rank 0, over which the kernel's keepalive tells a lost host from a slow one.
"""

from __future__ import annotations

import errno
import json
import os
import selectors
import socket
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING

from torch.distributed import PrefixStore, Store, TCPStore  # pyright: ignore[reportPrivateImportUsage]

from gnnpar.comm import interfaces
from gnnpar.comm.interfaces import JoinError
from gnnpar.comm.world import Interrupted, Outcome
from gnnpar.files import JsonDict
from gnnpar.launch.failures import failure_of, why_killed
from gnnpar.settings import Comm, ConfigError
from gnnpar.track.console import complain

if TYPE_CHECKING:
    from gnnpar.launch.launch import RunHooks

_POLL_SECONDS, _READ_SECONDS = 0.1, 1.0  # rank 0 holds the store for so long after it has written why all end
_TELL_SECONDS = 10.0  # a rank that refuses waits so long for ranks that start later
_GATHER_SECONDS = 1.0  # losses of one cause, and the reason that a failed rank gives, come within it
_GRACE_SECONDS = 3.0  # for the main thread to end in order before the watcher ends the process
_SILENT = (errno.ETIMEDOUT, errno.EHOSTUNREACH, errno.ENETUNREACH, errno.EHOSTDOWN)
_NO_ANSWER = "no answer for"
Record = JsonDict


class PeerLost(Exception):
    """The run cannot go on. `quiet`: another rank of this host prints the line."""

    def __init__(self, line: str, quiet: bool = False, traceback: str = "") -> None:
        super().__init__(line, quiet, traceback)  # from which it is unpickled
        self.line, self.quiet, self.traceback = line, quiet, traceback

    def __str__(self) -> str:
        return self.line


@dataclass(frozen=True)
class Joined:
    """Ranks that agree. `hosts`: 'NAME (ADDRESS)' by rank; `peers`: connections by rank: of rank 0 to all others, of
    others to rank 0; `folder`: of the run, as rank 0 names it; `restarts`: how often torchrun has started all again."""

    rank: int
    hosts: list[str]
    store: Store
    peers: Mapping[int, socket.socket]
    folder: Path
    restarts: int


def join(hooks: RunHooks, seconds: float) -> Joined:
    """Wait `seconds` at most for all ranks of the environment, and compare `hooks.agreed()`. Collective.

    Raises PeerLost if one does not come or differs, ConfigError if one refuses its settings."""
    marker = hooks.run_dir.absolute() / f".joining-{uuid.uuid4().hex[:8]}"
    try:
        if os.environ["RANK"] == "0":
            marker.parent.mkdir(parents=True, exist_ok=True)
            marker.touch()
        return _bounded(seconds, lambda: _join(seconds, dict(hooks.agreed()), marker, hooks.unseen))
    except JoinError as error:
        if error.refused:
            raise ConfigError(str(error)) from error
        raise PeerLost(str(error), error.shared and os.environ.get("LOCAL_RANK", "0") != "0") from error
    finally:
        if os.environ["RANK"] == "0":
            marker.unlink(missing_ok=True)


def refusal(error: ValueError, seconds: float = Comm().connect_seconds) -> ValueError:
    """Tell the other ranks why this one cannot run. Return the error to raise: this one, or that of another rank."""
    env, seconds = os.environ, min(seconds, _TELL_SECONDS)
    if "RANK" not in env or env.get("WORLD_SIZE", "1") == "1" or not env.get("MASTER_ADDR"):
        return error
    line = f"rank {env['RANK']} on {socket.gethostname()}: {error}"
    try:
        _bounded(seconds, lambda: _join(seconds, {}, Path(), lambda _: "", line))
    except ValueError:
        return error
    except JoinError as told:
        return ConfigError(str(told)) if told.refused and not str(told).endswith(f": {error}") else error
    return error


def _bounded(seconds: float, act: Callable[[], Joined]) -> Joined:
    """Call `act` in a thread: torch's store client waits without end for an answer of a server that is no store."""
    done: list[Joined | BaseException] = []

    def guarded() -> None:
        try:
            done.append(act())
        except BaseException as error:
            done.append(error)

    thread = threading.Thread(target=guarded, name="join", daemon=True)
    thread.start()
    thread.join(2 * seconds + _TELL_SECONDS)
    found = done[0] if done else JoinError(f"{_place()} does not answer as rank 0 would; is another program there?")
    if isinstance(found, BaseException):
        raise found
    return found


def _place() -> str:
    env = os.environ
    where = f"MASTER_ADDR={env.get('MASTER_ADDR', '')} MASTER_PORT={env.get('MASTER_PORT', '')}"
    return f"rank {env['RANK']} on {socket.gethostname()}: {where}"


def _join(seconds: float, about: dict[str, str], marker: Path, unseen: Callable[[Path], str], line: str = "") -> Joined:
    """Join, or raise the JoinError that all ranks raise. `line`: why this one refuses."""
    env, end, refused = os.environ, time.monotonic() + seconds, bool(line)
    rank, size, master, port = int(env["RANK"]), int(env["WORLD_SIZE"]), env.get("MASTER_ADDR"), env.get("MASTER_PORT")
    if not master or not port:
        raise JoinError(f"{_place()}: set them to the address of rank 0's host and to a free port there")
    by_agent = env.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    name, mine, there = _way(master, int(port), end)
    try:
        interfaces.check_asked()
        if not interfaces.asked():
            env[interfaces.VARIABLE] = name
    except JoinError as error:
        line = line or f"rank {rank}: {error}"
    listener = socket.create_server((mine, 0), family=_family(mine), backlog=size)
    base = _store(
        master if by_agent else mine if rank == 0 else there, int(port), end, holds=rank == 0 and not by_agent
    )
    store = PrefixStore("gnnpar", base)
    me: Record = {"id": uuid.uuid4().hex, "line": line, "refused": refused, "host": f"{socket.gethostname()} ({mine})"}
    me |= {"about": about | {"WORLD_SIZE": str(size)}, "restarts": int(env.get("TORCHELASTIC_RESTART_COUNT", "0"))}
    try:
        if rank == 0:
            verdict, peers = _lead(
                store, me | {"hub": listener.getsockname()[:2], "marker": str(marker)}, listener, end
            )
        else:
            verdict, peers = _follow(store, me, end, unseen, by_agent=by_agent)
    except RuntimeError as error:  # of the store
        raise JoinError(f"{_place()}: the store is gone while ranks were joining; rank 0's host says why") from error
    if verdict["line"]:
        raise JoinError(verdict["line"], refused=verdict["refused"], shared=True)
    hosts, restarts = ([verdict["ranks"][str(each)][key] for each in range(size)] for key in ("host", "restarts"))
    return Joined(rank, hosts, PrefixStore(verdict["id"], base), peers, Path(verdict["marker"]).parent, max(restarts))


def _way(master: str, port: int, end: float) -> tuple[str, str, str]:
    """As `interfaces.towards`; the loopback if all ranks are on this host. A name may be known late, to pods say."""
    env, inside = os.environ, master in ("localhost", "::1") or master.startswith("127.")
    if env.get("LOCAL_WORLD_SIZE", env["WORLD_SIZE"] if inside else "") == env["WORLD_SIZE"]:
        return interfaces.loopback(), "127.0.0.1", "127.0.0.1"
    while True:
        try:
            return interfaces.towards(master, port)
        except OSError as error:
            if isinstance(error, JoinError) or time.monotonic() > end:
                raise JoinError(f"{_place()}: {error.strerror or error}; give the address of rank 0's host") from error
        time.sleep(1.0)


def _family(address: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in address else socket.AF_INET


def _store(address: str, port: int, end: float, *, holds: bool) -> Store:
    """The store, which rank 0 holds at one address: torch's own listens on all interfaces."""
    left = timedelta(seconds=max(1.0, end - time.monotonic()))
    listening = None
    if holds:
        try:
            listening = socket.create_server((address, port), family=_family(address), backlog=1024).detach()
        except OSError as error:
            used = "is taken by another program" if error.errno == errno.EADDRINUSE else str(error.strerror)
            raise JoinError(f"{_place()}: the port {used} there; give all ranks another one") from error
    while not holds:  # torch's client would print its stack
        try:
            socket.create_connection((address, port), 5.0).close()
            break
        except OSError as error:
            if time.monotonic() > end:
                why = f"within comm.connect_seconds ({error.strerror or error})"
                raise JoinError(
                    f"{_place()} is not reached {why}: is rank 0 started there, and no firewall between?"
                ) from error
        time.sleep(_POLL_SECONDS)
    return TCPStore(
        address, port, None, holds, left, wait_for_workers=False, multi_tenant=not holds, master_listen_fd=listening
    )


def _lead(store: Store, me: Record, listener: socket.socket, end: float) -> tuple[Record, dict[int, socket.socket]]:
    """Rank 0: wait for the records of all ranks, and write what all go by. torchrun's store keeps earlier ones."""
    size, line, refused = int(me["about"]["WORLD_SIZE"]), me["line"], me["refused"]
    store.set("0", json.dumps(me))
    ranks: dict[str, Record] = {"0": me}
    while True:
        missing = [each for each in map(str, range(size)) if each not in ranks]
        for each in missing:
            if store.check([each]) and (record := json.loads(store.get(each)))["to"] == me["id"]:
                ranks[each] = record
                if record["line"] and not line:
                    line, refused = record["line"], record["refused"]
        missing = [each for each in missing if each not in ranks]
        if missing and not line and time.monotonic() > end:
            those = f"rank{'s' if len(missing) > 1 else ''} {', '.join(missing[:9])} of {size}"
            line = f"{_place()}: {those} did not come within comm.connect_seconds: started, with this address and port?"
            end = 0.0
        verdict = {"id": me["id"], "line": line, "refused": refused, "marker": me["marker"], "ranks": ranks}
        if line:
            end = min(end, time.monotonic() + _TELL_SECONDS)
            store.set(f"verdict/{me['id']}", json.dumps(verdict))
            if not missing or time.monotonic() > end:
                time.sleep(_READ_SECONDS)
                return verdict, {}
        elif not missing:
            peers = _accept(listener, {ranks[str(each)]["id"]: each for each in range(1, size)})
            store.set(f"verdict/{me['id']}", json.dumps(verdict))
            return verdict, peers
        time.sleep(_POLL_SECONDS)


def _accept(listener: socket.socket, ids: Mapping[str, int]) -> dict[int, socket.socket]:
    """The connections of all other ranks, which have been made."""
    peers: dict[int, socket.socket] = {}
    listener.settimeout(_TELL_SECONDS)
    while len(peers) < len(ids):
        peer, _ = listener.accept()
        peer.settimeout(_TELL_SECONDS)
        with suppress(OSError, KeyError):
            peers[ids[peer.recv(32).decode(errors="replace")]] = peer
    return peers


def _follow(
    store: Store, me: Record, end: float, unseen: Callable[[Path], str], *, by_agent: bool
) -> tuple[Record, dict[int, socket.socket]]:
    """Another rank: compare itself with rank 0, connect to it and wait for the verdict."""
    rank, first, hub, why = os.environ["RANK"], Record(), None, "rank 0 does not come"
    while time.monotonic() < end + _TELL_SECONDS:
        told: Record = json.loads(store.get("0")) if store.check(["0"]) else first
        if told.get("id") != first.get("id"):
            try:
                hub = socket.create_connection(tuple(told["hub"]), _TELL_SECONDS)
                hub.sendall(me["id"].encode())
                first = told
            except OSError as error:  # of an earlier start, or closed to this host
                why = f"rank 0 at {':'.join(map(str, told['hub']))}: {error.strerror or error}; is a firewall between?"
            else:
                line = me["line"] or told["line"] or _differing(me, told) or _unseen(Path(told["marker"]), unseen)
                store.set(rank, json.dumps(me | {"to": told["id"], "line": line, "about": {}}))
        if told and store.check([f"verdict/{told['id']}"]):
            verdict: Record = json.loads(store.get(f"verdict/{told['id']}"))
            if hub is not None and verdict["ranks"].get(rank, {}).get("id") == me["id"]:
                return verdict, {0: hub}
            if not verdict["line"] and not by_agent:
                raise JoinError(f"{_place()}: RANK={rank} is taken twice, or another run has this port")
        time.sleep(_POLL_SECONDS)
    raise JoinError(f"{_place()}: {why}")


def _unseen(marker: Path, unseen: Callable[[Path], str]) -> str:
    """What is wrong if this rank does not see rank 0's file in the folder of the run."""
    with suppress(OSError):
        os.listdir(marker.parent)  # file systems of networks look again
    return "" if marker.exists() else unseen(marker.parent)


def _differing(me: Record, first: Record) -> str:
    """'rank 3 on b has optim.lr=0.1, rank 0 on a has optim.lr=0.01', or ''."""
    mine, other = me["about"], first["about"]
    for key in sorted(mine.keys() | other.keys()):
        if mine.get(key) != other.get(key):
            has = [f"{key}={about.get(key, 'nothing')}" for about in (mine, other)]
            return (
                f"rank {os.environ['RANK']} on {me['host']} has {has[0]}, rank 0 on {first['host']} has {has[1]}: "
                "start all ranks with the same command and the same versions"
            )
    return ""


@contextmanager
def watched(joined: Joined | None, hooks: RunHooks, seconds: float) -> Iterator[None]:
    """Inside, the loss of another rank ends this one, `seconds` after its host last answered. Raises PeerLost."""
    if joined is None:
        yield
        return
    watch = _Watch(joined, hooks, seconds)
    try:
        yield
        watch.say({})
    except Interrupted:
        watch.say({})
        raise
    except KeyboardInterrupt:
        watch.say(watch.failed("interrupted by a signal"))
        raise
    except Exception as error:
        raise watch.settled(error) from error
    finally:
        watch.ending.acquire(blocking=False)


class _Watch:
    """A thread that reads the idle connections. Each carries one message and its end; {} is a good end."""

    def __init__(self, joined: Joined, hooks: RunHooks, seconds: float) -> None:
        self.joined, self.hooks, self.seconds = joined, hooks, seconds
        self.failure: Record | None = None
        self.known, self.ending = threading.Event(), threading.Lock()  # who holds the lock ends this process
        for peer in joined.peers.values():
            peer.settimeout(None)
            peer.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            for option, value in (
                (socket.TCP_KEEPIDLE, seconds / 3),
                (socket.TCP_KEEPINTVL, seconds / 6),
                (socket.TCP_KEEPCNT, 4),
                (socket.TCP_USER_TIMEOUT, 1000 * seconds),
            ):
                peer.setsockopt(socket.IPPROTO_TCP, option, max(1, round(value)))
        threading.Thread(target=self._watch, name="peers", daemon=True).start()

    def say(self, message: Record) -> None:
        for peer in self.joined.peers.values():
            with suppress(OSError):  # it is gone, or has been told
                peer.sendall(json.dumps(message).encode() + b"\n")
                peer.shutdown(socket.SHUT_WR)

    def failed(self, reason: str) -> Record:
        """The message of this rank's own failure."""
        me = self.joined.rank
        return {"line": f"rank {me}: {reason}", "lost": [me], "host": self.joined.hosts[me]}

    def settled(self, error: Exception) -> PeerLost:
        """End in order: with this rank's own failure, which all are told, or the loss that made it fail."""
        mine = failure_of(self.joined.rank, error)
        if mine.secondary:
            self.known.wait(self.seconds + 4 * _GATHER_SECONDS)
        self.ending.acquire()  # never returns if the watcher was first
        if mine.secondary and self.failure is not None:
            if quiet := self._is_quiet(self.failure):
                time.sleep(_READ_SECONDS)  # the line of the rank that speaks comes first
            return PeerLost(self._line(self.failure), quiet)
        self.say(self.failed(mine.reason))
        return PeerLost(mine.line, traceback=mine.traceback)

    def _watch(self) -> None:
        silent: dict[int, str] = {}
        data, end = dict.fromkeys(self.joined.peers, b""), float("inf")
        with selectors.DefaultSelector() as selector:
            for rank, peer in self.joined.peers.items():
                selector.register(peer, selectors.EVENT_READ, rank)
            while selector.get_map() and time.monotonic() < end:
                for key, _ in selector.select(_POLL_SECONDS):
                    rank, gone = key.data, f"ended without a message (killed, or {why_killed()}?)"
                    try:
                        more = self.joined.peers[rank].recv(1 << 16)
                    except OSError as error:
                        more = b""
                        if error.errno in _SILENT:
                            gone = (
                                f"{_NO_ANSWER} {self.seconds:g} s (comm.lost_seconds); is the host down, or a link cut?"
                            )
                    data[rank] += more
                    if more:
                        continue
                    selector.unregister(key.fileobj)
                    message: Record | None = json.loads(data[rank]) if data[rank] else None
                    if message == {}:
                        continue
                    if message is None:
                        silent[rank] = gone
                    self.failure = self.failure or message
                    end = min(end, time.monotonic() + _GATHER_SECONDS)
        if self.failure is None and silent:
            self.failure = self._loss(silent)
        if self.failure is not None:
            if self.joined.rank == 0:
                self.say(self.failure)
            self.known.set()
            self._end(self.failure)

    def _loss(self, silent: dict[int, str]) -> Record:
        """'host node-b (10.0.0.2) with ranks 2, 3 is lost: ...'; ranks that ended alone are named alone."""
        hosts, lost, parts = self.joined.hosts, set(silent), list[str]()
        for host in dict.fromkeys(hosts[rank] for rank in sorted(silent)):
            there = [rank for rank, each in enumerate(hosts) if each == host]
            reason = next(silent[rank] for rank in there if rank in silent)
            elsewhere = host != hosts[self.joined.rank]
            gone = there if elsewhere and reason.startswith(_NO_ANSWER) else [rank for rank in there if rank in silent]
            lost |= set(gone)
            names = f"rank{'s' if len(gone) > 1 else ''} {', '.join(map(str, gone))}"
            whole = elsewhere and gone == there
            parts.append(f"host {host} with {names} is lost: {reason}" if whole else f"{names} on {host}: {reason}")
        return {"line": "; ".join(parts), "lost": sorted(lost), "host": None}

    def _line(self, failure: Record) -> str:
        return failure["line"] if failure["host"] else self.hooks.on_lost(failure["line"], self.joined.folder)

    def _is_quiet(self, failure: Record) -> bool:
        """Another rank of this host prints the line."""
        hosts, me = self.joined.hosts, self.joined.rank
        left = [rank for rank, host in enumerate(hosts) if host == hosts[me] and rank not in failure["lost"]]
        return failure["host"] == hosts[me] or left[:1] != [me]

    def _end(self, failure: Record) -> None:
        """End the process, whose main thread hangs in a transfer with a rank that is gone."""
        time.sleep(_GRACE_SECONDS)
        if not self.ending.acquire(blocking=False):
            return
        line = self._line(failure)
        if self.joined.rank == 0:
            self.hooks.on_end(Outcome("failed", line))
        if self._is_quiet(failure):
            time.sleep(_READ_SECONDS)
        else:
            complain(line)
        os._exit(1)
