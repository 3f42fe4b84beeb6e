"""Signals: Ctrl-C ends a run at once, SIGTERM after its epoch, with a checkpoint."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType

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
