"""What happens to a rank, from inside: trackers that kill or stop a rank after an epoch, once."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from gnnpar.track.tracker import Null


@dataclass(frozen=True, kw_only=True)
class Saboteur:
    """Sends `number` to `rank`, `delay` seconds after rank 0 has logged `epoch`; `marker` remembers that it has."""

    epoch: int
    rank: int
    marker: Path
    number: int = signal.SIGKILL
    delay: float = 0.0

    def build(self, run_dir: Path, epochs: int, job: Mapping[str, Any]) -> Null:
        return _At(self)


class _At(Null):
    def __init__(self, plan: Saboteur) -> None:
        self.plan = plan

    def log(self, row: Mapping[str, Any]) -> None:
        if row["epoch"] != self.plan.epoch or self.plan.marker.exists():
            return
        self.plan.marker.touch()
        victim = ranks_of(os.getppid())[self.plan.rank]
        if self.plan.delay:
            threading.Timer(self.plan.delay, os.kill, (victim, self.plan.number)).start()
        else:
            os.kill(victim, self.plan.number)
            time.sleep(0.05)  # a signal to oneself arrives a little later


def ranks_of(parent: int) -> list[int]:
    """Process ids of the ranks that a process has started, in order of rank."""
    children = psutil.Process(parent).children()
    return sorted(p.pid for p in children if any("spawn_main" in word for word in p.cmdline()))
