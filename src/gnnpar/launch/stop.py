"""How a run is asked to end: at the end of its epoch, with a checkpoint. SIGTERM asks so, Ctrl-C ends at once."""

from __future__ import annotations

import os
import signal
import threading
from pathlib import Path


class Interrupted(KeyboardInterrupt):
    """The run was asked to end and has done what was to be done before."""


class Stop:
    """Whether the end of the epoch is to be the end. `file`: what the parent leaves where ranks are processes."""

    def __init__(self, file: Path | None = None) -> None:
        self.file = file
        self._asked = threading.Event()
        self._timer: threading.Timer | None = None

    def ask(self) -> None:
        self._asked.set()
        if self.file is not None:
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


def listen_in_rank(stop: Stop) -> None:
    """A started rank's answer to SIGTERM, which its parent blocked in all its threads: from the parent it means the end
    at once, from anybody else (a scheduler tells all processes of a job) the end of the epoch."""
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})

    def receive() -> None:
        while True:
            info = signal.sigwaitinfo({signal.SIGTERM})
            if info.si_pid == os.getppid():
                os._exit(1)
            stop.ask()

    threading.Thread(target=receive, name="sigterm", daemon=True).start()
