"""How far a sweep is: a live display on a terminal, whatever runs the jobs; elsewhere the jobs say it in lines."""

from __future__ import annotations

import os
import sys
import threading
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

SHOWN = "GNNPAR_SWEEP_SHOWN"  # set for jobs while the parent shows them: they are silent then
_EVERY_SECONDS = 0.5
_MOST_LINES = 8


@dataclass(frozen=True)
class Snapshot:
    """A sweep at one moment. `running`: a line a job; `left_seconds`: None while no job has ended."""

    total: int
    done: int
    failed: int
    running: tuple[str, ...] = ()
    left_seconds: float | None = None

    @property
    def line(self) -> str:
        """'3 of 12 jobs done, 1 failed, 2 running, about 4 min left'."""
        parts = [f"{self.done} of {self.total} jobs done"]
        parts += [f"{self.failed} failed"] if self.failed else []
        parts += [f"{len(self.running)} running"] if self.running else []
        parts += [] if self.left_seconds is None else [f"about {duration(self.left_seconds)} left"]
        return ", ".join(parts)


@contextmanager
def shown(look: Callable[[], Snapshot]) -> Iterator[None]:
    """Inside, a terminal shows what `look` sees, twice a second; anything else shows nothing."""
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

    ended = threading.Event()
    os.environ[SHOWN] = "1"
    with Live(picture(), console=stdout(), auto_refresh=False) as live:

        def refresh() -> None:
            while not ended.wait(_EVERY_SECONDS):
                live.update(picture(), refresh=True)

        thread = threading.Thread(target=refresh, name="sweep progress", daemon=True)
        thread.start()
        try:
            yield
        finally:
            ended.set()
            thread.join()
            os.environ.pop(SHOWN, None)
            live.update(picture(), refresh=True)


def duration(seconds: float) -> str:
    """'40 s', '12 min', '3.5 h'."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"
