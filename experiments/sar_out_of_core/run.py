"""Full-graph training in a memory cgroup that holds half of what it takes in memory. Needs root and Linux.

Half is of what `single` was charged at most in a cgroup without a limit, or of its largest resident set if that is
less. The cache of the host file is charged too.
"""

import json
import os
import subprocess
import tempfile
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent

import blocks
import records
from records import Files

PROBLEM = ["dataset=sbm", "dataset.num_nodes=60000", "model=gat", "model.hidden=256", "model.num_layers=4"]
COMMON = ["epochs=4", "eval_every=4", "seed=0"]
SINGLE, SAR = ["strategy=single"], ["strategy=sar", "strategy.logical_parts=8"]
V1, V2 = Path("/sys/fs/cgroup/memory"), Path("/sys/fs/cgroup")


class Cgroup:
    """A memory cgroup without swap, of either version. None: no limit."""

    def __init__(self, limit: int | None) -> None:
        one = V1.is_dir()
        self.folder = (V1 if one else V2) / f"gnnpar-{os.getpid()}"
        self.peak_file = "memory.max_usage_in_bytes" if one else "memory.peak"
        self.folder.mkdir()
        if limit is not None:
            (self.folder / ("memory.limit_in_bytes" if one else "memory.max")).write_text(str(limit))

    def enter(self) -> None:
        (self.folder / "cgroup.procs").write_text(str(os.getpid()))

    def close(self) -> int:
        """Largest memory charged, page cache included."""
        peak = int((self.folder / self.peak_file).read_text())
        self.folder.rmdir()
        return peak


def train(what: str, overrides: list[str], limit: int | None) -> dict[str, Any]:
    """One run; its row."""
    group = Cgroup(limit)
    with tempfile.TemporaryDirectory(dir=HERE) as folder:  # a disk: a result in memory would count
        command = [*blocks.GNNPAR, "train", *PROBLEM, *COMMON, *overrides, f"hydra.run.dir={folder}"]
        done = subprocess.run(command, capture_output=True, text=True, check=False, preexec_fn=group.enter)
        row = {"what": what, "limit_bytes": limit, "exit": done.returncode, "charged_bytes": group.close()}
        file = Path(folder) / "result.json"
        result = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}
        if result.get("status") == "completed":
            lines = (Path(folder) / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
            row["losses"] = [json.loads(line)["loss/train"] for line in lines]
            kept = ("epoch_seconds", "breakdown_seconds", "memory_bytes", "metric", "hardware", "versions", "commit")
            row |= {key: result[key] for key in kept}
        else:
            row["said"] = done.stderr.splitlines()[-1:]
    print(json.dumps({k: v for k, v in row.items() if k in ("what", "limit_bytes", "exit", "losses")}), flush=True)
    return row


def run(files: Files) -> None:
    if os.geteuid():
        raise SystemExit("a memory cgroup needs root: run this as root")
    rows = [train("single", SINGLE, None), train("sar, 8 logical parts", SAR, None)]
    half = min(rows[0]["charged_bytes"], *rows[0]["memory_bytes"]["peak_rss"]) // 2
    rows += [train("single, half", SINGLE, half), train("sar, 8 logical parts, half", SAR, half)]
    records.replace(files(), rows)
