"""The reason for a rank's end, in one line; detection of a hanging rank; and the signals that end a run: Ctrl-C at
once, SIGTERM after its epoch, with a checkpoint."""

from __future__ import annotations

import faulthandler
import os
import re
import signal
import threading
import time
import traceback
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

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


OF_THE_PARENT = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1)
"""Signals that terminals and schedulers send to all processes; for local ranks, only their parent handles them."""


class Stop:
    """A request to end after this epoch. file: its existence passes the request to ranks."""

    def __init__(self, file: Path | None = None) -> None:
        self.file = file
        self._asked = threading.Event()
        self._timer: threading.Timer | None = None

    def ask(self) -> None:
        self._asked.set()
        if self.file is not None:
            with suppress(OSError):  # a full disk; the grace period ends the run
                self.file.touch()

    def asked(self) -> bool:
        return self._asked.is_set() or (self.file is not None and self.file.exists())

    def ask_within(self, seconds: float) -> None:
        """Request the end, and send this process SIGINT after `seconds`. A second call sends it at once."""
        if self._timer is not None:
            self._timer.cancel()
            seconds = 0.0
        self.ask()
        self._timer = threading.Timer(seconds, os.kill, (os.getpid(), signal.SIGINT))
        self._timer.daemon = True
        self._timer.start()

    def cancel(self) -> None:
        """Cancel the SIGINT: the run has ended."""
        if self._timer is not None:
            self._timer.cancel()


def answer_in_rank(stop: Stop) -> None:
    """Handle SIGTERM in a local rank, and ignore the other signals. The parent has blocked them during the start."""
    for number in OF_THE_PARENT:
        signal.signal(number, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, lambda number, frame: stop.ask())
    signal.pthread_sigmask(signal.SIG_UNBLOCK, OF_THE_PARENT)


@contextmanager
def interruptible(stop: Stop, grace_seconds: float) -> Iterator[None]:
    """Interrupt a run by SIGINT, SIGQUIT and SIGHUP; end it after its epoch by SIGTERM and SIGUSR1."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def interrupt(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    def ask(number: int, frame: FrameType | None) -> None:
        if os.environ.get("RANK"):  # torchrun and srun have their own grace period
            stop.ask()
        else:
            stop.ask_within(grace_seconds)

    before = {number: signal.getsignal(number) for number in OF_THE_PARENT}
    for number, handler in before.items():
        if not (number == signal.SIGHUP and handler is signal.SIG_IGN):  # `nohup gnnpar train` outlives its terminal
            signal.signal(number, ask if number in (signal.SIGTERM, signal.SIGUSR1) else interrupt)
    try:
        yield
    finally:
        stop.cancel()
        for number, handler in before.items():
            if handler is not None:  # None: set in C, as by faulthandler
                signal.signal(number, handler)


@contextmanager
def blocked(signals: Iterable[signal.Signals] = OF_THE_PARENT) -> Iterator[None]:
    """Block signals in this thread and in processes that it starts."""
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, signals)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
