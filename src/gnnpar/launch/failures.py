"""Why a rank ended: in one line, and which rank holds the others up where none comes on."""

from __future__ import annotations

import faulthandler
import re
import resource
import time
import traceback
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import psutil

from gnnpar.comm.world import reason_of

_LOST_PEER = ("Connection closed by peer", "Connection reset", "Broken pipe", "is gone", "Socket", "connectionFailure")
_FRAME = re.compile(r'File "([^"]*)", line (\d+) in (\S+)')


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


class HangTimer:
    """End this process when nothing moves for `seconds`, and leave the stacks of its threads in `file`.

    It runs from the first epoch's end on: before, rank 0 reads and partitions, and gloo's own time-out stands.
    """

    def __init__(self, file: Path, seconds: float) -> None:
        self._file, self._seconds = file.open("w"), seconds
        self._next: float | None = None

    def beat(self, *, start: bool = False) -> None:
        """The rank comes on. Arming costs a thread: at most ten times in `seconds`."""
        now = time.monotonic()
        if start if self._next is None else now > self._next:
            faulthandler.dump_traceback_later(self._seconds, exit=True, file=self._file)
            self._next = now + self._seconds / 10

    def stop(self) -> None:
        """No other rank waits for this one any more."""
        faulthandler.cancel_dump_traceback_later()
        self._next = None


def is_stopped(pid: int) -> bool:
    """By SIGSTOP or a debugger."""
    try:
        return psutil.Process(pid).status() in (psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP)
    except psutil.Error:
        return False


def hanging(stacks: Mapping[int, Path], stopped: set[int], seconds: float) -> Failure | None:
    """The rank that hangs, by what their timers wrote: one that is stopped, else one that waits for no other."""
    frames = {rank: _innermost(file) for rank, file in stacks.items()}
    if not any(frames.values()) and not stopped:
        return None
    working = [rank for rank, frame in frames.items() if frame and not frame[0].endswith("comm/process.py")]
    rank = min(stopped or working or frames)
    where = ""
    if rank in stopped:
        where = "; the process is stopped"
    elif frame := frames[rank]:
        where = f"; at {'/'.join(Path(frame[0]).parts[-2:])}:{frame[1]} in {frame[2]}"
        where += "" if working else "; all ranks wait for each other"
    return Failure(rank, f"hangs: nothing heard of it for comm.timeout_seconds={seconds:g}{where}", lost=True)


def _innermost(stack: Path) -> tuple[str, str, str] | None:
    """(file, line, function) of the main thread, which is written last; in gnnpar if it waits for another rank."""
    text = stack.read_text(encoding="utf-8", errors="replace") if stack.exists() else ""
    found = _FRAME.findall(text.rpartition("Thread 0x")[2])
    return next((f for f in found[:4] if f[0].endswith("comm/process.py")), found[0]) if found else None
