"""Join ranks that torchrun, srun or a user started, and end all of them when one is lost.

Rank 0 listens at MASTER_PORT; if torchrun's agent has that port, at an address that rank 0 puts into the agent's store.
Every other rank connects to it, sends its record, and receives the verdict and the store of the process group. The
connection stays open: the kernel's keepalive distinguishes a lost host from a slow one.
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
from typing import TypeVar

from torch.distributed import Store, TCPStore  # pyright: ignore[reportPrivateImportUsage]

from gnnpar.comm import interfaces
from gnnpar.comm.interfaces import JoinError
from gnnpar.comm.world import Interrupted, Outcome, RunHooks
from gnnpar.files import JsonDict
from gnnpar.launch.failures import failure_of
from gnnpar.settings import Comm, ConfigError
from gnnpar.track.console import complain

_POLL_SECONDS = 0.1
_READ_SECONDS = 1.0  # for another rank of this host to print first
_TELL_SECONDS = 10.0  # for ranks that start later to receive a refusal
_GATHER_SECONDS = 1.0  # to collect losses of one cause, and the reason of a failed rank
_GRACE_SECONDS = 3.0  # for the main thread to end in order before the watcher ends the process
_SILENT = (errno.ETIMEDOUT, errno.EHOSTUNREACH, errno.ENETUNREACH, errno.EHOSTDOWN)
_NO_ANSWER = "no answer for"
_KEY = "gnnpar: address of rank 0"
Record = JsonDict
T = TypeVar("T")


class PeerLost(Exception):
    """The run cannot continue. quiet: another rank of this host prints the line."""

    def __init__(self, line: str, quiet: bool = False, traceback: str = "") -> None:
        super().__init__(line, quiet, traceback)  # arguments for unpickling
        self.line, self.quiet, self.traceback = line, quiet, traceback

    def __str__(self) -> str:
        return self.line


@dataclass(frozen=True)
class Joined:
    """Ranks that have joined with equal settings.

    hosts: 'NAME (ADDRESS)' by rank. store: store of the process group. peers: connections of rank 0 to all ranks, of
    the others to rank 0. folder: rank 0's run folder. restarts: number of restarts by torchrun so far. listener: rank
    0's socket, which answers late ranks.
    """

    rank: int
    hosts: list[str]
    store: Store
    peers: Mapping[int, socket.socket]
    folder: Path
    restarts: int
    listener: socket.socket | None


def join(hooks: RunHooks, seconds: float) -> Joined:
    """Wait at most `seconds` for all ranks, and compare `hooks.agreed()`. Collective. Raises PeerLost if a rank is
    missing or differs, ConfigError if a rank refuses its settings."""
    marker = hooks.run_dir.absolute() / f".joining-{uuid.uuid4().hex[:8]}"
    if os.environ["RANK"] != "0":
        return _join(seconds, hooks.agreed(), hooks.folder_error)
    try:
        marker.parent.mkdir(parents=True, exist_ok=True)
        marker.touch()
        return _join(seconds, hooks.agreed(), marker=str(marker))
    finally:
        marker.unlink(missing_ok=True)


def refusal(error: ValueError, seconds: float = Comm().connect_seconds) -> ValueError:
    """Send this rank's error to the other ranks. Return the error to raise: this one, or another rank's."""
    env = os.environ
    if "RANK" not in env or env.get("WORLD_SIZE", "1") == "1" or not env.get("MASTER_ADDR"):
        return error
    try:
        line = f"rank {env['RANK']} on {socket.gethostname()}: {error}"
        _join(min(seconds, _TELL_SECONDS), {}, refusing=line)
    except ConfigError as told:
        return error if str(told).endswith(f": {error}") else told
    except (ValueError, PeerLost):
        pass
    return error


def _place() -> str:
    env = os.environ
    where = f"MASTER_ADDR={env.get('MASTER_ADDR', '')} MASTER_PORT={env.get('MASTER_PORT', '')}"
    return f"rank {env['RANK']} on {socket.gethostname()}: {where}"


def _join(
    seconds: float,
    about: Mapping[str, str],
    folder_error: Callable[[Path], str] = lambda _: "",
    *,
    marker: str = "",
    refusing: str = "",
) -> Joined:
    """Join, or raise the error that all ranks raise. marker: rank 0's file in the folder of the run. refusing: why this
    rank cannot run."""
    env, end = os.environ, time.monotonic() + seconds
    rank, size, master, port = int(env["RANK"]), int(env["WORLD_SIZE"]), env.get("MASTER_ADDR"), env.get("MASTER_PORT")
    if not master or not port:
        raise PeerLost(f"{_place()}: set them to the address of rank 0's host and to a free port there")
    name, mine, there = _until(end, lambda: _route(master, int(port)))
    me: Record = {"rank": rank, "line": refusing, "refused": bool(refusing), "marker": marker}
    me |= {"host": f"{socket.gethostname()} ({mine})", "about": {**about, "WORLD_SIZE": str(size)}}
    me["restarts"] = int(env.get("TORCHELASTIC_RESTART_COUNT", "0"))
    try:
        interfaces.check_asked()
        if not interfaces.asked():
            env[interfaces.VARIABLE] = name
    except JoinError as error:
        me["line"] = refusing or f"rank {rank}: {error}"
    agent, wait = None, timedelta(seconds=seconds)
    if env.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        agent = _until(end, lambda: TCPStore(master, int(port), timeout=wait, wait_for_workers=False))
    held = _listen(mine, 0) if rank == 0 else None  # by default torch listens on all addresses
    listener = None
    if held is not None:
        me["port"], listener = held.getsockname()[1], _listen(mine, 0 if agent else int(port))
        if agent is not None:  # it still has the address of an earlier attempt
            agent.set(_KEY, json.dumps(listener.getsockname()[:2]))
        first, address, (verdict, peers) = me, mine, _gather(listener, me, size, end)
    else:
        first, verdict, hub = _ask_rank_0(agent, (there, int(port)), me, folder_error, end)
        address, peers = hub.getpeername()[0], {0: hub}
    if verdict["refused"]:
        raise ConfigError(verdict["line"])
    if verdict["line"]:
        raise PeerLost(verdict["line"], env.get("LOCAL_RANK", "0") != "0")
    store = TCPStore(
        address, first["port"], None, rank == 0, wait, wait_for_workers=False, master_listen_fd=held and held.detach()
    )
    folder = Path(first["marker"]).parent
    return Joined(rank, verdict["hosts"], store, peers, folder, verdict["restarts"], listener)


def _until(end: float, connect: Callable[[], T]) -> T:
    """Call `connect` until it succeeds: rank 0, and the DNS name of its pod, may come late."""
    while True:
        try:
            return connect()
        except (OSError, RuntimeError) as error:  # RuntimeError: of torch's store
            if time.monotonic() > end or isinstance(error, JoinError):
                why = (isinstance(error, OSError) and error.strerror) or str(error).partition("\n")[0]
                at = f"{_place()} is not reached within comm.connect_seconds ({why})"
                raise PeerLost(f"{at}: is rank 0 started there, and no firewall between?") from error
        time.sleep(_POLL_SECONDS)


def _route(master: str, port: int) -> tuple[str, str, str]:
    """Return `interfaces.towards`, or the loopback if all ranks are on this host."""
    env, inside = os.environ, master in ("localhost", "::1") or master.startswith("127.")
    if env.get("LOCAL_WORLD_SIZE", env["WORLD_SIZE"] if inside else "") == env["WORLD_SIZE"]:
        return interfaces.loopback(), "127.0.0.1", "127.0.0.1"
    return interfaces.towards(master, port)


def _listen(address: str, port: int) -> socket.socket:
    """Listen on one address."""
    try:
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        return socket.create_server((address, port), family=family, backlog=1024)
    except OSError as error:
        used = "is taken by another program" if error.errno == errno.EADDRINUSE else str(error.strerror)
        raise PeerLost(f"{_place()}: the port {used} there; give all ranks another one") from error


def _send(peer: socket.socket, message: Record) -> None:
    peer.sendall(json.dumps(message).encode() + b"\n")


def _receive(peer: socket.socket) -> Record:
    """Read one message, and no byte of the next one. Raise ValueError at the end of the connection."""
    with peer.makefile("rb", buffering=0) as file:
        return json.loads(file.readline())


def _gather(listener: socket.socket, me: Record, size: int, end: float) -> tuple[Record, dict[int, socket.socket]]:
    """Receive the records of all ranks on rank 0. Return the verdict. A refusal waits for late ranks."""
    line, refused, ranks, peers = me["line"], me["refused"], {0: me}, dict[int, socket.socket]()
    while set(range(size)) - ranks.keys():
        if line:
            end = min(end, time.monotonic() + _TELL_SECONDS)
        try:
            listener.settimeout(max(0.01, end - time.monotonic()))
            peer, _ = listener.accept()
        except TimeoutError:
            break
        peer.settimeout(_TELL_SECONDS)
        with suppress(OSError, ValueError):  # another program, or a rank that has ended
            _send(peer, me)
            other = _receive(peer)
            if other["rank"] in ranks:
                _send(peer, {})
                continue
            ranks[other["rank"]], peers[other["rank"]] = other, peer
            if found := "" if line else other["line"] or _differing(other, me):
                line, refused = found, other["refused"]
    if missing := [str(each) for each in range(size) if each not in ranks]:
        those = f"rank{'s' if len(missing) > 1 else ''} {', '.join(missing[:9])} of {size}"
        came = "did not come within comm.connect_seconds: start each with this address and port"
        line = line or f"{_place()}: {those} {came}"
    verdict = {"line": line, "refused": refused}
    if not line:
        hosts, restarts = ([ranks[each][key] for each in range(size)] for key in ("host", "restarts"))
        verdict |= {"hosts": hosts, "restarts": max(restarts)}
    for peer in peers.values():
        with suppress(OSError):
            _send(peer, verdict)
    if line:
        listener.close()
    return verdict, peers


def _ask_rank_0(
    agent: Store | None, address: tuple[str, int], me: Record, folder_error: Callable[[Path], str], end: float
) -> tuple[Record, Record, socket.socket]:
    """Connect to rank 0 from another rank. Return its record, its verdict, and the connection."""

    def connected() -> socket.socket:
        host, port = json.loads(agent.get(_KEY)) if agent else address
        try:
            return socket.create_connection((host, port), _TELL_SECONDS)
        except OSError as error:
            raise ConnectionError(f"{host}:{port}: {error.strerror or error}") from error

    while True:
        hub, why = _until(end, connected), "it does not answer as rank 0 would; is another program there?"
        hub.settimeout(max(_POLL_SECONDS, end + _TELL_SECONDS - time.monotonic()))
        with suppress(OSError, ValueError):
            if first := _receive(hub):
                marker = Path(first["marker"])
                with suppress(OSError):
                    os.listdir(marker.parent)  # makes network file systems refresh
                _send(hub, me | {"line": me["line"] or ("" if marker.exists() else folder_error(marker.parent))})
                if verdict := _receive(hub):
                    return first, verdict, hub
            why = f"RANK={me['rank']} is taken twice, or another run has this port"
            end = min(end, time.monotonic() + _GRACE_SECONDS)
        if time.monotonic() > end:
            raise PeerLost(f"{_place()}: {why}")
        time.sleep(_POLL_SECONDS)


def _differing(other: Record, first: Record) -> str:
    """Return 'rank 3 on b has optim.lr=0.1, rank 0 on a has optim.lr=0.01: ...', or ''."""
    for key in sorted(other["about"].keys() | first["about"].keys()):
        other_value, mine = (each["about"].get(key, "nothing") for each in (other, first))
        if other_value != mine:
            return (
                f"rank {other['rank']} on {other['host']} has {key}={other_value}, rank 0 on {first['host']} has "
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
        raise watch.final_error(error) from error
    finally:
        watch.ending.acquire(blocking=False)
        if joined.listener is not None:  # a script may join again at this port
            joined.listener.close()


class _Watch:
    """A thread that reads the idle connections. Each carries one message: {} for a success, or a Failure record."""

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
            with suppress(OSError):  # the peer has ended, or has the message already
                _send(peer, message)
                peer.shutdown(socket.SHUT_WR)

    def failed(self, reason: str) -> Record:
        """Return the message of this rank's own failure."""
        me = self.joined.rank
        return {"line": f"rank {me}: {reason}", "lost": [me], "host": self.joined.hosts[me]}

    def final_error(self, error: Exception) -> PeerLost:
        """Return the error to end with: this rank's own failure, sent to all, or the loss that caused it."""
        mine = failure_of(self.joined.rank, error)
        if mine.secondary:
            self.known.wait(self.seconds + 4 * _GATHER_SECONDS)
        self.ending.acquire()  # never returns if the watcher was first
        if mine.secondary and self.failure is not None:
            if quiet := self._is_quiet(self.failure):
                time.sleep(_READ_SECONDS)  # let the reporting rank print first
            return PeerLost(self._line(self.failure), quiet)
        self.say(self.failed(mine.reason))
        return PeerLost(mine.line, traceback=mine.traceback)

    def _watch(self) -> None:
        silent, end, listener = dict[int, str](), float("inf"), self.joined.listener
        waiting = dict(self.joined.peers)
        with selectors.DefaultSelector() as selector:
            for rank, peer in waiting.items():
                selector.register(peer, selectors.EVENT_READ, rank)
            if listener is not None:
                selector.register(listener, selectors.EVENT_READ)
            while waiting and time.monotonic() < end:
                for key, _ in selector.select(_POLL_SECONDS):
                    if listener is not None and key.data is None:
                        with suppress(OSError), listener.accept()[0] as another:
                            if waiting.keys() == self.joined.peers.keys():  # otherwise it may join again
                                _send(another, {})
                        continue
                    selector.unregister(key.fileobj)
                    try:
                        message = _receive(waiting.pop(key.data))
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
        """Return the record of 'ranks 2, 3 on node-b (10.0.0.2): ...'. A silent host loses all of its ranks."""
        hosts, lost, parts = self.joined.hosts, list[int](), list[str]()
        for host in dict.fromkeys(hosts[rank] for rank in sorted(silent)):
            there = [rank for rank, each in enumerate(hosts) if each == host]
            reason = next(silent[rank] for rank in there if rank in silent)
            gone = there if reason.startswith(_NO_ANSWER) else [rank for rank in there if rank in silent]
            lost += gone
            parts.append(f"rank{'s' if len(gone) > 1 else ''} {', '.join(map(str, gone))} on {host}: {reason}")
        return {"line": "; ".join(parts), "lost": lost, "host": None}

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
