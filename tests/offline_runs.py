"""What wandb kept on disk, read back through its own reader (`wandb leet inspect`)."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class OfflineRun:
    """The records of one .wandb file, by type, in order."""

    records: list[dict[str, Any]]

    def of(self, kind: str) -> list[dict[str, Any]]:
        return [record[kind] for record in self.records if record["type"] == kind]

    @property
    def run(self) -> dict[str, Any]:
        (record,) = self.of("run")
        return record

    @property
    def config(self) -> dict[str, Any]:
        return self.run["config"]["update"]

    @property
    def epochs(self) -> list[dict[str, Any]]:
        """History of the epochs, without what wandb and the tables of epoch 0 add."""
        items = [record["item"] for record in self.of("history") if "epoch" in record["item"]]
        return [{k: v for k, v in item.items() if not k.startswith(("_", "tables/"))} for item in items]

    @property
    def summary(self) -> dict[str, Any]:
        """The last value of everything, nested names joined by dots."""
        merged: dict[str, Any] = {}
        for record in self.of("summary"):
            merged |= record["update"]
        return merged

    @property
    def step_metrics(self) -> dict[str, str]:
        return {m["name"]: m["step_metric"] for m in self.of("metric") if "step_metric" in m}

    def artifact(self, kind: str) -> bytes:
        """The content of the one file of the one artifact of a type."""
        (found,) = (record for record in self.of("artifact") if record["type"] == kind)
        (entry,) = found["manifest"]["contents"]
        return Path(entry["local_path"]).read_bytes()

    def tables(self) -> dict[str, Any]:
        """Name -> the table, of what was logged as one."""
        contents = [
            entry
            for record in self.of("artifact")
            if record["type"] == "run_table"
            for entry in record["manifest"]["contents"]
        ]
        return {
            entry["path"].removesuffix(".table.json"): json.loads(Path(entry["local_path"]).read_text())
            for entry in contents
        }


def read_run(folder: Path) -> OfflineRun:
    """The one offline run under a run folder."""
    (file,) = folder.glob("wandb/offline-run-*/run-*.wandb")
    command = [sys.executable, "-m", "wandb", "leet", "inspect", "--json", str(file)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    return OfflineRun([json.loads(line) for line in done.stdout.splitlines()])
