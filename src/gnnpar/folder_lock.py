"""One process works in a folder at a time: a lock on `.gnnpar.lock`, which says whose it is."""

from __future__ import annotations

import itertools
import os
import socket
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from gnnpar.durable import WriteError

FILE = ".gnnpar.lock"


class FolderInUse(ValueError):
    """Another process works in the folder: one line with its pid and host, and what to do."""


@contextmanager
def working_in(folder: Path, *, otherwise: str, say: Callable[[str], None]) -> Iterator[None]:
    """Lock a folder, which is made where it is missing.

    The lock is the operating system's and ends with the process; the file then still names it, and `say` gets a line.
    `otherwise`: what else one can choose, for FolderInUse. Raises WriteError where the folder cannot be written.
    """
    from filelock import FileLock, Timeout  # 0.1 s, which commands that lock nothing need not wait for

    file = folder / FILE
    lock = FileLock(file, timeout=0, thread_local=False)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock.acquire()
        before = _read(file)
        file.write_text(f"process {os.getpid()} of {socket.gethostname()} since {time.strftime('%Y-%m-%d %H:%M:%S')}")
    except Timeout as error:
        owner = _read(file) or "another process"
        raise FolderInUse(f"{folder} is in use by {owner}: wait for it, or {otherwise}") from error
    except OSError as error:
        raise WriteError(error.errno, error.strerror or str(error), str(folder)) from error
    if before:
        say(f"{folder} was in use by {before}, which has ended: taken over")
    try:
        yield
    finally:
        with suppress(OSError):
            file.write_text("")  # removed, it could be locked twice: by its name, and by who had it open
        lock.release()


def _read(file: Path) -> str:
    """Return the line in a lock file, '' where there is none: it may be anybody's."""
    with suppress(OSError):
        line = file.read_bytes()[:200].decode(errors="replace")
        return line if line.isprintable() else ""
    return ""


def numbered(folder: Path) -> Iterator[Path]:
    """Yield the folder, then its name with -2, -3, ..., to take the first that is free."""
    yield folder
    yield from (folder.with_name(f"{folder.name}-{number}") for number in itertools.count(2))


def started(pid: int) -> int | None:
    """Return when a process started, in clock ticks since boot; None: it has ended, or this is not Linux."""
    if sys.platform != "linux":
        return None
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    fields = stat.rpartition(")")[2].split()  # the name before may hold spaces
    return None if fields[0] in "ZX" else int(fields[19])
