"""Ranks that sleep: in a module of its own, for processes that are started anew import it by its name."""

from __future__ import annotations

import os
import time
from pathlib import Path

import psutil


class Sleep:
    """A rank that says who it is and sleeps."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __call__(self, rank: int) -> None:
        (self.folder / f"{rank}.pid").write_text(str(os.getpid()))
        time.sleep(60.0)

    def processes(self, size: int) -> list[psutil.Process]:
        files = [self.folder / f"{rank}.pid" for rank in range(size)]
        deadline = time.monotonic() + 60
        while not all(file.exists() and file.read_text() for file in files):
            assert time.monotonic() < deadline
            time.sleep(0.02)
        return [psutil.Process(int(file.read_text())) for file in files]
