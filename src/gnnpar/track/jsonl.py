"""metrics.jsonl: one JSON object an epoch, always written, complete after every epoch."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from gnnpar.track import keys

FILE = "metrics.jsonl"


class Jsonl:
    """Rows are flushed as they come: a run that is killed leaves every epoch it finished."""

    def __init__(self, run_dir: Path) -> None:
        self._file = (run_dir / FILE).open("w", encoding="utf-8")

    def start(self, facts: Mapping[str, Any]) -> None: ...

    def log(self, row: Mapping[str, Any]) -> None:
        keys.check(dict(row))
        self._file.write(json.dumps({k: _finite(v) for k, v in row.items()}) + "\n")
        self._file.flush()

    def close(self, result: Mapping[str, Any] | None = None) -> None:
        self._file.close()


def read_rows(run_dir: Path) -> list[dict[str, Any]]:
    """The rows of a run; a last line cut short by a kill is left out."""
    path = run_dir / FILE
    if not path.exists():
        return []
    rows = []
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            rows.append(json.loads(line))
        except json.JSONDecodeError:
            break
    return rows


def _finite(value: Any) -> Any:
    """JSON has no NaN; a loss that is one reads null."""
    return None if isinstance(value, float) and not math.isfinite(value) else value
