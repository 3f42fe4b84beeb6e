"""How a run is asked to end: Ctrl-C ends it at once, SIGTERM at the end of its epoch, with a checkpoint."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType

OF_THE_PARENT = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1)
"""Signals that terminals and schedulers send to all processes, and that the parent of ranks alone answers."""


class Stop:
    """Whether the end of the epoch is to be the end. `file`: by which a parent tells its ranks."""

    def __init__(self, file: Path | None = None) -> None:
        self.file = file
        self._asked = threading.Event()
        self._timer: threading.Timer | None = None

    def kept_in(self, file: Path) -> None:
        """Ranks will look for `file`. A spare file is renamed to it: the disk may be full by then."""
        _spare(file).touch()
        self.file = file
        if self._asked.is_set():
            self.ask()

    def ask(self) -> None:
        self._asked.set()
        if self.file is not None:
            with suppress(OSError):  # it has been asked already
                _spare(self.file).rename(self.file)
            if not self.file.exists():
                with suppress(OSError):
                    self.file.touch()

    def asked(self) -> bool:
        return self._asked.is_set() or (self.file is not None and self.file.exists())

    def ask_within(self, seconds: float) -> None:
        """Ask, and interrupt this process as Ctrl-C does when it has not ended by then. A second time: at once."""
        if self._timer is not None:
            self._timer.cancel()
            seconds = 0.0
        self.ask()
        self._timer = threading.Timer(seconds, os.kill, (os.getpid(), signal.SIGINT))
        self._timer.daemon = True
        self._timer.start()

    def over(self) -> None:
        """The run has ended by itself."""
        if self._timer is not None:
            self._timer.cancel()


def _spare(file: Path) -> Path:
    return file.with_name(f"{file.name}.spare")


def answer_in_rank(stop: Stop) -> None:
    """A started rank answers SIGTERM, which schedulers send to all processes of a job, and leaves the rest to its
    parent. The parent has blocked all of them while it started the rank."""
    for number in OF_THE_PARENT:
        signal.signal(number, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, lambda number, frame: stop.ask())
    signal.pthread_sigmask(signal.SIG_UNBLOCK, OF_THE_PARENT)


@contextmanager
def interruptible(stop: Stop, grace_seconds: float) -> Iterator[None]:
    """Ctrl-C, Ctrl-\\ and the end of the terminal interrupt a run. SIGTERM and SIGUSR1, which schedulers are asked to
    send ahead of the end, end it after its epoch. The handlers that were there come back."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def interrupt(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    def ask(number: int, frame: FrameType | None) -> None:
        if os.environ.get("RANK"):  # the program that started the ranks has a grace of its own
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
        stop.over()
        for number, handler in before.items():
            if handler is not None:  # of C, as faulthandler's
                signal.signal(number, handler)


@contextmanager
def blocked(signals: Iterable[signal.Signals] = OF_THE_PARENT) -> Iterator[None]:
    """Signals wait until the end, for this thread and for processes that it starts inside."""
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, signals)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
