"""Runs of a study in randomised blocks, one JSON line a run (protocol, rules 4 and 5).

A line holds the block, the job's name, result.json, and of metrics.jsonl what curves need. A study that was stopped
goes on where it was: lines that are there are not run again.
"""

import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import records

from gnnpar.comm.world import num_cores

CURVE = ("epoch", "loss/train", "metric/val", "metric/test", "time/train_seconds", "comm/total_bytes_so_far")
SAMPLED, PROBED = ("sample/steps", "sample/edges"), ("epoch", "fidelity/relative_error", "fidelity/layers")
GNNPAR = (sys.executable, "-P", "-m", "gnnpar")  # which imports nothing of the folder that it is called in
Jobs = Mapping[str, Sequence[str]]
"""Name -> overrides of `gnnpar train`, and variables of its environment, as a shell has them: NAME=value."""
Train = Callable[..., dict[str, Any]]
"""(overrides, failures=) -> what a line holds of a run, as `train`."""


def slow_motion(ranks: int, *, gbps: float) -> list[str]:
    """So many machines of one core each, whose links carry `gbps`: ranks get a share of a core, where there are fewer
    cores, and links the same share of their rate."""
    dilation = max(1, -(-ranks // num_cores()))
    links = ["launch=paced", f"launch.rate_gbps={gbps:g}", f"launch.hosts={ranks}", f"launch.dilation={dilation}"]
    return [f"world_size={ranks}", *links, "threads_per_rank=1"]


def run(jobs: Jobs, *, blocks: Iterable[int], out: Path, launch: Train | None = None) -> None:
    """Every job once a block, in an order of the block's own.

    A block that was stopped is run again from its first job, so that no ratio spans two starts.
    """
    blocks = list(blocks)
    keep_whole(jobs, blocks, out)
    done = {(row["block"], row["job"]) for row in records.read(out)}
    todo = [(block, name) for block in blocks for name in shuffled(jobs, block) if (block, name) not in done]
    clock = Clock(len(todo))
    for block, name in todo:
        row = {"block": block, "job": name, **(launch or train)([*jobs[name], f"block={block}"], failures=True)}
        records.append(out, [row])
        took = row["result"]["epoch_seconds"]["mean"]
        said = f"{took:.4f} s an epoch" if took is not None else f"failed: {row['result']['error']}"
        clock.tell(f"block {block} {name}: {said}")


def keep_whole(jobs: Jobs, blocks: Iterable[int], out: Path) -> None:
    """Leave out the lines of these jobs in blocks in which one of them is missing."""
    rows = records.read(out)
    of_block: dict[int, set[str]] = {}
    for row in rows:
        if row["job"] in jobs:
            of_block.setdefault(row["block"], set()).add(row["job"])
    torn = {block for block in blocks if block in of_block and not of_block[block] >= set(jobs)}
    if torn:
        print(f"{out.name}: blocks {', '.join(map(str, sorted(torn)))} lack runs and begin again", flush=True)
        records.replace(out, [row for row in rows if row["block"] not in torn or row["job"] not in jobs])


def shuffled(jobs: Iterable[str], block: int) -> list[str]:
    return random.Random(block).sample(sorted(jobs), len(jobs))


def seeded(jobs: Jobs, *, seeds: Sequence[int], out: Path, at_once: int = 1) -> None:
    """Every job once a seed, where times do not matter: `at_once` seeds at a time, of which all jobs come together.

    A run that fails is a row with its reason.
    """
    done = {(row["job"], row["block"]) for row in records.read(out)}
    todo = []
    for first in range(0, len(seeds), at_once):
        for name in jobs:
            if missing := [seed for seed in seeds[first : first + at_once] if (name, seed) not in done]:
                todo.append((name, missing))
    several = ["hydra/launcher=parallel", f"hydra.launcher.n_jobs={at_once}"] if at_once > 1 else []
    clock = Clock(len(todo))
    for name, missing in todo:
        with tempfile.TemporaryDirectory() as folder:
            some = f"seed={','.join(map(str, missing))}"
            call(["-m", *several, *jobs[name], some, f"hydra.sweep.dir={folder}"], failures=True)
            found = [collected(file.parent) for file in Path(folder).rglob("result.json")]
            rows = [{"block": each["result"]["seed"], "job": name, **each} for each in found]
            records.append(out, sorted(rows, key=lambda row: row["block"]))
        clock.tell(f"{name}: seeds {', '.join(map(str, missing))}")


def rate_of(
    target: float, tolerance: float, measure: Callable[[float], tuple[float, float, float]]
) -> tuple[float, float]:
    """The rate of a link, Gbit/s, at which the base waits for messages in this share of its epoch, and the share found;
    strategies under test take no part. measure: rate -> seconds of its epoch, of its halos, of its reduction.

    With compute c, halo bytes h and gradient bytes g an epoch is c + (h + g) / r and the share its h / r: each
    measurement gives c, h, g, and so the next r.
    """
    rate = 1.0
    for _ in range(7):
        epoch, halo, reduce = measure(rate)
        print(f"rate {rate:.4f} Gbit/s: the base spends {halo / epoch:.1%} in communication", flush=True)
        if abs(halo / epoch - target) <= tolerance:
            return rate, halo / epoch
        room = halo * (1 - target) - reduce * target
        if room <= 0:
            raise SystemExit(f"no rate gives {target:.0%}: gradients are too large a part of the bytes")
        rate = min(20.0, max(rate * room / ((epoch - halo - reduce) * target), 1e-3))
    raise SystemExit("no rate found in 7 attempts: the machine is too busy for this measurement")


class Clock:
    """What of how many is done, and the seconds that the rest will take at this pace."""

    def __init__(self, total: int) -> None:
        self.total, self.done, self.began = total, 0, time.perf_counter()

    def tell(self, what: str) -> None:
        self.done += 1
        left = (time.perf_counter() - self.began) / self.done * (self.total - self.done)
        print(f"{self.done}/{self.total} {what}, {left:.0f} s left", flush=True)


def train(overrides: Sequence[str], *, failures: bool = False) -> dict[str, Any]:
    """One `gnnpar train`: its result, and the rows of its curve."""
    with tempfile.TemporaryDirectory() as folder:
        call([*overrides, f"hydra.run.dir={folder}"], failures=failures)
        return collected(Path(folder))


def output_of(command: Sequence[str], *, env: Mapping[str, str] | None = None) -> str:
    """Return the output of a command. Raise SystemExit with its last lines if it fails."""
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=env)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)}\n{done.stdout[-2000:]}{done.stderr[-2000:]}")
    return done.stdout


def call(arguments: Sequence[str], *, failures: bool = False) -> None:
    """`gnnpar train`, silently. failures: runs that fail leave their results (rows with the reason) and end nothing."""
    variables = [argument for argument in arguments if argument.partition("=")[0].isupper()]
    command = [*GNNPAR, "train", *(argument for argument in arguments if argument not in variables), "tracker=jsonl"]
    environment = os.environ | dict(variable.split("=", 1) for variable in variables)
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    folder = Path(arguments[-1].partition("=")[2])  # hydra.run.dir or hydra.sweep.dir
    ends = {json.loads(file.read_text(encoding="utf-8"))["status"] for file in folder.rglob("result.json")}
    if done.returncode and not (failures and ends and ends <= {"completed", "failed"}):
        raise SystemExit(f"{' '.join(command)}\n{done.stdout[-2000:]}{done.stderr[-2000:]}")


def collected(folder: Path) -> dict[str, Any]:
    """What a line of the study keeps of a run folder."""
    result = json.loads((folder / "result.json").read_text(encoding="utf-8"))
    metrics, plan = folder / "metrics.jsonl", folder / "plan.json"
    rows = list(map(json.loads, metrics.read_text(encoding="utf-8").splitlines())) if metrics.exists() else []
    curve = [{key: row.get(key) for key in CURVE} for row in rows if "metric/val" in row]
    told: dict[str, Any] = {"result": result, "curve": curve}
    if probes := [{key: row[key] for key in PROBED} for row in rows if PROBED[1] in row]:
        told["probes"] = probes
    if rows and SAMPLED[0] in rows[0]:
        told["sampled"] = {key: rows[0][key] for key in SAMPLED}
    if plan.exists():
        found = json.loads(plan.read_text(encoding="utf-8"))["statistics"]
        told["graph"] = {key: sum(found[key]) for key in ("nodes", "edges")} | {"alpha": found["alpha"]}
    return told


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
