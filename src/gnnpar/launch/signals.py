"""How a run is asked to end: Ctrl-C ends it at once, SIGTERM at the end of its epoch, with a checkpoint.

A parent of ranks alone sees both: they are blocked in the thread that starts the ranks, which inherit that, and a
thread beside it receives them.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType


class Stop:
    """Whether the end of the epoch is to be the end. `file`: what the parent leaves where ranks are processes."""

    def __init__(self, file: Path | None = None) -> None:
        self.file = file
        self._asked = threading.Event()
        self._timer: threading.Timer | None = None

    def kept_in(self, file: Path) -> None:
        """The parent, before ranks start: they will look for `file`, which takes the place of another one then, as a
        disk may be full."""
        _spare(file).touch()
        self.file = file
        if self._asked.is_set():  # before there was a file to say it in
            self.ask()

    def ask(self) -> None:
        self._asked.set()
        if self.file is not None:
            with suppress(OSError):  # it has been asked already, or a cleaner has removed the other file
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


def listen_in_rank(stop: Stop) -> None:
    """A started rank's answer to SIGTERM, which its parent blocked in all its threads: the end of the epoch.

    A scheduler sends it to all processes of a job.
    """
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})

    def receive() -> None:
        while True:
            signal.sigwaitinfo({signal.SIGTERM})
            stop.ask()

    threading.Thread(target=receive, name="sigterm", daemon=True).start()


Handler = Callable[[int, FrameType | None], None]


def handlers_of(ask: Callable[[], None]) -> dict[signal.Signals, Handler]:
    """What a run does at signals: SIGTERM, and SIGUSR1, which schedulers are asked to send ahead of the end, `ask` for
    its end; Ctrl-C, Ctrl-\\ and the end of the terminal interrupt it."""

    def interrupt(signum: int, frame: object) -> None:
        raise KeyboardInterrupt

    def asked(signum: int, frame: object) -> None:
        ask()

    handlers: dict[signal.Signals, Handler] = {signal.SIGTERM: asked, signal.SIGUSR1: asked}
    handlers |= {signal.SIGINT: interrupt, signal.SIGQUIT: interrupt}
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # `nohup gnnpar train` outlives its terminal
        handlers[signal.SIGHUP] = interrupt
    return handlers


@contextmanager
def interruptible(stop: Stop, grace_seconds: float) -> Iterator[None]:
    """Ctrl-C ends a run at once, SIGTERM at the end of the epoch; the handlers that were there come back."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def ask() -> None:
        if os.environ.get("RANK"):  # whoever started the ranks has a grace of its own
            stop.ask()
        else:
            stop.ask_within(grace_seconds)

    kept = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1)
    before = {number: signal.getsignal(number) for number in _of_python(kept)}
    handlers = handlers_of(ask)
    for number in before.keys() & handlers.keys():
        signal.signal(number, handlers[number])
    try:
        yield
    finally:
        stop.over()
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def ended_after(clean: Callable[[], object]) -> Iterator[None]:
    """SIGTERM and SIGHUP end this process as they would, after `clean`."""

    def end(signum: int, frame: object) -> None:
        clean()
        signal.signal(signum, signal.SIG_DFL)
        signal.raise_signal(signum)

    in_main = threading.current_thread() is threading.main_thread()
    numbers = [each for each in (signal.SIGTERM, signal.SIGHUP) if in_main and signal.getsignal(each) is signal.SIG_DFL]
    for number in _of_python(numbers):
        signal.signal(number, end)
    try:
        yield
    finally:
        for number in numbers:
            if signal.getsignal(number) is end:
                signal.signal(number, signal.SIG_DFL)


def _of_python(signals: Iterable[signal.Signals]) -> list[signal.Signals]:
    """Those without a handler that is no Python function, as faulthandler's: it could not be given back."""
    caught = 0
    with suppress(OSError), open("/proc/self/status", encoding="ascii", errors="replace") as lines:
        caught = next((int(line.split()[1], 16) for line in lines if line.startswith("SigCgt:")), 0)
    unknown = (signal.SIG_DFL, signal.SIG_IGN, None)
    return [each for each in signals if not (caught >> (each - 1) & 1 and signal.getsignal(each) in unknown)]


@contextmanager
def blocked(signals: Iterable[signal.Signals]) -> Iterator[None]:
    """No signal of these interrupts this thread, nor processes and threads that it starts inside."""
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, signals)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)


@contextmanager
def postponed(signals: Iterable[signal.Signals]) -> Iterator[None]:
    """Signals of these that arrive inside come when it ends: one that this thread has blocked may reach another, and
    Python then runs its handler here."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    arrived: list[int] = []
    kept = _of_python(signals)
    before = {number: signal.signal(number, lambda number, _: arrived.append(number)) for number in kept}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        for number in dict.fromkeys(arrived):
            os.kill(os.getpid(), number)


@contextmanager
def received(handlers: Mapping[signal.Signals, Callable[[int, FrameType | None], None]]) -> Iterator[None]:
    """A thread that does nothing else receives the signals that this one, the main thread, has blocked."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    done = threading.Event()

    def receive() -> None:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, handlers)
        while not done.wait(0.2):  # Python runs the handler in the main thread once any thread got the signal
            pass

    before = {number: signal.signal(number, handlers[number]) for number in _of_python(handlers)}
    receiver = threading.Thread(target=receive, name="signals", daemon=True)
    receiver.start()
    try:
        yield
    finally:
        done.set()
        receiver.join()
        for number, handler in before.items():
            signal.signal(number, handler)
