"""metrics.jsonl: one JSON object per epoch, always written, complete after every epoch."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

from gnnpar.files import DISK_FULL, JsonDict, JsonObject, WriteError, parse_json, write_text_atomic
from gnnpar.track import keys
from gnnpar.track.tracker import Tracker

FILE = "metrics.jsonl"


class DiskFull(OSError):
    """The run ends because its disk is full."""


class Jsonl(Tracker):
    """Append each row at once, so that a killed run keeps every finished epoch.

    source: the run folder from which a resumed run copies its first `epochs_done` rows. timed: whether their times and
    bytes count for this run. free: called on a full disk; returns True if it freed space, False if that was the last,
    None if there was none. count: rows so far.
    """

    def __init__(
        self,
        run_dir: Path,
        *,
        source: Path | None = None,
        epochs_done: int = 0,
        timed: bool = True,
        free: Callable[[], bool | None] = lambda: None,
    ) -> None:
        self._path, self._free = run_dir / FILE, free
        if source is None:
            write_text_atomic(self._path, "")
        else:
            kept = [row for row in read_rows(source) if row["epoch"] < epochs_done]
            if not timed:  # drop the earlier run's measurements of itself
                own = ("memory/", "assign/")
                kept = [{k: v for k, v in row.items() if not k.startswith(own)} | {"time/timed": 0} for row in kept]
            write_text_atomic(self._path, "".join(json.dumps(row) + "\n" for row in kept), sync=True)
        self.count = epochs_done
        self._file = self._path.open("ab", buffering=0)

    def log(self, row: JsonObject) -> None:
        """Append a row. Raise DiskFull if it took the last room, WriteError if it could not be written."""
        keys.check(dict(row))
        line = (json.dumps(keys.readable(dict(row))) + "\n").encode()
        more: bool | None = True
        while error := self._append(line):
            more = self._free() if error.errno in DISK_FULL else None
            if more is None:
                raise WriteError(error.errno, error.strerror or str(error), str(self._path)) from error
        self.count += 1
        if not more:
            raise DiskFull(
                f"the disk of {self._path.parent} is full: the run ends after epoch {row['epoch']}; free some space, "
                "and resume=auto goes on from the last checkpoint"
            )

    def _append(self, line: bytes) -> OSError | None:
        """Write the whole line, or nothing and return the error."""
        before, left = os.fstat(self._file.fileno()).st_size, memoryview(line)
        try:
            while left:
                left = left[self._file.write(left) :]
        except OSError as error:
            os.truncate(self._path, before)
            return error
        return None

    def close(self, result: JsonObject | None = None) -> None:
        self._file.close()


def read_rows(run_dir: Path) -> list[JsonDict]:
    """Return the rows of a run up to the first invalid line: a kill may cut the last line short."""
    path, rows = run_dir / FILE, list[JsonDict]()
    if path.is_file():
        with path.open("rb") as file:
            for line in file:
                try:
                    row = parse_json(line)
                except ValueError:
                    break
                if not (isinstance(row.get("epoch"), int) and keys.is_valid(row)):
                    break
                rows.append(row)
    return rows


def sync_rows(run_dir: Path) -> None:
    """Sync the rows to the disk, so that no checkpoint is newer than the rows of its epochs."""
    with (run_dir / FILE).open("rb") as file:
        os.fsync(file.fileno())


def missing_epochs(run_dir: Path, count: int) -> str:
    """Return the epochs below `count` without a whole row in metrics.jsonl, as '3, 5-7'; empty if there are none."""
    rows = [row for row in read_rows(run_dir) if keys.is_complete(row)]
    there = sorted({row["epoch"] for row in rows if 0 <= row["epoch"] < count})
    gaps = [(a + 1, b - 1) for a, b in zip([-1, *there], [*there, count], strict=True) if b > a + 1]
    return ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in gaps)
