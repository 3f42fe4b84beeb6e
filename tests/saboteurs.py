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
        strike(self.plan)


def strike(plan: Saboteur) -> None:
    victim = ranks_of(os.getppid())[plan.rank]
    if plan.delay:
        threading.Timer(plan.delay, os.kill, (victim, plan.number)).start()
    else:
        os.kill(victim, plan.number)
        time.sleep(0.05)  # a signal to oneself arrives a little later


@dataclass(frozen=True, kw_only=True)
class Strikes:
    """Kills one rank after another: strike i = (epoch, rank, delay), after the first row of that epoch or a later one.

    `count`: a file that remembers over restarts how many there were.
    """

    strikes: tuple[tuple[int, int, float], ...]
    count: Path

    def build(self, run_dir: Path, epochs: int, job: Mapping[str, Any]) -> Null:
        done = len(self.count.read_text()) if self.count.exists() else 0
        if done == len(self.strikes):
            return Null()
        epoch, rank, delay = self.strikes[done]
        return _From(self, Saboteur(epoch=epoch, rank=rank, marker=self.count, delay=delay))


class _From(Null):
    def __init__(self, plan: Strikes, strike: Saboteur) -> None:
        self.plan, self.strike, self.done = plan, strike, False

    def log(self, row: Mapping[str, Any]) -> None:
        if row["epoch"] >= self.strike.epoch and not self.done:
            self.done = True
            with self.plan.count.open("a") as file:
                file.write("x")
            strike(self.strike)


def ranks_of(parent: int) -> list[int]:
    """Process ids of the ranks that a process has started, in order of rank."""
    children = psutil.Process(parent).children()
    return sorted(p.pid for p in children if any("spawn_main" in word for word in p.cmdline()))
