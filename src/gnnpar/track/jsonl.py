"""metrics.jsonl: one JSON object an epoch, always written, complete after every epoch."""

from __future__ import annotations

import json
import math
from pathlib import Path

from gnnpar.durable import Json, JsonDict, JsonObject, write_text_whole
from gnnpar.track import keys

FILE = "metrics.jsonl"


class Jsonl:
    """Rows are flushed as they come: a run that is killed leaves every epoch it finished.

    A run that goes on from a checkpoint begins with the rows of its `epochs_done` epochs, as `source` has them; `timed`
    tells whether their times and bytes count as this run's.
    """

    def __init__(self, run_dir: Path, *, source: Path | None = None, epochs_done: int = 0, timed: bool = True) -> None:
        file = run_dir / FILE
        if source is not None:
            kept = [row for row in read_rows(source) if row["epoch"] < epochs_done]
            kept = kept if timed else [_results_only(row) for row in kept]
            write_text_whole(file, "".join(json.dumps(row) + "\n" for row in kept), sync=True)
        self._file = file.open("w" if source is None else "a", encoding="utf-8")

    def start(self, facts: JsonObject) -> None: ...

    def log(self, row: JsonObject) -> None:
        keys.check(dict(row))
        self._file.write(json.dumps({k: _finite(v) for k, v in row.items()}) + "\n")
        self._file.flush()

    def close(self, result: JsonObject | None = None) -> None:
        self._file.close()


def read_rows(run_dir: Path) -> list[JsonDict]:
    """The rows of a run; a last line cut short by a kill is left out."""
    path = run_dir / FILE
    if not path.exists():
        return []
    rows = []
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
        try:
            row = json.loads(line)
        except (ValueError, RecursionError):
            break
        if not isinstance(row, dict) or not isinstance(row.get("epoch"), int):
            break
        rows.append(row)
    return rows


def _results_only(row: JsonObject) -> JsonDict:
    """Less what the run before measured of itself."""
    return {k: v for k, v in row.items() if not k.startswith(("memory/", "assign/"))} | {"time/timed": 0}


def _finite(value: Json) -> Json:
    """JSON has no NaN; a loss that is one reads null."""
    return None if isinstance(value, float) and not math.isfinite(value) else value
