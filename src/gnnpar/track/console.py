"""Terminal output: live bars of a run and of a sweep, or plain lines without a terminal."""

from __future__ import annotations

import io
import itertools
import os
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, redirect_stderr, redirect_stdout, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Annotated, TextIO, cast

import annotated_types as at
import rich.console
from rich.live import Live
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, ProgressColumn, TextColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from gnnpar.files import JsonObject
from gnnpar.track.text import counted, one_line, printable, printable_tree
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
    out, err = (cast("TextIO", _Patient(stream)) for stream in (sys.stdout, sys.stderr))
    with redirect_stdout(out), redirect_stderr(err):
        yield


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


def complain_once(text: str, *, rank: int) -> None:
    """Print the same error of all ranks of a host on its rank 0; the others wait until it is printed."""
    if rank == 0:
        complain(text)
    else:
        time.sleep(10.0)  # torchrun ends every rank as soon as one has ended


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


class _Shown(Tracker):
    """Prints the plan; the text of a row has loss, last validation, last probe of the gradient, seconds per epoch."""

    _val: float | None = None
    _probe = ""

    def start(self, facts: JsonObject) -> None:
        stdout().print(picture(facts))

    def figures(self, row: JsonObject) -> str:
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


class Lines(_Shown):
    """Print a line every few epochs, and after a few seconds."""

    def __init__(self, epochs: int, *, every: int) -> None:
        self.epochs, self.every = epochs, every
        self._began = self._said = time.monotonic()
        self._first: int | None = None  # not 0 in a run resumed from a checkpoint

    def start(self, facts: JsonObject) -> None:
        super().start(facts)
        self._began = time.monotonic()

    def log(self, row: JsonObject) -> None:
        epoch, figures = row["epoch"], self.figures(row)
        self._first = epoch if self._first is None else self._first
        soon = time.monotonic() - self._said < SILENT_SECONDS
        if soon and (epoch + 1) % self.every and epoch + 1 != self.epochs:
            return
        self._said = time.monotonic()
        left = (time.monotonic() - self._began) / (epoch + 1 - self._first) * (self.epochs - epoch - 1)
        say(f"epoch {epoch + 1}/{self.epochs}  {figures}  left {left:.0f} s")


class Bar(_Shown):
    """A live progress bar: loss, validation, epoch time, remaining time."""

    def __init__(self, epochs: int) -> None:
        left = TextColumn("left"), TimeRemainingColumn(compact=True)
        self.progress = _progress("epoch", TextColumn("{task.fields[figures]}"), *left)
        self._task = self.progress.add_task("train", total=epochs, figures="")

    def start(self, facts: JsonObject) -> None:
        super().start(facts)
        self.progress.start()

    def log(self, row: JsonObject) -> None:
        self.progress.update(self._task, completed=row["epoch"] + 1, figures=self.figures(row))

    def close(self, result: JsonObject | None = None) -> None:
        self.progress.stop()


def _progress(noun: str, *columns: ProgressColumn) -> Progress:
    return Progress(TextColumn(noun), MofNCompleteColumn(), BarColumn(24), *columns, console=stdout())


SHOWN = "GNNPAR_SWEEP_SHOWN"  # set while the parent shows the jobs, which then print nothing
_MOST_LINES = 8


@dataclass(frozen=True)
class Snapshot:
    """A sweep at one moment. running: a line per job. left_seconds: None until a job has ended."""

    total: int
    done: int
    failed: int
    running: tuple[str, ...] = ()
    left_seconds: float | None = None

    @property
    def line(self) -> str:
        """Return '3 of 12 jobs done, 1 failed, 2 running, about 4 min left'."""
        parts = [f"{self.done} of {self.total} jobs done"]
        parts += [f"{self.failed} failed"] if self.failed else []
        parts += [f"{len(self.running)} running"] if self.running else []
        parts += [] if self.left_seconds is None else [f"about {duration(self.left_seconds)} left"]
        return ", ".join(parts)


@contextmanager
def shown(look: Callable[[], Snapshot]) -> Iterator[None]:
    """Context manager: show a sweep, `look()`, on a terminal, twice a second; elsewhere show nothing."""
    if not is_terminal(sys.stdout):
        yield
        return
    bar = _progress("jobs", TextColumn("{task.fields[detail]}"))
    task = bar.add_task("jobs", total=None, detail="")

    def sweep() -> rich.console.Group:
        now = look()
        detail = escape(now.line.partition(" done")[2].lstrip(", "))
        bar.update(task, total=now.total, completed=now.done + now.failed, detail=detail)
        lines = [Text(printable(line), no_wrap=True, overflow="ellipsis") for line in now.running[:_MOST_LINES]]
        return rich.console.Group(bar, *lines)

    os.environ[SHOWN] = "1"
    try:
        with Live(get_renderable=sweep, console=bar.console, refresh_per_second=2):
            yield
    finally:
        os.environ.pop(SHOWN, None)


_MOST_RANKS = 8  # rows and columns of the heat table
_HEAT = ("dim", "", "yellow", "bold red")  # by quarter of the largest entry
_PART = {"nodes": "nodes", "edges": "edges", "train_nodes": "train"}  # columns of the table of parts
_TOLD = ("strategy", "model", "dataset", "nodes", "edges", "ranks", "threads", "transport", "links")


def picture(facts: JsonObject) -> rich.console.Group:
    """Return at most 15 lines on a run's layout. facts: as passed to Tracker.start."""
    facts = printable_tree(facts)  # names come from datasets, plans and shards
    above = [Text(line) for line in (_head(facts), _mesh(facts), _layers(facts)) if line]
    table = [_parts(facts)] if facts.get("parts") else []
    others = ((k, v) for k, v in facts.items() if k not in _TOLD and isinstance(v, (int, float, str)))
    below = "  ".join(f"{name.replace('_', ' ')} {figure(value)}" for name, value in others)
    return rich.console.Group(*above, *table, *([Text(below)] if below else []))


def _head(facts: JsonObject) -> str:
    """Return 'graph_parallel gcn sbm  3,000 nodes  50,214 edges  2 ranks x 1 thread over gloo'."""
    named = " ".join(str(facts[name]) for name in ("strategy", "model", "dataset") if facts.get(name))
    sizes = [f"{figure(facts[name])} {name}" for name in ("nodes", "edges") if name in facts]
    if "ranks" in facts:
        ranks = f"{counted(facts['ranks'], 'rank')} x {counted(facts.get('threads', 1), 'thread')}"
        over = facts.get("transport", "none")
        sizes.append(ranks + (f" over {over}" if over != "none" else ""))
    sizes += [str(facts["links"])] if "links" in facts else []
    return "  ".join(filter(None, [named, *sizes]))


def _mesh(facts: JsonObject) -> str:
    """Return 'stage 0: ranks 0 1, layers 0 to 1; stage 1: ...' for several stages."""
    stages = [(stage["ranks"], *stage["layers"]) for stage in facts.get("mesh") or ()]
    lines = (
        f"stage {i}: ranks {' '.join(map(str, ranks))}, layers {first} to {stop - 1}"
        for i, (ranks, first, stop) in enumerate(stages)
    )
    return "; ".join(lines) if len(stages) > 1 else ""


def _layers(facts: JsonObject) -> str:
    """Return '64 -halo-> 64 -halo-> 8  (bfloat16, overlap edges)'; equal layers in a row are counted."""
    layers: Sequence[JsonObject] = facts.get("layers") or ()
    if not layers:
        return ""
    text = str(layers[0]["in"])
    for (mode, out), same in itertools.groupby(layers, key=lambda layer: (layer["mode"], layer["out"])):
        count = len(list(same))
        text += f" -{mode}-> {out}" + (f" ({count} layers)" if count > 1 else "")
    how = dict.fromkeys(layer["how"] for layer in layers if layer["how"])
    return f"layers: {text}" + (f"  ({'; '.join(how)})" if how else "")


def _parts(facts: JsonObject) -> Table:
    """Return one row per part; on the right the rows it reads from each other part, in warm colours if many."""
    rows: Sequence[JsonObject] = facts["parts"]
    halo: Sequence[Sequence[int]] | None = facts.get("halo_from")
    columns = [name for name in rows[0] if name in _PART] if halo else [name for name in rows[0] if name != "part"]
    table = Table(box=None, show_edge=False, pad_edge=False)
    table.add_column("part", justify="right")
    for name in columns:
        table.add_column(_PART.get(name, name.replace("_", " ")), justify="right")
    heat = halo if halo and len(rows) > 1 else None
    few = range(min(len(rows), _MOST_RANKS))
    for j in few if heat else ():
        table.add_column(f"{'halo from ' if j == 0 else ''}{j}", justify="right")
    most = max(1, *(max(row) for row in heat)) if heat else 1
    for i in few:
        cells: list[Text | str] = [str(rows[i].get("part", i)), *(figure(rows[i][name]) for name in columns)]
        for j, count in enumerate(heat[i][: len(few)] if heat else ()):
            cells.append("." if i == j else Text(figure(count), style=_HEAT[min(3, 4 * count // most)]))
        table.add_row(*cells)
    if len(rows) > _MOST_RANKS:
        table.add_row("...", f"{len(rows)} parts")
    return table


def figure(value: object) -> str:
    """Return a number with separators and four digits."""
    if isinstance(value, float):
        return f"{value:.4g}"
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)


def probe_line(row: JsonObject) -> str:
    """Return 'cosine 0.9871, worst layers.1 off by 12 %' if the gradient was probed, else ''."""
    if row.get("fidelity/cosine") is None:
        return ""
    worst, error = row["fidelity/worst_layer"], row["fidelity/worst_relative_error"]
    return f"cosine {row['fidelity/cosine']:.4f}, worst {worst} off by {100 * error:.2g} %"


def seconds(value: float) -> str:
    return f"{value:.2f} s" if value >= 1 else f"{value * 1e3:.1f} ms"


def duration(seconds: float) -> str:
    """Return '40 s', '12 min', '3.5 h'."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"


def num_bytes(value: float) -> str:
    """Return '10 B', '2.0 KiB', '3.0 GiB'; GiB is the largest unit."""
    if value < 1024:
        return f"{value:.0f} B"
    power = min(3, (int(value).bit_length() - 1) // 10)
    return f"{value / 1024**power:.1f} {'KMG'[power - 1]}iB"
