"""Terminal output: a live progress bar, or plain lines without a terminal."""

from __future__ import annotations

import io
import os
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Annotated, TextIO, cast

import annotated_types as at
import rich.console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from gnnpar.files import JsonObject
from gnnpar.track.picture import picture
from gnnpar.track.text import one_line, printable
from gnnpar.track.tracker import Tracker


def stdout() -> rich.console.Console:
    """Return a rich console without highlighting, and without wrapping if the output is a file."""
    return rich.console.Console(
        file=cast("IO[str]", _Patient(sys.stdout)), highlight=False, emoji=False, soft_wrap=not is_terminal(sys.stdout)
    )


def show_table(
    columns: Sequence[str], rows: Iterable[Sequence[str | Text]], *, title: str = "", left: Sequence[int] = (0, -1)
) -> None:
    """Print a table. left: columns aligned to the left. A cell of type str has no markup."""
    table = Table(title=title or None, title_justify="left", box=None)
    aligned = {place % len(columns) for place in left}
    for place, name in enumerate(columns):
        table.add_column(name, justify="left" if place in aligned else "right")
    for row in rows:
        table.add_row(*(escape(cell) if isinstance(cell, str) else cell for cell in row))
    console = stdout()
    if not console.is_terminal:
        console.width = 200
    console.print(table)


def is_terminal(stream: TextIO) -> bool:
    """Return True for a terminal; sys.stdout may be an object without isatty."""
    try:
        return stream.isatty()
    except AttributeError:
        return False


class _Patient(io.TextIOBase):
    """A stream that drops text on a full disk or a closed pipe: `gnnpar train ... | head` continues to train. It holds
    the stream itself: a live table of rich replaces sys.stdout by one that writes to the console."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        self._attempt(lambda: self._stream.write(text))
        return len(text)

    def flush(self) -> None:
        self._attempt(self._stream.flush)

    def _attempt(self, act: Callable[[], object]) -> None:
        try:
            act()
        except BrokenPipeError:  # otherwise Python fails when it flushes at exit
            with suppress(OSError, ValueError, AttributeError):
                os.dup2(os.open(os.devnull, os.O_WRONLY), self._stream.fileno())
        except OSError:
            pass

    def isatty(self) -> bool:
        return is_terminal(self._stream)

    def fileno(self) -> int:
        return self._stream.fileno()


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
    _print(sys.stdout, one_line(text))


def complain(text: str) -> None:
    """Print one line on stderr."""
    _print(sys.stderr, f"gnnpar: {printable(' '.join(text.split()))}")


def _print(stream: TextIO, line: str) -> None:
    patient = _Patient(stream)
    patient.write(line + "\n")
    patient.flush()


_RANK_0_SECONDS = 10.0
"""Time for rank 0 to print an error of all ranks: torchrun ends every rank as soon as one has ended."""


def complain_once(text: str, *, rank: int) -> None:
    """Print the same error of all ranks of a host on its rank 0; the others wait until it is printed."""
    if rank == 0:
        complain(text)
    else:
        time.sleep(_RANK_0_SECONDS)


SILENT_SECONDS = 5.0


@contextmanager
def progress_lines(doing: Callable[[], str]) -> Iterator[None]:
    """Context manager: print `doing()` every few seconds while it stays the same."""
    over, began = threading.Event(), time.monotonic()

    def tell() -> None:
        before = doing()
        while not over.wait(SILENT_SECONDS):
            if (now := doing()) and now == before:
                say(f"{now} ... {time.monotonic() - began:.0f} s")
            before = now

    thread = threading.Thread(target=tell, name="progress_lines", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


@dataclass(frozen=True, kw_only=True)
class Console:
    """tracker=console. every: epochs between lines without a terminal."""

    every: Annotated[int, at.Ge(1)] = 10

    def build(self, run_dir: Path, epochs: int, job: JsonObject) -> Tracker:
        return Bar(epochs) if is_terminal(sys.stdout) else Lines(epochs, every=self.every)


class _Figures:
    """The text of a row: loss, last validation, last probe of the gradient, seconds per epoch."""

    _val: float | None = None
    _probe = ""

    def of(self, row: JsonObject) -> str:
        self._val = row.get("metric/val", self._val)
        self._probe = probe_line(row) or self._probe
        loss = row["loss/train"]
        parts = [
            "loss nan" if loss is None else f"loss {loss:.4f}",
            "" if self._val is None else f"val {self._val:.4f}",
            self._probe,
            f"{seconds(row['time/epoch_seconds'])}/epoch",
        ]
        return "  ".join(filter(None, parts))


class Lines(Tracker):
    """Print a line every few epochs, and after a few seconds."""

    def __init__(self, epochs: int, *, every: int) -> None:
        self.epochs, self.every = epochs, every
        self._began = self._said = time.monotonic()
        self._first: int | None = None  # not 0 in a run resumed from a checkpoint
        self._figures = _Figures()

    def start(self, facts: JsonObject) -> None:
        stdout().print(picture(facts))
        self._began = time.monotonic()

    def log(self, row: JsonObject) -> None:
        epoch, figures = row["epoch"], self._figures.of(row)
        self._first = epoch if self._first is None else self._first
        soon = time.monotonic() - self._said < SILENT_SECONDS
        if soon and (epoch + 1) % self.every and epoch + 1 != self.epochs:
            return
        self._said = time.monotonic()
        left = (time.monotonic() - self._began) / (epoch + 1 - self._first) * (self.epochs - epoch - 1)
        say(f"epoch {epoch + 1}/{self.epochs}  {figures}  left {left:.0f} s")


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
        self._figures = _Figures()

    def start(self, facts: JsonObject) -> None:
        self.console.print(picture(facts))
        self.progress.start()

    def log(self, row: JsonObject) -> None:
        self.progress.update(self._task, completed=row["epoch"] + 1, figures=self._figures.of(row))

    def close(self, result: JsonObject | None = None) -> None:
        self.progress.stop()


def probe_line(row: JsonObject) -> str:
    """Return 'cosine 0.9871, worst layers.1 off by 12 %' if the gradient was probed, else ''."""
    if row.get("fidelity/cosine") is None:
        return ""
    worst, error = row["fidelity/worst_layer"], row["fidelity/worst_relative_error"]
    return f"cosine {row['fidelity/cosine']:.4f}, worst {worst} off by {100 * error:.2g} %"


def seconds(value: float) -> str:
    return f"{value:.2f} s" if value >= 1 else f"{value * 1e3:.1f} ms"


def num_bytes(value: float) -> str:
    for unit in ("B", "KiB", "MiB", "GiB"):
        if value < 1024 or unit == "GiB":
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1024
    raise AssertionError
