"""A `gnnpar train` that runs in processes of its own, to be killed, stopped or joined by another one."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

import psutil

from conftest import environment

TINY = ("dataset.num_nodes=300", "dataset.avg_degree=6", "threads_per_rank=1")
LONG = ("epochs=1000000", "eval_every=1000000", "tracker=jsonl", *TINY, "hydra.run.dir=run")


class Started:
    """A running `gnnpar train` whose ranks have finished some epochs."""

    def __init__(self, folder: Path, *arguments: str, num_ranks: int = 2) -> None:
        command = [sys.executable, "-m", "gnnpar", "train", *LONG, *arguments]
        self.folder = folder
        self.process = subprocess.Popen(
            command,
            cwd=folder,
            env=environment(),
            text=True,
            start_new_session=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        self.all = [psutil.Process(self.process.pid)]
        deadline = time.monotonic() + 90
        while not self._trained() and self.process.poll() is None and time.monotonic() < deadline:
            time.sleep(0.1)
        assert self._trained(), self.process.communicate(timeout=30)
        self.ranks = sorted(self.all[0].children(), key=lambda process: process.pid) if num_ranks > 1 else []
        self.all += self.all[0].children(recursive=True)
        if num_ranks > 1:
            assert len(self.ranks) == num_ranks

    def _trained(self) -> bool:
        rows = self.folder / "run" / "metrics.jsonl"
        return rows.exists() and len(rows.read_text().splitlines()) > 2

    def end(self, within: float = 30) -> tuple[int, str, dict]:
        """Exit code, stderr, result; everything is gone."""
        _, err = self.process.communicate(timeout=within)
        _, alive = psutil.wait_procs(self.all, timeout=5)
        assert not alive
        return self.process.returncode, err, json.loads((self.folder / "run" / "result.json").read_text())

    def cleanup(self) -> None:
        for process in self.all:
            if process.is_running():
                process.kill()
        self.process.communicate()
