"""Runs of a study in randomised blocks, one JSON line a run (protocol, rules 4 and 5).

A line holds the block, the job's name, result.json, and of metrics.jsonl what curves need. A study that was stopped
goes on where it was: lines that are there are not run again.
"""

import json
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

CURVE = ("epoch", "loss/train", "metric/val", "metric/test", "time/train_seconds", "comm/total_bytes_so_far")
Jobs = Mapping[str, Sequence[str]]  # name -> overrides of `gnnpar train`


def run(jobs: Jobs, *, blocks: Iterable[int], common: Sequence[str], out: Path) -> None:
    """Every job once a block, in an order of the block's own."""
    done = {(row["block"], row["job"]) for row in read(out)}
    todo = [(block, name) for block in blocks for name in shuffled(jobs, block) if (block, name) not in done]
    began = time.perf_counter()
    for i, (block, name) in enumerate(todo):
        row = {"block": block, "job": name, **train([*common, *jobs[name], f"block={block}"])}
        with out.open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")
        seconds = row["result"]["epoch_seconds"]["median"]
        left = (time.perf_counter() - began) / (i + 1) * (len(todo) - i - 1)
        print(f"{i + 1}/{len(todo)} block {block} {name}: {seconds:.4f} s an epoch, {left:.0f} s left", flush=True)


def shuffled(jobs: Jobs, block: int) -> list[str]:
    return random.Random(block).sample(sorted(jobs), len(jobs))


def sweep(jobs: Jobs, *, common: Sequence[str], out: Path) -> None:
    """Every job as a multirun in one process each, where times do not matter; its runs are block 0 to the last."""
    done = {row["job"] for row in read(out)}
    for name in (name for name in jobs if name not in done):
        with tempfile.TemporaryDirectory() as folder:
            call(["-m", *common, *jobs[name], f"hydra.sweep.dir={folder}"])
            found = sorted((file.parent for file in Path(folder).rglob("result.json")), key=lambda f: int(f.name))
            lines = [json.dumps({"block": i, "job": name, **collected(f)}) + "\n" for i, f in enumerate(found)]
        with out.open("a", encoding="utf-8") as file:
            file.write("".join(lines))
        print(f"{name}: {len(lines)} runs", flush=True)


def train(overrides: Sequence[str]) -> dict[str, Any]:
    """One `gnnpar train`: its result, and the rows of its curve."""
    with tempfile.TemporaryDirectory() as folder:
        call([*overrides, f"hydra.run.dir={folder}"])
        return collected(Path(folder))


def call(arguments: Sequence[str]) -> None:
    command = [sys.executable, "-m", "gnnpar", "train", *arguments, "tracker=jsonl"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)}\n{done.stdout[-2000:]}{done.stderr[-2000:]}")


def collected(folder: Path) -> dict[str, Any]:
    """What a line of the study keeps of a run folder."""
    result = json.loads((folder / "result.json").read_text(encoding="utf-8"))
    lines = (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    rows = [row for row in map(json.loads, lines) if "metric/val" in row]
    return {"result": result, "curve": [{key: row.get(key) for key in CURVE} for row in rows]}


def read(file: Path) -> list[dict[str, Any]]:
    if not file.exists():
        return []
    return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]


def unpack(rows: Iterable[Mapping[str, Any]], folder: Path) -> list[Path]:
    """Run folders as `gnnpar compare` reads them."""
    folders = []
    for i, row in enumerate(rows):
        run_folder = folder / f"{i:04d}"
        run_folder.mkdir(parents=True)
        (run_folder / "result.json").write_text(json.dumps(row["result"]), encoding="utf-8")
        curve = "".join(json.dumps(each) + "\n" for each in row["curve"])
        (run_folder / "metrics.jsonl").write_text(curve, encoding="utf-8")
        folders.append(run_folder)
    return folders


def ratios(rows: Sequence[Mapping[str, Any]], job: str, base: str) -> list[float]:
    """Median epoch of `job` over that of `base`, one ratio a block."""
    seconds: dict[str, dict[int, float]] = {}
    for row in rows:
        seconds.setdefault(row["job"], {})[row["block"]] = row["result"]["epoch_seconds"]["median"]
    return [seconds[job][block] / seconds[base][block] for block in sorted(seconds[base]) if block in seconds[job]]
