"""Ranks forked from one process that has imported what they need: once, and not once a rank.

That process has one thread, and only waits for them. The ranks end with it, and it with the process that started it,
from which it is forked where that has one thread, too: a command does, and then torch is imported once for all. A
fork has none of the other threads, and hangs where OpenMP had some: then it is a new interpreter. Inside `warm` that
one stays for the ranks of later runs: a sweep has a thread for its display, and others once a job has computed in it.
"""

from __future__ import annotations

import gc
import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection, wait
from multiprocessing.reduction import ForkingPickler, recv_handle, send_handle
from types import ModuleType
from typing import Protocol

from gnnpar.launch.monitor import is_stopped

_OF_THE_PARENT = {signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1}
"""Signals that schedulers and terminals send to all processes, and the parent alone answers."""
_END_SECONDS = 15.0  # for ranks that were killed to be gone
_MOMENT_SECONDS = 0.5  # for a process whose ranks have ended to be gone
_FORK, _SPAWN = multiprocessing.get_context("fork"), multiprocessing.get_context("spawn")
_Body = Callable[[int], None]


class _Origin(Protocol):
    """The process in between."""

    @property
    def pid(self) -> int | None: ...
    @property
    def exitcode(self) -> int | None: ...
    def start(self) -> None: ...
    def kill(self) -> None: ...
    def join(self) -> None: ...


class Ranks:
    """`body(rank)` in `size` processes. `fork`: False where they compute on GPUs, whose libraries forbid it.

    exit_codes: of the ranks that have ended, by rank; the number of a signal is negative.
    """

    def __init__(self, size: int, body: Callable[[int], None], *, fork: bool) -> None:
        self.size = size
        self.exit_codes: dict[int, int] = {}
        self._started = False
        self._ended, self._end_of_ranks = multiprocessing.Pipe(duplex=False)
        fork = fork and sys.platform == "linux"
        arguments = (body, size, fork, os.getpid(), self._end_of_ranks)
        self._origin: _Origin
        if fork and has_one_thread():
            self._origin = _FORK.Process(target=_start_ranks, args=arguments, name="ranks")
        elif fork and _servers is not None:
            self._origin = _Asked(_servers, body, size, self._end_of_ranks)
        else:
            resource_tracker.ensure_running()  # where it starts it unblocks signals, which are about to be blocked
            self._origin = _SPAWN.Process(target=_start_ranks, args=arguments, name="ranks")

    def start(self) -> None:
        """Returns at once: before they have been started. Nothing may have started a thread since this was made."""
        self._started = True
        with without_main():
            self._origin.start()
        self._end_of_ranks.close()

    def wait(self, seconds: float) -> dict[int, int]:
        """Exit codes of the ranks that have ended since it was last called; of none after so many seconds."""
        ended: dict[int, int] = {}
        try:
            while self._ended.poll(0 if ended else seconds):
                ended |= [self._ended.recv()]
        except EOFError:  # who was to say it is gone, and every rank with it
            self._origin.join()
            code = self._origin.exitcode or 1
            ended |= {rank: code for rank in range(self.size) if rank not in self.exit_codes | ended}
        if not ended and (pid := self._origin.pid) is not None and is_stopped(pid):
            os.kill(pid, signal.SIGCONT)  # the end of a rank would not be heard of
        self.exit_codes |= ended
        return ended

    def end(self) -> None:
        """No rank is left. What they have to leave they have left, or can leave no more."""
        if self._started and self._origin.pid is not None:
            self._origin.kill()
            self._origin.join()
            with suppress(EOFError):  # every rank holds the other end
                while self._ended.poll(_END_SECONDS):
                    self._ended.recv()
        self._ended.close()


class _Server:
    """An interpreter of its own that imports once, and forks the process in between of one run after the other."""

    def __init__(self) -> None:
        self.connection, theirs = multiprocessing.Pipe()
        resource_tracker.ensure_running()
        self.process = _SPAWN.Process(target=_serve, args=(os.getpid(), theirs), name="server of ranks")
        self.process.start()
        theirs.close()

    def end(self) -> None:
        self.process.kill()  # and all that it has forked
        self.process.join()
        self.connection.close()


_servers: list[_Server] | None = None
"""None outside of `warm`; the one that is there."""


@contextmanager
def warm() -> Iterator[None]:
    """Ranks that are started inside, one run after the other, cost one start of Python at most. Modules are those of
    the first run that needed them, so nothing may be edited meanwhile; environment, folder and path are each run's."""
    global _servers
    before, _servers = _servers, []
    try:
        yield
    finally:
        for server in _servers:
            server.end()
        _servers = before


class _Asked:
    """A process in between that a server forks."""

    def __init__(self, servers: list[_Server], body: _Body, size: int, end_of_ranks: Connection) -> None:
        self._servers, self._body, self._size, self._end_of_ranks = servers, body, size, end_of_ranks
        self._server: _Server | None = None
        self._heard: list[int | None] = []  # pid and exit code, as far as the server has said them

    @property
    def pid(self) -> int | None:
        """Its server's until that has forked it."""
        heard = self._listen(0.0)
        return self._heard[0] if heard else self._server and self._server.process.pid

    @property
    def exitcode(self) -> int | None:
        return self._heard[1] if len(self._heard) > 1 else None

    def start(self) -> None:
        if self._servers and not self._servers[0].process.is_alive():  # killed while nothing ran
            self._servers.pop().end()
        if not self._servers:
            self._servers.append(_Server())
        self._server = self._servers[0]
        where = ForkingPickler.dumps((dict(os.environ), os.getcwd(), sys.path, self._size))
        body, connection = ForkingPickler.dumps(self._body), self._server.connection
        with suppress(OSError):  # it was killed meanwhile: nothing is started, and the pipe of the ranks says so
            connection.send_bytes(where)
            connection.send_bytes(body)
            send_handle(connection, self._end_of_ranks.fileno(), self._server.process.pid)

    def kill(self) -> None:
        """Where it has not ended already; its server goes with it, since that alone may end it by its number."""
        if self._server is not None and not self._listen(_MOMENT_SECONDS, until=2):
            self._server.end()
            self._servers.remove(self._server)
            self._heard = [None, -signal.SIGKILL]

    def join(self) -> None:
        """After its pipe has closed, or `kill`."""
        self.kill()

    def _listen(self, seconds: float, until: int = 1) -> bool:
        """Has the server said so much?"""
        try:
            while self._server is not None and len(self._heard) < until and self._server.connection.poll(seconds):
                self._heard.append(self._server.connection.recv())
        except (EOFError, OSError):
            return False
        return len(self._heard) >= until


def _serve(parent: int, connection: Connection) -> None:
    """The process of a server."""
    _end_with(parent)
    signal.pthread_sigmask(signal.SIG_BLOCK, _OF_THE_PARENT)
    while True:
        environ, folder, path, size = connection.recv()
        os.environ.clear()
        os.environ.update(environ)
        os.chdir(folder)
        sys.path[:] = path
        body = connection.recv()
        ended = Connection(recv_handle(connection), readable=False)
        process = _FORK.Process(target=_start_asked, args=(connection, body, size, os.getpid(), ended), name="ranks")
        process.start()
        ended.close()
        connection.send(process.pid)
        process.join()
        connection.send(process.exitcode)


def _start_asked(connection: Connection, body: _Body, size: int, parent: int, ended: Connection) -> None:
    connection.close()  # it is the server's end
    _start_ranks(body, size, True, parent, ended)


def has_one_thread() -> bool:
    """Whether this process is left with one thread where it forks: numpy's OpenBLAS then ends its own."""
    if threading.active_count() > 1:
        return False
    if (child := os.fork()) == 0:
        os._exit(0)
    os.waitpid(child, 0)
    return len(os.listdir("/proc/self/task")) == 1


def _start_ranks(body: Callable[[int], None], size: int, fork: bool, parent: int, ended: Connection) -> None:
    """The process in between."""
    _end_with(parent)
    signal.pthread_sigmask(signal.SIG_BLOCK, _OF_THE_PARENT)
    gc.freeze()  # what was imported is shared, and stays so
    start = _FORK.Process if fork else _SPAWN.Process
    arguments = [(body, rank, os.getpid()) for rank in range(size)]
    ranks = [start(target=_run, args=each, name=f"rank{rank}") for rank, each in enumerate(arguments)]
    for process in ranks:
        process.start()
    running = {process.sentinel: rank for rank, process in enumerate(ranks)}
    while running:
        wait(list(running))
        for sentinel, rank in list(running.items()):
            if (code := ranks[rank].exitcode) is not None:
                ended.send((rank, code))
                del running[sentinel]


def _run(body: Callable[[int], None], rank: int, origin: int) -> None:
    """The process of a rank."""
    _end_with(origin)
    body(rank)


def _end_with(parent: int) -> None:
    """This process does not outlive the other one, which alone hears of the terminal's Ctrl-C."""
    from torch import multiprocessing as of_torch

    of_torch._prctl_pr_set_pdeathsig(signal.SIGKILL)  # pyright: ignore[reportAttributeAccessIssue]
    if os.getppid() != parent:  # it ended before the line above
        os._exit(1)


@contextmanager
def without_main() -> Iterator[None]:
    """Processes started inside do not import the program's main module: a script would run again in every rank, and a
    notebook has none."""
    main = sys.modules["__main__"]
    sys.modules["__main__"] = ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = main
