"""Why a rank ended, and, where nothing moves for comm.timeout_seconds, which of the ranks holds the others up."""

from __future__ import annotations

import contextlib
import os
import re
import resource
import signal
import threading
import time
import traceback
from dataclasses import dataclass
from pathlib import Path

import psutil

from gnnpar.comm.flight_recorder import DONE, WORKING, Entry, read_entry
from gnnpar.comm.world import reason_of

_ANSWER_SECONDS = 0.5
_HELD_SECONDS = 2.0  # this thread comes late by so much where its process did not run
_LOST_PEER = ("Connection closed by peer", "Connection reset", "Broken pipe", "is gone", "Socket", "connectionFailure")
_OURS = re.compile(r'File "([^"]*gnnpar[^"]*)", line (\d+) in (\S+)')


def why_killed() -> str:
    """What the kernel kills a process for, as far as its limits tell."""
    limited = resource.getrlimit(resource.RLIMIT_CPU)[1] != resource.RLIM_INFINITY
    return "out of memory, or of CPU time (ulimit -t)" if limited else "out of memory"


@dataclass(frozen=True)
class Failure:
    """Why a rank ended. `secondary`: it only lost its peer. `lost`: it was ended, and might have gone on."""

    rank: int
    reason: str
    traceback: str = ""
    time: float = 0.0
    secondary: bool = False
    lost: bool = False

    @property
    def line(self) -> str:
        return f"rank {self.rank}: {self.reason}"


class RankFailed(Exception):
    """A rank ended before its work."""

    def __init__(self, failure: Failure) -> None:
        super().__init__(failure.line)
        self.failure = failure


def failure_of(rank: int, error: BaseException) -> Failure:
    text = "".join(traceback.format_exception(error))
    secondary = isinstance(error, (RuntimeError, ConnectionError)) and any(word in str(error) for word in _LOST_PEER)
    return Failure(rank, reason_of(error), text, time.time(), secondary)


def is_stopped(pid: int) -> bool:
    """By SIGSTOP or a debugger."""
    try:
        return psutil.Process(pid).status() in (psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP)
    except psutil.Error:
        return False


class Monitor:
    """A thread that ends the rank that hangs; `failure` says which one and where, once it has.

    It looks on from the first epoch on: before, the longest steps (reading, partitioning) are rank 0's, and gloo's own
    time-out stands. Once the work of one rank is over, none waits for another: rank 0 may take its time for the last
    checkpoint and the result. A rank that is stopped (SIGSTOP) hangs at any time, also where it is the only one.
    """

    def __init__(self, scratch: Path, num_ranks: int, *, timeout_seconds: float) -> None:
        self._scratch, self._num_ranks, self._timeout = scratch, num_ranks, timeout_seconds
        self._over = threading.Event()
        self._stopped_since: dict[int, float] = {}
        self._since = time.monotonic()
        self.failure: Failure | None = None
        self._thread = threading.Thread(target=self._loop, name="monitor", daemon=True)

    def __enter__(self) -> Monitor:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._over.set()
        self._thread.join()

    def _loop(self) -> None:
        pause, before = min(1.0, self._timeout / 4), time.monotonic()
        while not self._over.wait(pause):
            now = time.monotonic()
            if now - before > pause + _HELD_SECONDS:  # all of the run was held, by a scheduler say, and goes on
                self._since = now
                self._stopped_since.clear()
            before = now
            seen = self.entries()
            left = {rank: each for rank, each in seen.items() if each.waits_for != DONE}
            if long_stopped := {rank: each for rank, each in left.items() if self._is_long_stopped(each.pid)}:
                self._end(long_stopped)
                return
            if len(left) == self._num_ranks and self._stand_still(left):
                self._end(left)
                return

    def _is_long_stopped(self, pid: int) -> bool:
        """Whether a process was found stopped every time for as long as a rank may be silent."""
        if not is_stopped(pid):
            self._stopped_since.pop(pid, None)
            return False
        now = time.monotonic()
        return now - self._stopped_since.setdefault(pid, now) > self._timeout

    def entries(self) -> dict[int, Entry]:
        """By rank, of those that have begun to record."""
        files = {rank: self._scratch / f"{rank}.at" for rank in range(self._num_ranks)}
        return {rank: read_entry(file) for rank, file in files.items() if file.exists()}

    def is_over(self, rank: int) -> bool:
        """Whether a rank's end is no loss: its own work is done, or that of rank 0, which is done last."""
        seen = self.entries()
        return any(each.waits_for == DONE for each in (seen.get(rank), seen.get(0)) if each is not None)

    def _stand_still(self, seen: dict[int, Entry]) -> bool:
        begun = any(each.epoch >= 0 for each in seen.values())
        return begun and time.monotonic() - max(self._since, *(each.seconds for each in seen.values())) > self._timeout

    def _end(self, seen: dict[int, Entry]) -> None:
        """Blame a rank that is stopped, else one that waits for nobody, else the one that came least far; kill it."""
        stopped = [rank for rank, each in seen.items() if is_stopped(each.pid)]
        working = [rank for rank, each in seen.items() if each.waits_for == WORKING]
        rank = min(stopped or working or seen, key=lambda r: seen[r].seconds)
        where = seen[rank].place if self._num_ranks > 1 else "its work, which one rank alone does not record"
        if not stopped and (frame := self._frame(rank, seen[rank].pid)):
            where += f", {frame}"
        waits = "; the process is stopped" if stopped else "" if working else "; all ranks wait for each other"
        limit = f"comm.timeout_seconds={self._timeout:g}"
        self.failure = Failure(rank, f"hangs: nothing heard of it for {limit}; last seen in {where}{waits}", lost=True)
        with contextlib.suppress(ProcessLookupError):
            os.kill(seen[rank].pid, signal.SIGKILL)

    def _frame(self, rank: int, pid: int) -> str:
        """'at engines/flat.py:63 in train_epoch': the innermost of our frames, if the rank still answers signals."""
        stack = self._scratch / f"{rank}.stack"
        try:
            os.kill(pid, signal.SIGUSR1)
            time.sleep(_ANSWER_SECONDS)
            found = _OURS.search(stack.read_text(encoding="utf-8"))
        except OSError:
            return ""
        return f"at {'/'.join(Path(found[1]).parts[-2:])}:{found[2]} in {found[3]}" if found else ""
