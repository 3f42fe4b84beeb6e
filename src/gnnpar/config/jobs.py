"""The jobs of a sweep on disk: `job.json` in each job's folder has the plan, `result.json` the outcome."""

from __future__ import annotations

import hashlib
import json
import os
import socket
import statistics
import time
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Literal, get_args

import psutil

from gnnpar.files import JsonDict, JsonObject, read_json, write_json_atomic
from gnnpar.track.console import Snapshot
from gnnpar.track.jsonl import read_rows
from gnnpar.track.text import one_line
from gnnpar.training.result.result import remove_results, valid_result

State = Literal["done", "failed", "interrupted", "killed", "running", "missing"]
RECORD = "job.json"
AT_ONCE, SESSION, SWEEP = "GNNPAR_JOBS_AT_ONCE", "GNNPAR_SESSION", "GNNPAR_SWEEP"
"""Environment variables of jobs: number of jobs on the machine, start of the sweep, and its process."""
NOT_HASHED = ("data_dir", "cache_dir", "tracker", "trace", "checkpoint", "resume")
"""Keys that do not change results."""
_SILENT_SECONDS = 600.0  # a job of another host without writes for this long counts as killed


def job_key(resolved: JsonObject, names: Mapping[str, str], idle: Collection[str] = ()) -> str:
    """Return the hash of a resolved configuration without NOT_HASHED and idle keys: equal keys are the same job. With
    the `unread` keys as idle ones, equal keys have the same result."""
    kept, relevant = (
        {key: value for key, value in given.items() if key not in (*NOT_HASHED, *idle)} for given in (names, resolved)
    )
    if resolved.get("resume") not in (None, "auto"):  # it begins from another run
        relevant["resume"] = str(resolved["resume"])
    text = json.dumps({"names": kept, "settings": relevant}, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()


def unread(resolved: JsonObject) -> set[str]:
    """Return the keys that do not affect the run: the top-level `codec`, which strategies copy into their own keys, and
    the partition on one device."""
    strategy = resolved.get("strategy")
    target = str(strategy.get("_target_")) if isinstance(strategy, Mapping) else ""
    return {"codec"} | ({"partition", "world_size"} if target.endswith(".Single") else set())


@dataclass(frozen=True)
class Job:
    """A planned run and its `job.json`. folder: relative to the sweep's. session: the last start of the sweep that
    requested it. started: Unix time, None before the first attempt. refused: the error is in its configuration."""

    sweep: Path
    folder: str
    key: str
    overrides: tuple[str, ...]
    session: str = ""
    started: float | None = None
    pid: int = 0
    born: float = 0.0
    host: str = ""
    error: str | None = None
    refused: bool = False

    @property
    def run_dir(self) -> Path:
        return self.sweep / self.folder

    @staticmethod
    def read(run_dir: Path) -> Job | None:
        """Return the job of a run folder; None if its job.json is missing or damaged."""
        try:
            data = read_json(run_dir / RECORD)
            place, folder = run_dir.absolute().parts, Path(str(data["folder"]))
            if place[-len(folder.parts) :] != folder.parts or ".." in folder.parts:
                return None  # the folder was moved out of its sweep
            sweep, overrides = Path(*place[: -len(folder.parts)]), tuple(map(str, data["overrides"]))
            rest: JsonDict = {name: kind(data[name]) for name, kind in _KINDS.items() if data.get(name) is not None}
            return Job(sweep, str(folder), str(data["key"]), overrides, **rest)
        except (OSError, ValueError, KeyError, TypeError, AttributeError, OverflowError):
            return None

    def save(self) -> None:
        self.run_dir.mkdir(parents=True, exist_ok=True)
        record = {key: value for key, value in asdict(self).items() if key != "sweep"}
        write_json_atomic(self.run_dir / RECORD, {"schema": 1} | record)

    def begin(self) -> None:
        """Record that this process starts the job; delete the result of an earlier attempt."""
        remove_results(self.run_dir)
        me = psutil.Process()
        own = {"pid": me.pid, "born": me.create_time(), "host": socket.gethostname(), "started": time.time()}
        replace(self, **own, error=None, refused=False).save()

    def fail(self, error: str, *, refused: bool) -> None:
        """Record why the job ended without a result.json."""
        job = Job.read(self.run_dir) or self
        replace(job, started=job.started or time.time(), error=" ".join(error.split()), refused=refused).save()

    def state(self) -> tuple[State, str]:
        """Return the state of the job, and why it is not done."""
        result = valid_result(self.run_dir)
        if result is not None and result["status"] == "completed":
            return "done", ""
        if self.error is not None:
            return "failed", one_line(self.error)
        if result is not None:
            return ("interrupted" if result["status"] == "interrupted" else "failed"), one_line(result["error"] or "")
        if self.started is None:
            return "missing", ""
        return ("running", "") if self.is_alive() else ("killed", "ended without a message: killed?")

    def is_alive(self) -> bool:
        """Return True if the process of the job runs; on another host, if it wrote files recently."""
        if self.host != socket.gethostname():
            latest = max((file.stat().st_mtime for file in self.run_dir.iterdir() if file.is_file()), default=0.0)
            return time.time() - latest < _SILENT_SECONDS
        try:
            process = psutil.Process(self.pid)
            return process.status() != psutil.STATUS_ZOMBIE and abs(process.create_time() - self.born) < 1.0
        except (psutil.Error, ValueError, OverflowError):
            return False


_KINDS = {"session": str, "started": float, "pid": int, "born": float, "host": str, "error": str, "refused": bool}


def jobs_below(folder: Path) -> list[Job]:
    """Return the jobs of all sweeps in and below a folder, in the natural order of their paths."""
    found: list[Job] = []
    for at, folders, files in os.walk(folder):
        folders.sort(key=lambda name: (0, int(name), "") if name.isdecimal() else (1, 0, name))
        if RECORD in files:
            found += [job] if (job := Job.read(Path(at))) else []
            folders.clear()
    return found


def titles(jobs: Sequence[Job]) -> dict[str, str]:
    """Return folder -> the overrides of a job that not all of the jobs have."""
    shared = frozenset(jobs[0].overrides).intersection(*(job.overrides for job in jobs)) if len(jobs) > 1 else ()
    return {job.folder: one_line(" ".join(o for o in job.overrides if o not in shared)) for job in jobs}


def snapshot(jobs: Sequence[Job]) -> Snapshot:
    """Return the progress of a sweep. Remaining time: mean of ended jobs, divided by the number of running ones."""
    states, names, took, running = Counter[State](), titles(jobs), list[float](), list[str]()
    for job in jobs:
        states[state := job.state()[0]] += 1
        if state == "done" and job.started is not None:
            took.append((job.run_dir / "result.json").stat().st_mtime - job.started)
        elif state == "running":
            rows = read_rows(job.run_dir)
            loss = rows[-1].get("loss/train") if rows else None
            far = "" if loss is None else f"  epoch {rows[-1]['epoch'] + 1}  loss {loss:.4g}"
            running.append(f"  {job.folder}: {names[job.folder]}{far}")
    done, failed = states["done"], states["failed"] + states["interrupted"]
    left = statistics.fmean(took) * (len(jobs) - done - failed) / max(1, len(running)) if took else None
    return Snapshot(len(jobs), done, failed, tuple(running), left)


def count(states: Iterable[State]) -> dict[State, int]:
    """Return the number of jobs in each state, without empty states."""
    counted = Counter(states)
    return {state: counted[state] for state in get_args(State) if counted[state]}


def in_words(counts: Mapping[State, int]) -> str:
    """Return a text such as '3 of 5 done, 1 failed, 1 missing'."""
    others = [f"{number} {state}" for state, number in counts.items() if state != "done"]
    return ", ".join([f"{counts.get('done', 0)} of {sum(counts.values())} done", *others])
