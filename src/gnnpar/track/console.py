"""The terminal: a live progress bar, plain lines where there is no terminal, and the one place that writes to it."""

from __future__ import annotations

import io
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Annotated, TextIO, cast

import annotated_types as at
import rich.console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from gnnpar.files import JsonObject
from gnnpar.track.picture import picture
from gnnpar.track.text import one_line, printable
from gnnpar.track.tracker import Tracker


def stdout() -> rich.console.Console:
    """Return a rich console without highlighting, and without wrapping if the output is a file."""
    return rich.console.Console(
        file=cast("IO[str]", _Patient(sys.stdout)), highlight=False, emoji=False, soft_wrap=not is_terminal(sys.stdout)
    )


def is_terminal(stream: TextIO) -> bool:
    """Return True for a terminal; a program may have replaced sys.stdout by an object that only has write."""
    try:
        return stream.isatty()
    except AttributeError:
        return False


class _Patient(io.TextIOBase):
    """A stream that drops what a full disk or a closed pipe does not take: `gnnpar train ... | head` trains on.

    It holds the stream itself: a live table of rich replaces sys.stdout by one that writes to the console.
    """

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        with _patience(self._stream):
            self._stream.write(text)
        return len(text)

    def flush(self) -> None:
        with _patience(self._stream):
            self._stream.flush()

    def isatty(self) -> bool:
        return is_terminal(self._stream)

    def fileno(self) -> int:
        return self._stream.fileno()


@contextmanager
def _patience(stream: TextIO) -> Iterator[None]:
    try:
        yield
    except BrokenPipeError:  # otherwise Python fails when it flushes at exit
        with suppress(OSError, ValueError, AttributeError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
    except OSError:
        pass


@contextmanager
def patient_streams() -> Iterator[None]:
    """Context manager: flushing sys.stdout and sys.stderr, as Python does before a fork, ignores a full disk."""
    before = sys.stdout, sys.stderr
    sys.stdout, sys.stderr = (cast("TextIO", _Patient(stream)) for stream in before)
    try:
        yield
    finally:
        sys.stdout, sys.stderr = before


def say(text: str) -> None:
    """Print one line on stdout; line ends in the text are escaped."""
    patient = _Patient(sys.stdout)
    patient.write(one_line(text) + "\n")
    patient.flush()


def complain(text: str) -> None:
    """Print one line on stderr."""
    patient = _Patient(sys.stderr)
    patient.write(f"gnnpar: {printable(' '.join(text.split()))}\n")
    patient.flush()


def complain_once(text: str, *, rank: int) -> None:
    """The same line known to every joined rank of a host, numbered there from 0: the first says it, and the others let
    it, because torchrun ends all ranks as soon as one has ended."""
    if rank == 0:
        complain(text)
    else:
        time.sleep(_LET_RANK_0_SPEAK_SECONDS)


_LET_RANK_0_SPEAK_SECONDS = 10.0


SILENT_SECONDS = 5.0


@contextmanager
def pulse(doing: Callable[[], str]) -> Iterator[None]:
    """Context manager: print `doing()` every few seconds for as long as it stays the same."""
    over, began = threading.Event(), time.monotonic()

    def tell() -> None:
        before = doing()
        while not over.wait(SILENT_SECONDS):
            if (now := doing()) and now == before:
                say(f"{now} ... {time.monotonic() - began:.0f} s")
            before = now

    thread = threading.Thread(target=tell, name="pulse", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


@dataclass(frozen=True, kw_only=True)
class Console:
    """tracker=console. `every`: epochs between lines where there is no terminal."""

    every: Annotated[int, at.Ge(1)] = 10

    def build(self, run_dir: Path, epochs: int, job: JsonObject) -> Tracker:
        return Bar(epochs) if is_terminal(sys.stdout) else Lines(epochs, every=self.every)


class Lines:
    """A line every few epochs, and after a few seconds."""

    def __init__(self, epochs: int, *, every: int) -> None:
        self.epochs, self.every = epochs, every
        self._began = self._said = time.monotonic()
        self._first: int | None = None  # not 0 in a run that goes on from a checkpoint
        self._val: float | None = None
        self._probe = ""

    def start(self, facts: JsonObject) -> None:
        stdout().print(picture(facts))
        self._began = time.monotonic()

    def log(self, row: JsonObject) -> None:
        epoch = row["epoch"]
        self._first = epoch if self._first is None else self._first
        self._val = row.get("metric/val", self._val)
        self._probe = probe_line(row) or self._probe
        soon = time.monotonic() - self._said < SILENT_SECONDS
        if soon and (epoch + 1) % self.every and epoch + 1 != self.epochs:
            return
        self._said = time.monotonic()
        left = (time.monotonic() - self._began) / (epoch + 1 - self._first) * (self.epochs - epoch - 1)
        say(f"epoch {epoch + 1}/{self.epochs}  {_figures(row, self._val, self._probe)}  left {left:.0f} s")

    def close(self, result: JsonObject | None = None) -> None: ...


class Bar:
    """A live progress bar: loss, validation, epoch time, remaining time."""

    def __init__(self, epochs: int) -> None:
        self.console = stdout()
        self.progress = Progress(
            TextColumn("epoch"),
            MofNCompleteColumn(),
            BarColumn(bar_width=24),
            TextColumn("{task.fields[figures]}"),
            TextColumn("left"),
            TimeRemainingColumn(compact=True),
            console=self.console,
        )
        self._task = self.progress.add_task("train", total=epochs, figures="")
        self._val: float | None = None
        self._probe = ""

    def start(self, facts: JsonObject) -> None:
        self.console.print(picture(facts))
        self.progress.start()

    def log(self, row: JsonObject) -> None:
        self._val = row.get("metric/val", self._val)
        self._probe = probe_line(row) or self._probe
        self.progress.update(self._task, completed=row["epoch"] + 1, figures=_figures(row, self._val, self._probe))

    def close(self, result: JsonObject | None = None) -> None:
        self.progress.stop()


def probe_line(row: JsonObject) -> str:
    """'cosine 0.9871, worst layers.1 off by 12 %' where the gradient was probed, else nothing."""
    if row.get("fidelity/cosine") is None:
        return ""
    worst, error = row["fidelity/worst_layer"], row["fidelity/worst_relative_error"]
    return f"cosine {row['fidelity/cosine']:.4f}, worst {worst} off by {100 * error:.2g} %"


def _figures(row: JsonObject, val: float | None, probe: str = "") -> str:
    loss = row["loss/train"]
    parts = [
        "loss nan" if loss is None else f"loss {loss:.4f}",
        "" if val is None else f"val {val:.4f}",
        probe,
        f"{seconds(row['time/epoch_seconds'])}/epoch",
    ]
    return "  ".join(p for p in parts if p)


def seconds(value: float) -> str:
    return f"{value:.2f} s" if value >= 1 else f"{value * 1e3:.1f} ms"


def num_bytes(value: float) -> str:
    for unit in ("B", "KiB", "MiB", "GiB"):
        if value < 1024 or unit == "GiB":
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1024
    raise AssertionError
