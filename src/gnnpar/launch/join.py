"""Join ranks that torchrun, srun or a user started, and end all of them when one is lost.

Rank 0 publishes an address in torch's TCPStore. Every other rank connects to it, says what must agree, and hears the
verdict, before a process group exists. The connection stays: the kernel's keepalive tells a lost host from a slow one.
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
from gnnpar.launch.failures import failure_of
from gnnpar.settings import Comm, ConfigError
from gnnpar.track.console import complain

if TYPE_CHECKING:
    from gnnpar.launch.launch import RunHooks

_POLL_SECONDS = 0.1
_READ_SECONDS = 1.0  # for the line of another rank of this host to come first
_TELL_SECONDS = 10.0  # a refusal waits so long for ranks that start later
_GATHER_SECONDS = 1.0  # losses of one cause, and the reason of a failed rank, arrive within it
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
    """Ranks that agree. `hosts`: 'NAME (ADDRESS)' by rank. `peers`: rank 0's connections to all, the others' to rank 0.
    `folder`: rank 0's run folder. `restarts`: by torchrun, so far."""

    rank: int
    hosts: list[str]
    store: Store
    peers: Mapping[int, socket.socket]
    folder: Path
    restarts: int


def join(hooks: RunHooks, seconds: float) -> Joined:
    """Wait at most `seconds` for all ranks, and compare `hooks.agreed()`. Collective.

    Raises PeerLost if a rank does not come or differs, ConfigError if a rank refuses its settings."""
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
    """Call `act` in a thread: torch's store client waits forever for a server that is no store."""
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
    me: Record = {"rank": rank, "line": line, "refused": refused, "host": f"{socket.gethostname()} ({mine})"}
    me |= {"about": about | {"WORLD_SIZE": str(size)}, "restarts": int(env.get("TORCHELASTIC_RESTART_COUNT", "0"))}
    base = _store(
        master if by_agent else mine if rank == 0 else there, int(port), end, holds=rank == 0 and not by_agent
    )
    store = PrefixStore("gnnpar", base)
    try:
        if rank == 0:
            verdict, peers = _lead(store, me, mine, size, marker, end)
        else:
            verdict, peers = _follow(store, me, end, unseen, by_agent=by_agent)
    except RuntimeError as error:  # of the store
        raise JoinError(f"{_place()}: the store is gone while ranks were joining; rank 0's host says why") from error
    if verdict["line"]:
        raise JoinError(verdict["line"], refused=verdict["refused"], shared=True)
    folder = Path(verdict["marker"]).parent
    return Joined(rank, verdict["hosts"], PrefixStore(verdict["id"], base), peers, folder, verdict["restarts"])


def _way(master: str, port: int, end: float) -> tuple[str, str, str]:
    """As `interfaces.towards`; the loopback if all ranks are on this host. The name of a pod may be known late."""
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
    """Connect to the store. Rank 0 `holds` it and listens on one address; torch alone would listen on all."""
    left = timedelta(seconds=max(1.0, end - time.monotonic()))
    if holds:
        try:
            listening = socket.create_server((address, port), family=_family(address), backlog=1024).detach()
        except OSError as error:
            used = "is taken by another program" if error.errno == errno.EADDRINUSE else str(error.strerror)
            raise JoinError(f"{_place()}: the port {used} there; give all ranks another one") from error
        return TCPStore(address, port, None, True, left, wait_for_workers=False, master_listen_fd=listening)
    while True:  # torch's client would print its stack
        try:
            socket.create_connection((address, port), 5.0).close()
            return TCPStore(address, port, None, False, left, wait_for_workers=False, multi_tenant=True)
        except OSError as error:
            if time.monotonic() > end:
                why = f"within comm.connect_seconds ({error.strerror or error})"
                raise JoinError(
                    f"{_place()} is not reached {why}: is rank 0 started there, and no firewall between?"
                ) from error
        time.sleep(_POLL_SECONDS)


def _send(peer: socket.socket, message: Record) -> None:
    peer.sendall(json.dumps(message).encode() + b"\n")


def _receive(peer: socket.socket) -> Record:
    """Read one message, and no byte of the next one. Raises ValueError at the end of the connection."""
    with peer.makefile("rb", buffering=0) as file:
        return json.loads(file.readline())


def _lead(
    store: Store, me: Record, address: str, size: int, marker: Path, end: float
) -> tuple[Record, dict[int, socket.socket]]:
    """Receive the records of all ranks on rank 0, and send the verdict. A refusal waits for ranks that start later."""
    own = uuid.uuid4().hex
    line, refused, ranks, peers = me["line"], me["refused"], {0: me}, dict[int, socket.socket]()
    with socket.create_server((address, 0), family=_family(address), backlog=size) as listener:
        # torchrun's store keeps the address of an earlier attempt until now
        store.set("rank 0", json.dumps({"id": own, "hub": listener.getsockname()[:2], "marker": str(marker)}))
        while set(range(size)) - ranks.keys():
            if line:
                end = min(end, time.monotonic() + _TELL_SECONDS)
            try:
                listener.settimeout(max(0.01, end - time.monotonic()))
                peer, _ = listener.accept()
            except TimeoutError:
                break
            peer.settimeout(_TELL_SECONDS)
            with suppress(OSError, ValueError):  # no rank, or one that is gone
                other = _receive(peer)
                if other["rank"] in ranks:
                    twice = f"{_place()}: RANK={other['rank']} is taken twice, or another run has this port"
                    _send(peer, {"line": twice, "refused": False})
                    continue
                ranks[other["rank"]], peers[other["rank"]] = other, peer
                if found := "" if line else other["line"] or _differing(other, me):
                    line, refused = found, other["refused"]
    if missing := [str(each) for each in range(size) if each not in ranks]:
        those = f"rank{'s' if len(missing) > 1 else ''} {', '.join(missing[:9])} of {size}"
        came = "did not come within comm.connect_seconds: started, with this address and port?"
        line = line or f"{_place()}: {those} {came}"
    verdict = {"id": own, "line": line, "refused": refused, "marker": str(marker)}
    if not line:
        hosts, restarts = ([ranks[each][key] for each in range(size)] for key in ("host", "restarts"))
        verdict |= {"hosts": hosts, "restarts": max(restarts)}
        store.set(own, "joined")
    for peer in peers.values():
        with suppress(OSError):
            _send(peer, verdict)
    return verdict, peers


def _follow(
    store: Store, me: Record, end: float, unseen: Callable[[Path], str], *, by_agent: bool
) -> tuple[Record, dict[int, socket.socket]]:
    """Another rank: connect to rank 0, and wait for the verdict."""
    why = "rank 0 does not come"
    while (left := end + _TELL_SECONDS - time.monotonic()) > 0:
        first: Record = json.loads(store.get("rank 0")) if store.check(["rank 0"]) else {}
        if first:
            try:
                hub = socket.create_connection(tuple(first["hub"]), _TELL_SECONDS)
                hub.settimeout(left)
                _send(hub, me | {"line": me["line"] or _unseen(Path(first["marker"]), unseen)})
                return _receive(hub), {0: hub}
            except (OSError, ValueError) as error:  # of an earlier attempt, or closed to this host
                reason = (isinstance(error, OSError) and error.strerror) or error
                why = f"rank 0 at {':'.join(map(str, first['hub']))}: {reason}; is a firewall between?"
            if store.check([first["id"]]):  # with torchrun: of this run's earlier attempt, or of another run
                why = f"RANK={me['rank']} is taken twice, or another run has this port"
                if not by_agent:
                    break
        time.sleep(_POLL_SECONDS)
    raise JoinError(f"{_place()}: {why}")


def _unseen(marker: Path, unseen: Callable[[Path], str]) -> str:
    """Return an error line if this rank does not see rank 0's file in the folder of the run, or ''."""
    with suppress(OSError):
        os.listdir(marker.parent)  # network file systems look again
    return "" if marker.exists() else unseen(marker.parent)


def _differing(other: Record, first: Record) -> str:
    """Return 'rank 3 on b has optim.lr=0.1, rank 0 on a has optim.lr=0.01: ...', or ''."""
    for key in sorted(other["about"].keys() | first["about"].keys()):
        theirs, mine = (each["about"].get(key, "nothing") for each in (other, first))
        if theirs != mine:
            return (
                f"rank {other['rank']} on {other['host']} has {key}={theirs}, rank 0 on {first['host']} has "
                f"{key}={mine}: start all ranks with the same command and the same versions"
            )
    return ""


@contextmanager
def watched(joined: Joined | None, hooks: RunHooks, seconds: float) -> Iterator[None]:
    """End this rank if another one is lost, `seconds` after the last answer of its host. Raises PeerLost."""
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
    """A thread that reads the idle connections. Each carries one message, {} for a good end, or a Failure record."""

    def __init__(self, joined: Joined, hooks: RunHooks, seconds: float) -> None:
        self.joined, self.hooks, self.seconds = joined, hooks, seconds
        self.failure: Record | None = None
        self.known, self.ending = threading.Event(), threading.Lock()  # the holder of the lock ends this process
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
                _send(peer, message)
                peer.shutdown(socket.SHUT_WR)

    def failed(self, reason: str) -> Record:
        """Return the message of this rank's own failure."""
        me = self.joined.rank
        return {"line": f"rank {me}: {reason}", "lost": [me], "host": self.joined.hosts[me]}

    def settled(self, error: Exception) -> PeerLost:
        """Return the error to end with: this rank's own failure, which all are told, or the loss that caused it."""
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
        silent, end = dict[int, str](), float("inf")
        with selectors.DefaultSelector() as selector:
            for rank, peer in self.joined.peers.items():
                selector.register(peer, selectors.EVENT_READ, rank)
            while selector.get_map() and time.monotonic() < end:
                for key, _ in selector.select(_POLL_SECONDS):
                    selector.unregister(key.fileobj)
                    try:
                        message = _receive(self.joined.peers[key.data])
                    except (OSError, ValueError) as error:
                        silent[key.data] = "ended without a message (killed, or out of memory?)"
                        if isinstance(error, OSError) and error.errno in _SILENT:
                            lost = f"{self.seconds:g} s (comm.lost_seconds); is the host down, or a link cut?"
                            silent[key.data] = f"{_NO_ANSWER} {lost}"
                    else:
                        if message == {}:
                            continue
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
        """Return the record of 'host node-b (10.0.0.2) with ranks 2, 3 is lost: ...', or of single ranks."""
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
        """Return True if another rank of this host prints the line."""
        hosts, me = self.joined.hosts, self.joined.rank
        left = [rank for rank, host in enumerate(hosts) if host == hosts[me] and rank not in failure["lost"]]
        return failure["host"] == hosts[me] or left[:1] != [me]

    def _end(self, failure: Record) -> None:
        """End the process: its main thread hangs in a transfer with a lost rank."""
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
