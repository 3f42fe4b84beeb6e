"""The Tracker Protocol: what the training loop reports, and to whom."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from gnnpar.files import JsonObject


class Tracker(Protocol):
    """Receives one flat row an epoch. Only rank 0 has one; what it gets is already reduced over ranks."""

    def start(self, facts: JsonObject) -> None:
        """Once before epoch 0: the plan's partition statistics and what else is worth a table."""
        ...

    def log(self, row: JsonObject) -> None:
        """One finished epoch; names as in keys.py."""
        ...

    def close(self, result: JsonObject | None = None) -> None:
        """Once, also after a failure. `result`: what result.json says; None: it is unknown."""
        ...


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


class Null:
    """Drops everything: ranks other than 0."""

    def start(self, facts: JsonObject) -> None: ...

    def log(self, row: JsonObject) -> None: ...

    def close(self, result: JsonObject | None = None) -> None: ...


@dataclass(frozen=True, kw_only=True)
class Quiet:
    """tracker=jsonl: nothing beside metrics.jsonl."""

    def build(self, run_dir: Path, epochs: int, job: JsonObject) -> Tracker:
        return Null()
