"""metrics.jsonl: one JSON object an epoch, always written, complete after every epoch."""

from __future__ import annotations

import hashlib
import json
import math
import os
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from gnnpar.durable import Json, JsonDict, JsonObject, write_text_whole
from gnnpar.track import keys

FILE = "metrics.jsonl"


class Jsonl:
    """Rows are flushed as they come: a run that is killed leaves every epoch it finished.

    A run that goes on from a checkpoint begins with the rows of its `epochs_done` epochs, as `source` has them; `timed`
    tells whether their times and bytes count as this run's. `count`: rows by now.
    """

    def __init__(self, run_dir: Path, *, source: Path | None = None, epochs_done: int = 0, timed: bool = True) -> None:
        file = run_dir / FILE
        if source is not None:
            kept = [row for row in read_rows(source) if row["epoch"] < epochs_done]
            kept = kept if timed else [_results_only(row) for row in kept]
            write_text_whole(file, "".join(json.dumps(row) + "\n" for row in kept), sync=True)
        self.count = epochs_done
        self._file = file.open("w" if source is None else "a", encoding="utf-8")

    def start(self, facts: JsonObject) -> None: ...

    def log(self, row: JsonObject) -> None:
        keys.check(dict(row))
        self._file.write(json.dumps({k: _finite(v) for k, v in row.items()}) + "\n")
        self._file.flush()
        self.count += 1

    def close(self, result: JsonObject | None = None) -> None:
        self._file.close()


def read_rows(run_dir: Path) -> list[JsonDict]:
    """The rows of a run; a last line cut short by a kill is left out."""
    path = run_dir / FILE
    if not path.exists():
        return []
    rows = []
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
        if (row := _row(line)) is None:
            break
        rows.append(row)
    return rows


def _row(line: str) -> JsonDict | None:
    """A line of metrics.jsonl; None where it is no row."""
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return row if isinstance(row, dict) and isinstance(row.get("epoch"), int) else None


class RowDigest:
    """Counts and hashes the rows of a run as they come, up to the first line that is none.

    What a run on other ranks drops of the rows before (`_results_only`) is no part of the hash.
    """

    def __init__(self, run_dir: Path) -> None:
        self._file, self._offset, self._count, self._hash = run_dir / FILE, 0, 0, hashlib.sha256()

    def read(self, *, stop: int | None = None, sync: bool = False) -> RowCount:
        """Of all rows that are whole by now, or of the first `stop`. `sync`: they reach the disk before."""
        with suppress(FileNotFoundError), self._file.open("rb") as file:
            if sync:
                os.fsync(file.fileno())
            file.seek(self._offset)
            while self._count != stop and (line := file.readline()).endswith(b"\n"):
                if (row := _row(line.decode(errors="replace"))) is None:
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
    """The epochs below `count` of which metrics.jsonl has no row: '3, 5-7'; empty: none."""
    gone = set(range(count)) - {row["epoch"] for row in read_rows(run_dir)}
    starts = sorted(epoch for epoch in gone if epoch - 1 not in gone)
    ends = sorted(epoch for epoch in gone if epoch + 1 not in gone)
    return ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in zip(starts, ends, strict=True))


def _results_only(row: JsonObject) -> JsonDict:
    """Less what the run before measured of itself."""
    return {k: v for k, v in row.items() if not k.startswith(("memory/", "assign/"))} | {"time/timed": 0}


def _finite(value: Json) -> Json:
    """JSON has no NaN; a loss that is one reads null."""
    return None if isinstance(value, float) and not math.isfinite(value) else value
