"""Ranks forked from one process that has imported what they need: once, and not once a rank.

That process has one thread, and only waits for them. The ranks end with it, and it with the process that started it,
from which it is forked where that has one thread, too: a command does, and then torch is imported once for all. A
fork has none of the other threads, and hangs where OpenMP had some: then it is a new interpreter.
"""

from __future__ import annotations

import gc
import multiprocessing
import os
import resource
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from types import ModuleType

from gnnpar.launch.monitor import Failure, RankFailed, is_stopped
from gnnpar.track.console import complain, patient_streams

_OF_THE_PARENT = {signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1}
"""Signals that schedulers and terminals send to all processes, and the parent alone answers."""
_END_SECONDS = 15.0  # for ranks that were killed to be gone
_FORK, _SPAWN = multiprocessing.get_context("fork"), multiprocessing.get_context("spawn")


class Ranks:
    """`body(rank)` in `size` processes. `fork`: False where they compute on GPUs, whose libraries forbid it.

    exit_codes: of the ranks that have ended, by rank; the number of a signal is negative.
    """

    def __init__(self, size: int, body: Callable[[int], None], *, fork: bool) -> None:
        self.size = size
        self.exit_codes: dict[int, int] = {}
        self._ended, self._end_of_ranks = multiprocessing.Pipe(duplex=False)
        if multiprocessing.current_process().daemon:
            raise ValueError(
                "a daemonic process, as those of multiprocessing.Pool, can start no ranks: use "
                "concurrent.futures.ProcessPoolExecutor, or comm=threads"
            )
        fork = fork and sys.platform == "linux"
        arguments = (body, size, fork, os.getpid(), self._end_of_ranks)
        if fork and has_one_thread():
            self._origin: BaseProcess = _FORK.Process(target=_start_ranks, args=arguments, name="ranks")
        else:
            resource_tracker.ensure_running()  # where it starts it unblocks signals, which are about to be blocked
            self._origin = _SPAWN.Process(target=_start_ranks, args=arguments, name="ranks")

    def start(self) -> None:
        """Returns at once: before they have been started. Nothing may have started a thread since this was made."""
        with without_main(), patient_streams():
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
        if not ended and is_stopped(self._origin.ident or 0):
            os.kill(self._origin.ident or 0, signal.SIGCONT)  # the end of a rank would not be heard of
        self.exit_codes |= ended
        return ended

    def end(self) -> None:
        """No rank is left. What they have to leave they have left, or can leave no more."""
        if self._origin.pid is not None:
            self._origin.kill()
            self._origin.join()
            with suppress(EOFError):  # every rank holds the other end
                while self._ended.poll(_END_SECONDS):
                    self._ended.recv()
        self._ended.close()


def is_fork_of_threads() -> bool:
    """Whether a process that had threads has forked this one, or one that has: OpenMP waits here for those it had."""
    return _OF_THREADS[-1]


_OF_THREADS = [False]  # and, in a process that forks, whether it has threads


def _before_fork() -> None:
    _OF_THREADS.append(_OF_THREADS[-1] or len(os.listdir("/proc/self/task")) > 1)


os.register_at_fork(before=_before_fork, after_in_parent=lambda: _OF_THREADS.pop())


@contextmanager
def failing_by_limit() -> Iterator[None]:
    """Inside, processes are started: RankFailed where the system starts no more."""
    try:
        yield
    except OSError as error:
        raise RankFailed(Failure(0, _no_process(error))) from error


def _no_process(error: OSError) -> str:
    """Why none can be started, and what to change."""
    most = resource.getrlimit(resource.RLIMIT_NPROC)[0]
    allowed = "any number" if most == resource.RLIM_INFINITY else f"{most}"
    return f"a process for a rank cannot be started ({error.strerror}; `ulimit -u` allows {allowed}): start fewer ranks"


def has_one_thread() -> bool:
    """Whether this process, no fork of threads, is left with one where it forks: numpy's OpenBLAS then ends its own."""
    if threading.active_count() > 1 or is_fork_of_threads():
        return False
    if (child := os.fork()) == 0:
        os._exit(0)
    with suppress(ChildProcessError):  # a handler of the caller's program has heard of its end
        os.waitpid(child, 0)
    return len(os.listdir("/proc/self/task")) == 1


def _start_ranks(body: Callable[[int], None], size: int, fork: bool, parent: int, ended: Connection) -> None:
    """The process in between."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # a handler of the caller's program would take the ends of ranks
    _end_with(parent)
    signal.pthread_sigmask(signal.SIG_BLOCK, _OF_THE_PARENT)
    gc.freeze()  # what was imported is shared, and stays so
    start = _FORK.Process if fork else _SPAWN.Process
    arguments = [(body, rank, os.getpid()) for rank in range(size)]
    ranks = [start(target=_run, args=each, name=f"rank{rank}") for rank, each in enumerate(arguments)]
    for process in ranks:
        try:
            process.start()
        except OSError as error:
            complain(_no_process(error))
            os._exit(1)  # and the ranks that are there with it
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
    hear_of_its_end(parent, signal.SIGKILL)


def hear_of_its_end(parent: int, number: signal.Signals) -> None:
    """The system sends this process a signal when its parent ends."""
    from torch import multiprocessing as of_torch

    of_torch._prctl_pr_set_pdeathsig(number)  # pyright: ignore[reportAttributeAccessIssue]
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
