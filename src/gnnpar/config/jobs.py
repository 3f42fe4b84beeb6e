"""The jobs of a sweep on disk: which were planned, where each lives, how far it is.

sweep.json, beside the run folders, is written before the first job starts and names every planned job by the hash of
its resolved configuration; a job leaves job.json when it starts and result.json when it ends. Whether a job is done is
read from these files alone, so that it is known after any kind of end, kill -9 included.
"""

from __future__ import annotations

import hashlib
import json
import os
import socket
import statistics
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Literal

import psutil

from gnnpar.durable import JsonDict, JsonObject, make_folder, read_json, write_json_whole
from gnnpar.folder_lock import FolderInUse, own_machine, own_space, working_in
from gnnpar.settings import ConfigError
from gnnpar.track.console import say
from gnnpar.track.jsonl import read_rows
from gnnpar.track.progress import Snapshot
from gnnpar.track.text import one_line
from gnnpar.training.result.result import forget, valid_result

State = Literal["done", "failed", "interrupted", "killed", "running", "missing"]
STATES: tuple[State, ...] = ("done", "failed", "interrupted", "killed", "running", "missing")
MANIFEST, RECORD = "sweep.json", "job.json"
# where a run reads, keeps and tells: it computes the same
NOT_HASHED = ("data_dir", "cache_dir", "tracker", "trace", "checkpoint", "resume")
_SILENT_SECONDS = 600.0  # a job of another host that has written nothing for so long is taken for dead


def job_key(resolved: JsonObject, names: Mapping[str, str]) -> str:
    """The hash of a resolved configuration less its folders and its tracker: equal keys are the same job."""
    relevant = {k: v for k, v in resolved.items() if k not in NOT_HASHED}
    if resolved.get("resume") not in (None, "auto"):  # another run's: it computes something else
        relevant["resume"] = str(resolved["resume"])
    kept = {group: name for group, name in names.items() if group not in NOT_HASHED}
    text = json.dumps({"names": kept, "settings": relevant}, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()


def unread(resolved: JsonObject) -> set[str]:
    """Keys of a resolved configuration from which its run does not follow: a strategy that has a codec has it among its
    own keys, and one device cuts nothing."""
    strategy = resolved.get("strategy")
    target = str(strategy.get("_target_")) if isinstance(strategy, Mapping) else ""
    return {"codec"} | ({"partition", "world_size"} if target.endswith(".Single") else set())


@dataclass(frozen=True)
class Job:
    """One planned run. `folder` is relative to the sweep's. `reads`: `key` without what is `unread`."""

    key: str
    folder: str
    overrides: tuple[str, ...]
    reads: str = ""


@dataclass
class Manifest:
    """The planned jobs of a sweep, in the order of their planning, and how the sweep was asked for."""

    folder: Path
    argv: list[str] = field(default_factory=list)
    jobs: dict[str, Job] = field(default_factory=dict)
    _counted: tuple[int, frozenset[str]] = field(default=(0, frozenset()), compare=False, repr=False)

    @staticmethod
    def read(folder: Path) -> Manifest:
        """As it stands in the folder; an empty one where nothing was planned yet."""
        file = folder / MANIFEST
        if file.is_symlink():  # of a folder that was passed on, to the list of a private sweep
            raise ConfigError(f"{file} is a link: what it leads to would be shown, or left, in its place; remove it")
        if not file.exists():
            return Manifest(folder)
        try:
            data = read_json(file)
            jobs = [
                Job(str(j["key"]), str(j["folder"]), tuple(map(str, j["overrides"])), str(j.get("reads", "")))
                for j in data["jobs"]
            ]
            if outside := next((job.folder for job in jobs if not is_inside(job.folder)), None):
                raise ValueError(f"the job folder {one_line(outside)} is not below it, or is no line of text")
            folders = Counter(os.path.normpath(job.folder) for job in jobs)
            if twice := next((name for name, times in folders.items() if times > 1), None):
                raise ValueError(f"several jobs have the folder {twice}")
            return Manifest(folder, [str(each) for each in data["argv"]], {job.key: job for job in jobs})
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise ConfigError(f"{file} cannot be read: {type(error).__name__} {error}; remove it") from error

    def title(self, key: str) -> str:
        """The overrides of a job that are not those of every job."""
        shared = self._shared(len(self.jobs))
        return one_line(" ".join(o for o in self.jobs[key].overrides if o not in shared))

    def _shared(self, jobs: int) -> frozenset[str]:
        """Overrides of every job. They are counted again when there are more `jobs`."""
        if jobs < 2:
            return frozenset()
        if self._counted[0] != jobs:
            first, *others = (job.overrides for job in self.jobs.values())
            self._counted = jobs, frozenset(first).intersection(*others)
        return self._counted[1]

    def save(self) -> None:
        jobs = [asdict(job) for job in self.jobs.values()]
        write_json_whole(self.folder / MANIFEST, {"schema": 1, "argv": self.argv, "jobs": jobs})

    def states(self, keys: Sequence[str] | None = None) -> dict[str, tuple[State, str]]:
        """Key -> (state, why it is not done), of all jobs or of these. ConfigError where it has not all of these."""
        if keys and not self.jobs.keys() >= set(keys):
            raise ConfigError(f"{self.folder / MANIFEST} has lost jobs of this sweep: another program writes there")
        return {key: state_of(self.folder / self.jobs[key].folder) for key in keys or self.jobs}


def is_inside(folder: str) -> bool:
    """Whether a path lies below the folder it is relative to, also where Hydra reads it: it interpolates ${...}.
    One with line ends is none."""
    return (
        folder.isprintable()
        and os.path.normpath(folder.strip() or ".") != "."
        and "${" not in folder
        and not Path(folder).is_absolute()
        and ".." not in Path(folder).parts
    )


def begin_job(run_dir: Path, overrides: Sequence[str]) -> None:
    """A job starts here: what an earlier attempt left is no result any more."""
    make_folder(run_dir)
    forget(run_dir)
    process = psutil.Process()
    record = {"pid": process.pid, "born": process.create_time(), "host": socket.gethostname(), "error": None}
    record |= {"space": own_space(), "machine": own_machine(), "cwd": os.getcwd()}
    write_json_whole(run_dir / RECORD, record | {"started": time.time(), "overrides": list(overrides)})


def refuse_job(run_dir: Path, error: str, *, refused: bool) -> None:
    """A job that ended without a result.json says why. `refused`: by its configuration."""
    record = read_record(run_dir) or {"started": time.time(), "overrides": []}
    make_folder(run_dir)
    write_json_whole(run_dir / RECORD, record | {"error": " ".join(error.split()), "refused": refused})


def read_record(run_dir: Path) -> JsonDict | None:
    try:
        record = read_json(run_dir / RECORD)
    except (OSError, ValueError):
        return None
    if not isinstance(record, dict) or not _is_time(record.get("started")):
        return None
    pid = record.get("pid")
    begun = isinstance(pid, int) and 0 < pid < 1 << 31 and _is_time(record.get("born"))
    known = isinstance(record.get("error", 0), (str, type(None)))
    return record if known and (record.get("error") or (begun and isinstance(record.get("host"), str))) else None


def _is_time(value: object) -> bool:
    """Seconds since 1970, of this millennium."""
    return isinstance(value, (int, float)) and 0 <= value < 1e11


def state_of(run_dir: Path) -> tuple[State, str]:
    """How far a job is, and why it is not done."""
    record = read_record(run_dir)
    result = valid_result(run_dir)
    if result is not None and result["status"] == "completed":
        return "done", ""
    if record is not None and record["error"]:
        return "failed", one_line(record["error"])
    if record is not None and result is None:
        return ("running", "") if is_alive(record, run_dir) else ("killed", "ended without a message: killed?")
    if result is not None:
        return ("interrupted" if result["status"] == "interrupted" else "failed"), one_line(result["error"] or "")
    return "missing", ""


def is_alive(record: JsonObject, run_dir: Path) -> bool:
    """Whether the process that began the job is there; on another host, or in another namespace of pids: whether it
    wrote of late."""
    here = socket.gethostname(), own_space(), own_machine()
    if (record["host"], record.get("space", here[1]), record.get("machine", here[2])) != here:
        latest = max((file.stat().st_mtime for file in run_dir.iterdir() if file.is_file()), default=0.0)
        return time.time() - latest < _SILENT_SECONDS
    try:
        process = psutil.Process(record["pid"])
        return process.status() != psutil.STATUS_ZOMBIE and abs(process.create_time() - record["born"]) < 1.0
    except psutil.Error:
        return False


def seconds_of(run_dir: Path) -> float | None:
    """Wall seconds of a job that has ended with a result."""
    record, file = read_record(run_dir), run_dir / "result.json"
    return file.stat().st_mtime - record["started"] if record and file.exists() else None


def snapshot(manifest: Manifest, keys: Sequence[str]) -> Snapshot:
    """The sweep as it stands. Remaining time: mean of the jobs that have ended, over as many as run now."""
    states = manifest.states(keys)
    folders = {key: manifest.folder / manifest.jobs[key].folder for key in states}
    took = [seconds for key, (state, _) in states.items() if state == "done" and (seconds := seconds_of(folders[key]))]
    running = tuple(running_line(manifest, k) for k, (state, _) in states.items() if state == "running")
    done = sum(state == "done" for state, _ in states.values())
    failed = sum(state in ("failed", "interrupted") for state, _ in states.values())
    left = statistics.fmean(took) * (len(states) - done - failed) / max(1, len(running)) if took else None
    return Snapshot(len(states), done, failed, running, left)


def running_line(manifest: Manifest, key: str) -> str:
    """'7: strategy=single seed=1  epoch 31  loss 0.52'."""
    folder = manifest.jobs[key].folder
    rows = read_rows(manifest.folder / folder)
    loss = rows[-1].get("loss/train") if rows else None
    far = "" if loss is None else f"  epoch {rows[-1]['epoch'] + 1}  loss {loss:.4g}"
    return f"  {folder}: {manifest.title(key)}{far}"


def count(states: Mapping[str, tuple[State, str]]) -> dict[State, int]:
    """How many jobs are in each state; states without one are left out."""
    counted = Counter(state for state, _ in states.values())
    return {state: counted[state] for state in STATES if counted[state]}


def in_words(counts: Mapping[State, int]) -> str:
    """'3 of 5 done, 1 failed, 1 missing'."""
    others = [f"{number} {state}" for state, number in counts.items() if state != "done"]
    return ", ".join([f"{counts.get('done', 0)} of {sum(counts.values())} done", *others])


@contextmanager
def alone_in(folder: Path) -> Iterator[None]:
    """One sweep works in a folder at a time. Raises ConfigError where another one does."""
    with ExitStack() as inside:
        try:
            inside.enter_context(working_in(folder, otherwise="choose another hydra.sweep.dir", say=say))
        except FolderInUse as error:
            raise ConfigError(str(error)) from error
        yield
