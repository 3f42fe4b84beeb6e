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
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import TypeVar

from torch.distributed import Store, TCPStore, is_initialized  # pyright: ignore[reportPrivateImportUsage]

from gnnpar.comm import interfaces
from gnnpar.comm.interfaces import JoinError
from gnnpar.comm.world import Interrupted, Outcome, RunHooks
from gnnpar.files import JsonDict as Record
from gnnpar.launch.failures import Failure, failure_of
from gnnpar.launch.slurm import rank_on_host
from gnnpar.settings import Comm, ConfigError
from gnnpar.track.console import complain

_POLL_SECONDS = 0.1
_READ_SECONDS = 1.0  # for another rank of this host to print first
_TELL_SECONDS = 10.0  # for ranks that start later to receive a refusal
_GATHER_SECONDS = 1.0  # to collect losses of one cause, and the reason of a failed rank
_GRACE_SECONDS = 3.0  # for the main thread to end in order before the watcher ends the process
_SILENT = (errno.ETIMEDOUT, errno.EHOSTUNREACH, errno.ENETUNREACH, errno.EHOSTDOWN)
_ENDED = "ended without a message (killed, or out of memory?)"
_NO_ANSWER = "no answer for {:g} s (comm.lost_seconds); is the host down, or a link cut?"
_KEY = "gnnpar: address of rank 0"
T = TypeVar("T")


def join(hooks: RunHooks, seconds: float) -> Joined:
    """Wait at most `seconds` for all ranks, and compare `hooks.agreed()`. Collective. Raises Failure if a rank is
    missing or differs, ConfigError if a rank refuses its settings."""
    if is_initialized():  # by Ray's TorchTrainer, or by the script
        raise Failure("this process has joined a process group: call torch.distributed.destroy_process_group() first")
    if os.environ["RANK"] != "0":
        return _join(hooks, seconds)
    folder = hooks.run_dir.absolute()
    folder.mkdir(parents=True, exist_ok=True)
    with NamedTemporaryFile(prefix=".joining-", dir=folder) as marker:
        return _join(hooks, seconds, marker=marker.name)


def refusal(error: ValueError, seconds: float = Comm().connect_seconds) -> ValueError:
    """Send this rank's error to the other ranks. Return the error to raise: this one, or another rank's."""
    env = os.environ
    if "RANK" in env and env.get("WORLD_SIZE", "1") != "1":
        try:
            line = f"rank {env['RANK']} on {socket.gethostname()}: {error}"
            _join(RunHooks(), min(seconds, _TELL_SECONDS), refusing=line)
        except ConfigError as told:
            if not str(told).endswith(f": {error}"):
                return told
        except (ValueError, Failure):
            pass
    return error


def _place() -> str:
    env = os.environ
    where = f"MASTER_ADDR={env.get('MASTER_ADDR', '')} MASTER_PORT={env.get('MASTER_PORT', '')}"
    return f"rank {env['RANK']} on {socket.gethostname()}: {where}"


def _failed(line: str, seconds: float = _TELL_SECONDS) -> Failure:
    """Return the error of the ranks of this host; its first rank prints it. The others wait `seconds`, since torchrun
    ends all ranks when one has ended."""
    if quiet := rank_on_host() != 0:
        time.sleep(seconds)
    return Failure(line, quiet=quiet)


def _join(hooks: RunHooks, seconds: float, *, marker: str = "", refusing: str = "") -> Joined:
    """Join, or raise the error that all ranks raise. marker: rank 0's file in the folder of the run. refusing: why this
    rank cannot run."""
    env, end, wait = os.environ, time.monotonic() + seconds, timedelta(seconds=seconds)
    rank, size, master, port = int(env["RANK"]), int(env["WORLD_SIZE"]), env.get("MASTER_ADDR"), env.get("MASTER_PORT")
    if not master or not port:
        raise _failed(f"{_place()}: set them to the address of rank 0's host and to a free port there")
    name, mine, there = _until(end, lambda: _route(master, int(port)))
    me: Record = {"rank": rank, "line": refusing, "refused": bool(refusing), "marker": marker}
    me |= {"host": f"{socket.gethostname()} ({mine})", "about": {**hooks.agreed(), "WORLD_SIZE": str(size)}}
    me |= {"restarts": int(env.get("TORCHELASTIC_RESTART_COUNT", "0"))}
    try:
        interfaces.choose(name)
    except JoinError as error:
        me["line"] = refusing or f"rank {rank}: {error}"
    agent, held, listener = None, None, None
    if env.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        agent = _until(end, lambda: TCPStore(master, int(port), timeout=wait, wait_for_workers=False))
    if rank == 0:
        held, listener = _listen(mine, 0), _listen(mine, 0 if agent else int(port))  # torch listens on all addresses
        if agent is not None:  # it still has the address of an earlier attempt
            agent.set(_KEY, json.dumps(listener.getsockname()[:2]))
        address, (verdict, peers) = mine, _gather(listener, me | {"port": held.getsockname()[1]}, size, end)
    else:
        verdict, hub = _ask_rank_0(agent, (there, int(port)), me, hooks, end)
        address, peers = hub.getpeername()[0], {0: hub}
    if verdict["refused"]:
        raise ConfigError(verdict["line"])
    if verdict["line"]:
        raise _failed(verdict["line"], _READ_SECONDS)
    descriptor = held and held.detach()
    store = TCPStore(
        address, verdict["port"], None, rank == 0, wait, wait_for_workers=False, master_listen_fd=descriptor
    )
    folder = Path(verdict["marker"]).parent
    return Joined(hooks, rank, verdict["hosts"], store, peers, folder, verdict["restarts"], listener)


def _until(end: float, connect: Callable[[], T]) -> T:
    """Call `connect` until it succeeds: rank 0, and the DNS name of its pod, may come late."""
    while True:
        try:
            return connect()
        except (OSError, RuntimeError) as error:  # RuntimeError: of torch's store
            if time.monotonic() > end or isinstance(error, JoinError):
                why = (isinstance(error, OSError) and error.strerror) or str(error).partition("\n")[0]
                at = f"{_place()} is not reached within comm.connect_seconds ({why})"
                raise _failed(f"{at}: is rank 0 started there, and no firewall between?") from error
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
        raise Failure(f"{_place()}: the port {used} there; give all ranks another one") from error


def _send(peer: socket.socket, message: Record) -> None:
    peer.sendall(json.dumps(message).encode() + b"\n")


def _receive(peer: socket.socket) -> Record:
    """Read one message, and no byte of the next one. Raise ValueError at the end of the connection."""
    with peer.makefile("rb", buffering=0) as file:
        return json.loads(file.readline())


def _gather(listener: socket.socket, me: Record, size: int, end: float) -> tuple[Record, dict[int, socket.socket]]:
    """Receive the records of all ranks on rank 0. Return the verdict. A refusal waits for late ranks."""
    line, refused, ranks, peers = me["line"], me["refused"], {0: me}, dict[int, socket.socket]()
    while missing := sorted(set(range(size)) - ranks.keys()):
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
            if not line and (line := other["line"] or _differing(other, me)):
                refused = other["refused"]
    if missing and not line:
        those = f"rank{'s' if len(missing) > 1 else ''} {', '.join(map(str, missing[:9]))} of {size}"
        came = "did not come within comm.connect_seconds: start each with this address and port"
        line = f"{_place()}: {those} {came}"
    hosts, restarts = ([ranks[each][key] for each in sorted(ranks)] for key in ("host", "restarts"))
    verdict = me | {"line": line, "refused": refused, "hosts": hosts, "restarts": max(restarts)}
    for peer in peers.values():
        with suppress(OSError):
            _send(peer, verdict)
    if line:
        listener.close()
    return verdict, peers


def _ask_rank_0(
    agent: Store | None, address: tuple[str, int], me: Record, hooks: RunHooks, end: float
) -> tuple[Record, socket.socket]:
    """Connect to rank 0 from another rank. Return its verdict, and the connection."""

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
                _send(hub, me | {"line": me["line"] or ("" if marker.exists() else hooks.folder_error(marker.parent))})
                if verdict := _receive(hub):
                    return verdict, hub
            why = f"RANK={me['rank']} is taken twice, or another run has this port"
            end = min(end, time.monotonic() + _GRACE_SECONDS)
        if time.monotonic() > end:
            raise _failed(f"{_place()}: {why}")
        time.sleep(_POLL_SECONDS)


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


@dataclass(eq=False)
class Joined:
    """Ranks that have joined with equal settings, and the end of this one if another is lost.

    hosts: 'NAME (ADDRESS)' by rank. store: store of the process group. peers: idle connections of rank 0 to all ranks,
    of the others to rank 0; each carries one message: {} for a success, or the record of a failure. folder: rank 0's
    run folder. restarts: number of restarts by torchrun so far. listener: rank 0's socket, which answers late ranks.
    """

    hooks: RunHooks
    rank: int
    hosts: list[str]
    store: Store
    peers: dict[int, socket.socket]
    folder: Path
    restarts: int
    listener: socket.socket | None
    failure: Record | None = None
    known: threading.Event = field(default_factory=threading.Event)
    ending: threading.Lock = field(default_factory=threading.Lock)  # the holder ends this process

    @contextmanager
    def watched(self, seconds: float) -> Iterator[None]:
        """End this rank if another one is lost, `seconds` after the last answer of its host. Raises Failure."""
        for peer in self.peers.values():
            peer.settimeout(None)
            peer.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            for option, value in (
                (socket.TCP_KEEPIDLE, seconds / 3),
                (socket.TCP_KEEPINTVL, seconds / 6),
                (socket.TCP_KEEPCNT, 4),
                (socket.TCP_USER_TIMEOUT, 1000 * seconds),
            ):
                peer.setsockopt(socket.IPPROTO_TCP, option, max(1, round(value)))
        threading.Thread(target=self._watch, args=(seconds,), name="peers", daemon=True).start()
        try:
            yield
            self._say({})
        except Interrupted:
            self._say({})
            raise
        except KeyboardInterrupt:
            self._say(self._own(f"rank {self.rank}: interrupted by a signal"))
            raise
        except Exception as error:
            raise self._final(error, seconds) from error
        finally:
            self.ending.acquire(blocking=False)
            if self.listener is not None:  # a script may join again at this port
                self.listener.close()

    def _say(self, message: Record) -> None:
        for peer in self.peers.values():
            with suppress(OSError):  # the peer has ended, or has the message already
                _send(peer, message)
                peer.shutdown(socket.SHUT_WR)

    def _own(self, line: str) -> Record:
        return {"line": line, "lost": [self.rank], "host": self.hosts[self.rank]}

    def _final(self, error: Exception, seconds: float) -> Failure:
        """Return the error to end with: this rank's own failure, sent to all, or the loss that caused it."""
        mine = failure_of(self.rank, error)
        if mine.secondary:
            self.known.wait(seconds + 4 * _GATHER_SECONDS)
        self.ending.acquire()  # never returns if the watcher was first
        if mine.secondary and self.failure is not None:
            loss = self._loss(self.failure)
            if loss.quiet:
                time.sleep(_READ_SECONDS)  # let the reporting rank print first
            return loss
        self._say(self._own(mine.line))
        return mine

    def _watch(self, seconds: float) -> None:
        """Read the messages of all peers. End the process after a failure: its main thread hangs in a transfer."""
        gone, end, waiting = dict[int, str](), float("inf"), dict(self.peers)
        with selectors.DefaultSelector() as selector:
            for rank, peer in [*waiting.items(), *([(None, self.listener)] if self.listener else [])]:
                selector.register(peer, selectors.EVENT_READ, rank)
            while waiting and time.monotonic() < end:
                for key, _ in selector.select(_POLL_SECONDS):
                    if self.listener is not None and key.data is None:
                        with suppress(OSError), self.listener.accept()[0] as another:
                            if waiting.keys() == self.peers.keys():  # otherwise it may join again
                                _send(another, {})
                        continue
                    selector.unregister(key.fileobj)
                    try:
                        message = _receive(waiting.pop(key.data))
                    except (OSError, ValueError) as error:
                        silent = isinstance(error, OSError) and error.errno in _SILENT
                        gone[key.data] = _NO_ANSWER.format(seconds) if silent else _ENDED
                    else:
                        if message == {}:
                            continue
                        self.failure = self.failure or message
                    end = min(end, time.monotonic() + _GATHER_SECONDS)
        if self.failure is None and gone:
            self.failure = self._lost(gone)
        if self.failure is None:
            return
        if self.rank == 0:
            self._say(self.failure)
        self.known.set()
        time.sleep(_GRACE_SECONDS)
        if not self.ending.acquire(blocking=False):
            return
        loss = self._loss(self.failure)
        if self.rank == 0:
            self.hooks.on_end(Outcome("failed", loss.line))
        if loss.quiet:
            time.sleep(_READ_SECONDS)
        else:
            complain(loss.line)
        os._exit(1)

    def _lost(self, gone: dict[int, str]) -> Record:
        """Return the record of 'ranks 2, 3 on node-b (10.0.0.2): ...'. A silent host loses all of its ranks."""
        lost, parts = list[int](), list[str]()
        for host in dict.fromkeys(self.hosts[rank] for rank in sorted(gone)):
            there = [rank for rank, each in enumerate(self.hosts) if each == host]
            reason = next(gone[rank] for rank in there if rank in gone)
            ranks = [rank for rank in there if rank in gone or reason != _ENDED]
            lost += ranks
            parts.append(f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))} on {host}: {reason}")
        return {"line": "; ".join(parts), "lost": lost, "host": None}

    def _loss(self, failure: Record) -> Failure:
        """Return the error of another rank's failure. Quiet if another rank of this host prints the line."""
        here = self.hosts[self.rank]
        left = [rank for rank, host in enumerate(self.hosts) if host == here and rank not in failure["lost"]]
        line = failure["line"] if failure["host"] else self.hooks.on_lost(failure["line"], self.folder)
        return Failure(line, quiet=failure["host"] == here or left[:1] != [self.rank])
