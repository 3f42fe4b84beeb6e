"""wandb: a mirror of a run for dashboards, one run per job, opened by rank 0 when its plan is known.

The history is metrics.jsonl under the same names (`flat`), and the curves again over training seconds and gigabytes
sent. An error is one line on stderr, and training continues. wandb is imported when a run is opened.
"""

from __future__ import annotations

import json
import os
import shlex
import shutil
import threading
import uuid
from collections.abc import Callable, Mapping
from concurrent.futures import Future, wait
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Annotated, Any, Literal, TypeVar

import annotated_types as at

from gnnpar.files import JsonDict, JsonObject, write_json_atomic
from gnnpar.track import keys
from gnnpar.track.console import Console, complain, say
from gnnpar.track.text import counted
from gnnpar.track.tracker import Tee, Tracker

T = TypeVar("T")
Run = Any  # wandb.Run, or None: the package is imported when a run is opened
LINK = "wandb.json"  # in the run folder: where the run is on wandb
CURVES = ("loss/train", "metric/train", "metric/val", "metric/test")
GIGABYTES = "comm/total_gigabytes_so_far"
AXES = {"against_seconds": "time/train_seconds", "against_gigabytes": GIGABYTES}


@dataclass(frozen=True, kw_only=True)
class Wandb:
    """tracker=wandb. The terminal shows the same as tracker=console.

    mode: online; offline, for `wandb sync` later; disabled, the terminal only. group: null for the sweep of the job.
    connect_seconds: for the server to answer, else the run is kept offline. upload_seconds: for the upload at the end.
    """

    mode: Literal["online", "offline", "disabled"] = "online"
    project: str = "gnnpar"
    entity: str | None = None
    group: str | None = None
    name: str | None = None
    tags: tuple[str, ...] = ()
    every: Annotated[int, at.Ge(1)] = 10
    connect_seconds: Annotated[float, at.Gt(0)] = 5.0
    upload_seconds: Annotated[float, at.Gt(0)] = 30.0

    def build(self, run_dir: Path, epochs: int, job: JsonObject) -> Tracker:
        console = Console(every=self.every).build(run_dir, epochs, job)
        return console if self.mode == "disabled" else Tee(trackers=(console, Mirror(self, run_dir, job)))


class Mirror:
    """One wandb run; silent without one, or after an error."""

    def __init__(self, config: Wandb, run_dir: Path, job: JsonObject) -> None:
        self.config, self.run_dir, self.job = config, run_dir, job
        self._run: Run = None

    def start(self, facts: JsonObject) -> None:
        self._run = open_run(self.config, self.run_dir, self.job)
        local = self._run is not None and self._run.offline  # offline, only this machine can be slow
        seconds = self.config.upload_seconds if local else self.config.connect_seconds
        self._attempt(lambda run: describe(run, self.run_dir, facts), seconds)

    def log(self, row: JsonObject) -> None:
        self._attempt(lambda run: run.log(flat(row) | curves_over_cost(row), step=row["epoch"], commit=True))

    def close(self, result: JsonObject | None = None) -> None:
        upload = "" if self._run is None or not self._run.offline else sync_command(self._run)
        if self._attempt(lambda run: conclude(run, self.run_dir, result), self.config.upload_seconds) and upload:
            say(f"wandb: kept offline; upload with: {upload}")
        self._run = None

    def _attempt(self, act: Callable[[Run], object], seconds: float | None = None) -> bool:
        """Return whether `act` succeeded, within `seconds` if given; the first error ends the mirror with one line."""
        run = self._run
        if run is None:
            return False
        try:
            with_timeout(seconds, lambda: act(run)) if seconds else act(run)  # tables wait for the server
        except Exception as error:
            self._run = None
            line = f"wandb stopped ({reason(error)}); metrics.jsonl has everything"
            complain(f"{line}; upload what wandb has with: {sync_command(run)}")
        return self._run is not None


_START_SECONDS = 60.0  # of importing wandb and starting its service process


def open_run(config: Wandb, run_dir: Path, job: JsonObject) -> Run:
    """Open a run on the server, or on disk if it cannot be reached; return None, with a line, if neither works. Console
    capture, system statistics and saved code are off, because they disturb measurements."""
    try:
        wandb = with_timeout(_START_SECONDS, load)  # its service process may die while it starts
        quiet: JsonDict = {"silent": True, "console": "off", "x_disable_stats": True, "save_code": False}
        limits: JsonDict = {"init_timeout": config.connect_seconds, "finish_timeout": config.upload_seconds / 2}
        settings = wandb.Settings(**quiet, **limits, disable_git=True, finish_timeout_raises=True)
        arguments = identity(config, job) | {"config": settings_of(job, run_dir), "dir": str(run_dir)}

        def init(mode: str, run_id: str) -> Run:  # waits forever if the service process dies
            act = partial(wandb.init, mode=mode, id=run_id, reinit="create_new", settings=settings, **arguments)
            return with_timeout(config.connect_seconds + _START_SECONDS, act)

        run = connect(wandb, run_dir, init) if config.mode == "online" else None
        return run if run is not None else init("offline", uuid.uuid4().hex[:8])
    except Exception as error:
        complain(f"wandb cannot be used ({reason(error)}); metrics.jsonl has everything")
        return None


def connect(wandb: ModuleType, run_dir: Path, init: Callable[[str, str], Run]) -> Run:
    """Open a run on the server; return None, with a line, if it cannot be reached."""
    attempt = uuid.uuid4().hex[:8]
    try:
        login = partial(wandb.login, prompt=False, verify=False)  # a prompt would stop training
        if not with_timeout(_START_SECONDS, login):
            raise ValueError("no API key; set WANDB_API_KEY or call wandb login")
        return init("online", attempt)
    except Exception as error:
        with suppress(Exception):  # end retries, which would run during the training
            with_timeout(_START_SECONDS, wandb.teardown)
        for leftover in (run_dir / "wandb").glob(f"run-*-{attempt}"):
            shutil.rmtree(leftover, ignore_errors=True)
        complain(f"wandb cannot be reached ({reason(error)}); this run is kept offline")
        return None


def load() -> ModuleType:
    """Import wandb, silent. Its error reporting, which delays the exit by 20 s if the server does not answer, is off
    unless WANDB_ERROR_REPORTING=true. Raises ValueError if the program has its own open run."""
    os.environ.setdefault("WANDB_ERROR_REPORTING", "false")
    import wandb

    if wandb.run is not None:  # `teardown` would end it
        raise ValueError("this program has a run of its own open in wandb: finish it before")
    wandb.setup(settings=wandb.Settings(silent=True, disable_git=True))  # login prints otherwise
    return wandb


def with_timeout(seconds: float, act: Callable[[], T]) -> T:
    """Return or raise the result of `act`. Raise TimeoutError after `seconds`; its thread is then abandoned."""
    done: Future[T] = Future()

    def run() -> None:
        try:
            done.set_result(act())
        except BaseException as error:
            done.set_exception(error)

    threading.Thread(target=run, name="wandb", daemon=True).start()
    wait([done], seconds)
    if not done.done():
        raise TimeoutError(f"no answer within {seconds:g} s")
    return done.result()


def identity(config: Wandb, job: JsonObject) -> JsonDict:
    """Return the arguments of wandb.init that identify a run."""
    named = (job["strategy"], job["model"], job["dataset"], counted(job["world_size"], "rank"))
    return {
        "project": config.project,
        "entity": config.entity,
        "group": config.group or job["study"] or None,
        "job_type": job["strategy"],
        "name": config.name or f"{' '.join(named)} seed {job['seed']}",
        "tags": [tag[:64] for tag in dict.fromkeys((*named, job["provenance"], *job["exactness"], *config.tags))],
    }


def settings_of(job: JsonObject, run_dir: Path) -> JsonDict:
    """Return wandb's config: settings with the names of groups, other facts of the job, the plan without its arrays."""
    settings: JsonDict = dict(job["resolved"])
    for group, name in job["names"].items():
        if isinstance(settings.get(group), Mapping):
            settings[group] = {"name": name, **settings[group]}
    plan = json.loads((run_dir / "plan.json").read_text(encoding="utf-8"))
    run = {name: value for name, value in job.items() if name not in ("resolved", "names", "settings")}
    return settings | {"run": run, "plan": {name: value for name, value in plan.items() if name != "arrays"}}


def describe(run: Run, run_dir: Path, facts: JsonObject) -> None:
    """Write the run's address on wandb, for gnnpar dashboard; log axes, units, the table of parts and the plan."""
    import wandb

    place = {"id": run.id, "entity": run.entity or None, "project": run.project, "group": run.group or None}
    place |= {"mode": "offline" if run.offline else "online", "path": os.path.relpath(run.settings.sync_dir, run_dir)}
    write_json_atomic(run_dir / LINK, place)
    run.define_metric("epoch")
    for name in (*keys.KEYS, GIGABYTES):
        run.define_metric(name, step_metric="epoch")
    for prefix, axis in AXES.items():
        for curve in CURVES:
            run.define_metric(f"{prefix}/{curve}", step_metric=axis)
    units: list[list[str]] = [[name, key.unit, key.meaning] for name, key in keys.KEYS.items()]
    units.append([GIGABYTES, "GB", "comm/total_bytes_so_far in units of 1e9 bytes"])
    tables = {"tables/units": wandb.Table(columns=["metric", "unit", "meaning"], data=[*units])}
    if parts := facts.get("parts"):
        tables["tables/partition"] = wandb.Table(columns=list(parts[0]), data=[list(part.values()) for part in parts])
    run.log(tables, step=0, commit=False)  # sent with epoch 0
    add_artifact(run, "plan", run_dir / "plan.json")


def conclude(run: Run, run_dir: Path, result: JsonObject | None) -> None:
    """Log the summary, breakdowns and result.json, and finish the run."""
    if result is not None:
        run.summary.update({"status": result["status"], "error": result["error"]})
        run.summary.update({"result": {name: value for name, value in result.items() if name != "settings"}})
        if result["epochs_done"]:
            sums = (("seconds", "breakdown_seconds"), ("bytes", "bytes_per_epoch"))
            run.log({f"charts/{unit}_per_epoch": bars(unit, result[name]) for unit, name in sums})
        for kind, name in (("result", "result.json"), ("trace", "trace.json"), ("schedule", "schedule.svg")):
            if (run_dir / name).exists():  # the last two are of trace=true
                add_artifact(run, kind, run_dir / name)
    run.finish(exit_code=0 if result is not None and result["status"] == "completed" else 1)


def bars(unit: str, values: Mapping[str, float]) -> object:
    """Return a chart with one bar per phase, without sums over phases."""
    import wandb

    phases = [[name, value] for name, value in values.items() if name not in ("comm_total", "total", "metadata")]
    table = wandb.Table(columns=["phase", unit], data=[*phases])
    return wandb.plot.bar(table, "phase", unit, title=f"{unit} per epoch by phase")


def add_artifact(run: Run, kind: str, file: Path) -> None:
    import wandb

    artifact = wandb.Artifact(f"{kind}-{run.id}", type=kind)
    artifact.add_file(str(file))
    run.log_artifact(artifact)


def flat(row: JsonObject) -> JsonDict:
    """Return a row as metrics of one number each: NAME/rank_0 for lists, NAME/KEY for mappings."""
    metrics: JsonDict = {}
    for name, value in row.items():
        if name == "fidelity/layers":
            for layer, (cosine, error) in value.items():
                prefix = f"{name}/{layer.replace('.', '_')}"  # wandb reads a dot as a step into a mapping
                metrics |= {f"{prefix}/cosine": cosine, f"{prefix}/relative_error": error}
        elif isinstance(value, Mapping):
            metrics |= flat({f"{name}/{part}": number for part, number in value.items()})
        elif isinstance(value, (list, tuple)):
            metrics |= {f"{name}/rank_{rank}": number for rank, number in enumerate(value)}
        else:
            metrics[name] = value
    return metrics


def curves_over_cost(row: JsonObject) -> JsonDict:
    """Return the curves of a row under their names over seconds and gigabytes, and the gigabytes."""
    curves = {f"{prefix}/{curve}": row[curve] for prefix in AXES for curve in CURVES if curve in row}
    sent = row.get("comm/total_bytes_so_far")
    return curves | ({} if sent is None else {GIGABYTES: sent / 1e9})


def sync_command(run: Run) -> str:
    """Return the command that uploads a run."""
    folder = Path(run.settings.sync_dir)
    shown = folder.relative_to(Path.cwd()) if folder.is_relative_to(Path.cwd()) else folder
    return f"wandb sync {shlex.quote(str(shown))}"


def reason(error: BaseException) -> str:
    """Return the first line of an error, or its name."""
    return next(filter(None, map(str.strip, str(error).splitlines())), type(error).__name__)
