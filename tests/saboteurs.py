"""What happens to a rank, from inside: trackers that kill or stop a rank after an epoch, once."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

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


PARENT = -1
FROM_THE_START = -1


class Strike(NamedTuple):
    """A signal to a rank, or to the PARENT of all, `delay` seconds after the first row of `epoch` or a later one, or
    FROM_THE_START of the ranks."""

    kind: str
    epoch: int
    victim: int
    number: int
    delay: float


@dataclass(frozen=True, kw_only=True)
class Strikes:
    """tracker=strikes: one strike after the other. `file`: JSON of all; beside it, `count` remembers how many were
    made, over restarts and new starts."""

    file: Path

    def build(self, run_dir: Path, epochs: int, job: Mapping[str, Any]) -> Null:
        strikes = [Strike(*each) for each in json.loads(self.file.read_text())]
        done = made(self.file)
        return _Next(self.file, strikes[done]) if done < len(strikes) else Null()


def made(file: Path) -> int:
    """How many strikes of a file were made."""
    count = file.with_name("count")
    return len(count.read_text()) if count.exists() else 0


class _Next(Null):
    def __init__(self, file: Path, strike: Strike) -> None:
        self.file, self.strike, self.done = file, strike, False
        if strike.epoch == FROM_THE_START:
            self.make()

    def log(self, row: Mapping[str, Any]) -> None:
        if row["epoch"] >= self.strike.epoch and not self.done:
            self.make()

    def make(self) -> None:
        self.done = True
        if self.strike.delay:
            timer = threading.Timer(self.strike.delay, self.send)
            timer.daemon = True
            timer.start()
        else:
            self.send()
            time.sleep(0.05)  # a signal to oneself arrives a little later

    def send(self) -> None:
        run, parent = os.environ.get("TORCHELASTIC_RUN_ID"), os.getppid()
        ranks = ranks_of(parent) if run is None else ranks_of_torchrun(run)
        victim = parent if self.strike.victim == PARENT else ranks[self.strike.victim]
        with self.file.with_name("count").open("a") as count:
            count.write("x")
        os.kill(victim, self.strike.number)


def ranks_of(parent: int) -> list[int]:
    """Process ids of the ranks forked from a process, in order of rank."""
    return sorted(p.pid for p in psutil.Process(parent).children())


def ranks_of_torchrun(run: str) -> list[int]:
    """Process ids of the ranks of a run of torchrun, on whatever host made of this machine, in order of rank."""
    found: dict[int, int] = {}
    for process in psutil.process_iter():
        with suppress(psutil.Error, OSError):
            values = process.environ()
            if values.get("TORCHELASTIC_RUN_ID") == run and "gnnpar" in process.cmdline():
                found[int(values["RANK"])] = process.pid
    return [found[rank] for rank in sorted(found)]
