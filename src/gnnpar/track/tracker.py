"""The Tracker protocol: receives the rows of the training loop."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from gnnpar.files import JsonObject


class Tracker(Protocol):
    """Receives one flat row per epoch. Only rank 0 has one; rows are already reduced over ranks."""

    def start(self, facts: JsonObject) -> None:
        """Start, once before epoch 0, with the plan's partition statistics and other facts for a table."""

    def log(self, row: JsonObject) -> None:
        """Log a row after an epoch; names as in keys.py."""

    def close(self, result: JsonObject | None = None) -> None:
        """Close, once, also after a failure. result: content of result.json; None: unknown."""


@dataclass(frozen=True, kw_only=True)
class Tee:
    """Several trackers as one."""

    trackers: Sequence[Tracker]

    def start(self, facts: JsonObject) -> None:
        for tracker in self.trackers:
            tracker.start(facts)

    def log(self, row: JsonObject) -> None:
        for tracker in self.trackers:
            tracker.log(row)

    def close(self, result: JsonObject | None = None) -> None:
        for tracker in self.trackers:
            tracker.close(result)


class Null(Tracker):
    """Drop everything, on ranks other than 0."""


@dataclass(frozen=True, kw_only=True)
class Quiet:
    """tracker=jsonl: metrics.jsonl only."""

    def build(self, run_dir: Path, epochs: int, job: JsonObject) -> Tracker:
        return Null()
