"""The reason for a rank's end, in one line, and detection of a hanging rank."""

from __future__ import annotations

import faulthandler
import re
import time
import traceback
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from gnnpar.comm.world import reason_of

_LOST_PEER = ("Connection closed by peer", "Connection reset", "Broken pipe", "is gone", "Socket", "connectionFailure")
_FRAME = re.compile(r'File "([^"]*)", line (\d+) in (\S+)')


@dataclass(eq=False)
class Failure(Exception):
    """A run ended before its work was done, for the reason in `line`.

    secondary: the rank only lost a peer. lost: another attempt may succeed. quiet: another rank of this host prints it.
    """

    line: str
    traceback: str = ""
    time: float = 0.0
    secondary: bool = False
    lost: bool = False
    quiet: bool = False

    def __str__(self) -> str:
        return self.line


def failure_of(rank: int, error: BaseException) -> Failure:
    text = "".join(traceback.format_exception(error))
    secondary = isinstance(error, (RuntimeError, ConnectionError)) and any(word in str(error) for word in _LOST_PEER)
    return Failure(f"rank {rank}: {reason_of(error)}", text, time.time(), secondary)


class HangTimer:
    """Write the stacks of all threads to `file` and end this process after `seconds` without a beat. It starts after
    the first epoch, in which rank 0 reads and partitions, and gloo's time-out applies."""

    def __init__(self, file: Path, seconds: float) -> None:
        self._file, self._seconds = file.open("w"), seconds
        self._next: float | None = None

    def beat(self, *, start: bool = False) -> None:
        """Restart the timer, at most ten times in `seconds`: faulthandler starts a thread each time."""
        now = time.monotonic()
        if start if self._next is None else now > self._next:
            faulthandler.dump_traceback_later(self._seconds, exit=True, file=self._file)
            self._next = now + self._seconds / 10

    def stop(self) -> None:
        faulthandler.cancel_dump_traceback_later()
        self._next = None


def hanging(stacks: Mapping[int, Path], stopped: set[int], seconds: float) -> Failure | None:
    """Return the rank that hangs: a stopped one, else one with a stack outside gnnpar's communicator."""
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
    line = f"rank {rank}: hangs: nothing heard of it for comm.timeout_seconds={seconds:g}{where}"
    return Failure(line, lost=True)


def _innermost(stack: Path) -> tuple[str, str, str] | None:
    """Return (file, line, function) of the main thread, which is written last; the communicator's if it waits there."""
    text = stack.read_text(encoding="utf-8", errors="replace") if stack.exists() else ""
    found = _FRAME.findall(text.rpartition("Thread 0x")[2])
    return next((f for f in found[:4] if f[0].endswith("comm/process.py")), found[0]) if found else None
