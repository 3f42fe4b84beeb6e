"""Live display of a sweep's progress on a terminal; elsewhere the jobs print lines."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from rich.console import Group
from rich.live import Live
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
from rich.text import Text

from gnnpar.track.console import is_terminal, stdout
from gnnpar.track.text import printable

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
    """Context manager: show `look()` on a terminal, twice a second; elsewhere show nothing."""
    if not is_terminal(sys.stdout):
        yield
        return
    bar = Progress(TextColumn("jobs"), MofNCompleteColumn(), BarColumn(24), TextColumn("{task.fields[detail]}"))
    task = bar.add_task("jobs", total=None, detail="")

    def picture() -> Group:
        now = look()
        ended = now.done + now.failed
        bar.update(task, total=now.total, completed=ended, detail=escape(now.line.partition(" done")[2].lstrip(", ")))
        lines = [Text(printable(line), no_wrap=True, overflow="ellipsis") for line in now.running[:_MOST_LINES]]
        return Group(bar, *lines)

    os.environ[SHOWN] = "1"
    try:
        with Live(get_renderable=picture, console=stdout(), refresh_per_second=2):
            yield
    finally:
        os.environ.pop(SHOWN, None)


def duration(seconds: float) -> str:
    """Return '40 s', '12 min', '3.5 h'."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"
