"""metrics.jsonl: one JSON object an epoch, always written, complete after every epoch."""

from __future__ import annotations

import hashlib
import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from gnnpar.capacity import memory_bytes
from gnnpar.durable import (
    DISK_FULL,
    JsonDict,
    JsonObject,
    WriteError,
    is_readable_file,
    parse_json,
    write_text_whole,
)
from gnnpar.track import keys
from gnnpar.track.console import complain

FILE = "metrics.jsonl"
_LONGEST = 1 << 24
"""Bytes of a row, at most: a file is not read into memory to find out that it holds none."""


class Room(Protocol):
    """What a full disk can do without. `spent`: the last of it is gone, and the run has to end."""

    @property
    def spent(self) -> bool: ...

    def make(self) -> bool:
        """Free something; False where nothing is left."""
        ...


class DiskFull(OSError):
    """The run ends because its disk is full. One line with what to do."""


class Jsonl:
    """Rows are whole, and in the file as soon as they come: a run that is killed leaves every epoch it finished.

    A run that goes on from a checkpoint begins with the rows of its `epochs_done` epochs, as `source` has them; `timed`
    tells whether their times and bytes count as this run's. `room`: what goes before a row does. `count`: rows by now.
    """

    def __init__(
        self,
        run_dir: Path,
        *,
        source: Path | None = None,
        epochs_done: int = 0,
        timed: bool = True,
        room: Room | None = None,
    ) -> None:
        self._path, self._room = run_dir / FILE, room
        if source is None:
            write_text_whole(self._path, "")
        else:
            kept = [row for row in read_rows(source) if row["epoch"] < epochs_done]
            kept = kept if timed else [_results_only(row) for row in kept]
            write_text_whole(self._path, "".join(json.dumps(row) + "\n" for row in kept), sync=True)
        self.count = epochs_done
        self._file = self._path.open("ab", buffering=0)

    def start(self, facts: JsonObject) -> None: ...

    def log(self, row: JsonObject) -> None:
        """Raises DiskFull where the row took the last room, WriteError where it could not be written."""
        keys.check(dict(row))
        line = (json.dumps(keys.readable(dict(row))) + "\n").encode()
        while True:
            try:
                self._append(line)
                break
            except OSError as error:
                if error.errno not in DISK_FULL or self._room is None or not self._room.make():
                    raise WriteError(error.errno, error.strerror or str(error), str(self._path)) from error
        self.count += 1
        if self._room is not None and self._room.spent:
            raise DiskFull(
                f"the disk of {self._path.parent} is full: the run ends after epoch {row['epoch']}; free some space, "
                "and resume=auto goes on from the last checkpoint"
            )

    def _append(self, line: bytes) -> None:
        """The whole line or nothing of it."""
        before, left = os.fstat(self._file.fileno()).st_size, memoryview(line)
        try:
            while left:
                left = left[self._file.write(left) :]
        except OSError:
            os.truncate(self._path, before)
            raise

    def close(self, result: JsonObject | None = None) -> None:
        self._file.close()


def read_rows(run_dir: Path) -> list[JsonDict]:
    """The rows of a run, up to the first line that is none: the last may be cut short by a kill. Of more than memory
    holds, the first, with a line."""
    path = run_dir / FILE
    if not is_readable_file(path):
        return []
    rows = []
    most = memory_bytes() // (2 * _TIMES_IN_MEMORY)
    with path.open("rb") as file:
        while (row := _row(file.readline(_LONGEST))) is not None:
            if file.tell() > most:
                complain(f"{path} has more rows than memory holds: the first {len(rows):,} are read")
                break
            rows.append(row)
    return rows


_TIMES_IN_MEMORY = 25  # how much more a row of a few bytes takes there


def _row(line: bytes) -> JsonDict | None:
    """A line of metrics.jsonl; None where it is no row."""
    try:
        row = parse_json(line.decode(errors="replace"))
    except ValueError:
        return None
    return row if isinstance(row, dict) and isinstance(row.get("epoch"), int) and keys.fits(row) else None


class RowDigest:
    """Counts and hashes the rows of a run as they come, up to the first line that is none.

    What a run on other ranks drops of the rows before (`_results_only`) is no part of the hash.
    """

    def __init__(self, run_dir: Path) -> None:
        self._file, self._offset, self._count, self._hash = run_dir / FILE, 0, 0, hashlib.sha256()

    def read(self, *, stop: int | None = None, sync: bool = False) -> RowCount:
        """Of all rows that are whole by now, or of the first `stop`. `sync`: they reach the disk before."""
        if not is_readable_file(self._file):
            return RowCount(self._count, self._hash.hexdigest())
        with self._file.open("rb") as file:
            if sync:
                os.fsync(file.fileno())
            file.seek(self._offset)
            while self._count != stop and (line := file.readline(_LONGEST)).endswith(b"\n"):
                if (row := _row(line)) is None:
                    break
                self._hash.update(json.dumps(_results_only(row), sort_keys=True).encode())
                self._offset, self._count = self._offset + len(line), self._count + 1
        return RowCount(self._count, self._hash.hexdigest())


@dataclass(frozen=True)
class RowCount:
    """So many rows, from epoch 0 on, and their sha256."""

    count: int
    sha256: str


def missing_epochs(run_dir: Path, count: int) -> str:
    """The epochs below `count` of which metrics.jsonl has no whole row: '3, 5-7'; empty: none."""
    rows = [row for row in read_rows(run_dir) if keys.is_whole(row)]
    there = sorted({row["epoch"] for row in rows if 0 <= row["epoch"] < count})
    gaps = [(a + 1, b - 1) for a, b in zip([-1, *there], [*there, count], strict=True) if b > a + 1]
    return ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in gaps)


def _results_only(row: JsonObject) -> JsonDict:
    """Less what the run before measured of itself."""
    return {k: v for k, v in row.items() if not k.startswith(("memory/", "assign/"))} | {"time/timed": 0}
