"""`gnnpar train`: run one job or a sweep."""

from __future__ import annotations

import ctypes
import math
import os
import re
import signal
import sys
import traceback
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from gnnpar.cli.main import file_line, refuse
from gnnpar.config.compose import HydraJob, as_yaml, train_help
from gnnpar.config.errors import JobFailed
from gnnpar.config.inputs import key_of, sets
from gnnpar.config.jobs import SESSION, SWEEP, Job, jobs_below, snapshot, titles
from gnnpar.files import FolderInUse, JsonObject, WriteError, numbered, read_json, working_in, write_text_atomic
from gnnpar.launch.slurm import as_rank, check_rank
from gnnpar.settings import Comm, ConfigError, Settings
from gnnpar.targets import classes_in, is_own, note_named
from gnnpar.track.console import SHOWN, Console, complain, num_bytes, progress_lines, say, seconds
from gnnpar.track.keys import goodness
from gnnpar.track.text import printable
from gnnpar.track.tracker import Quiet
from gnnpar.training.result.result import epoch_time, valid_result

if TYPE_CHECKING:
    from gnnpar.comm.world import Outcome
    from gnnpar.training.loop import Callback
    from gnnpar.training.plans import PlanSource


def run(argv: list[str]) -> int:
    """Return the largest exit code of the jobs."""
    if "--help" in argv or "-h" in argv:
        sys.stdout.write(train_help(argv))
        return 0
    from gnnpar.config.sweep import run_jobs, without_folders  # imports Hydra, which ranks do not need

    os.environ.update(as_rank(os.environ))
    check_rank(os.environ)
    joined = os.environ.get("RANK")
    code, _ = run_jobs(argv if joined is None else without_folders(argv, rank=int(joined)), job, show=show)
    return code


def show(sweep: Path) -> None:
    """Print the table of `gnnpar compare`."""
    from gnnpar.cli import compare

    compare.run([str(sweep)])


def job(config: object) -> float:
    """Run one Hydra job, also in a launcher's process. Return its exit code, or the metric for a searching sweeper."""
    job = HydraJob.running(config)
    return train_one(job) if job.sweep is None else run_job(job, job.sweep)


def train_one(job: HydraJob) -> int:
    """Return 0: completed, 1: failed, 2: wrong configuration. Raise KeyboardInterrupt if interrupted."""
    if int(os.environ.get("RANK", "0")) != 0:  # joined rank 0 has the folder
        return run_one(job)
    with ExitStack() as inside:
        with refusals():
            try:
                job = replace(job, run_dir=inside.enter_context(_folder_of(job)))
            except (FolderInUse, WriteError) as error:
                raise ConfigError(str(error)) from error
        return run_one(job)


@contextmanager
def refusals(seconds: float = Comm().connect_seconds) -> Iterator[None]:
    """Send a ValueError in the block to the other joined ranks. Raise it, or another rank's."""
    try:
        yield
    except ValueError as error:
        if "RANK" not in os.environ:
            raise
        from gnnpar.launch.join import refusal  # imports torch

        raise refusal(error, seconds) from error


@contextmanager
def _folder_of(job: HydraJob) -> Iterator[Path]:
    """Lock the run's folder. Add a number to outputs/DATE/TIME if another run of the same second has it."""
    unnamed = not sets(job.typed, "hydra.run.dir", "hydra.sweep.dir") and _DATED.fullmatch(
        "/".join(job.run_dir.parts[-2:])
    )
    with ExitStack() as inside:
        for folder in numbered(job.run_dir):
            try:
                inside.enter_context(working_in(folder, remedy="choose another hydra.run.dir", say=say))
            except FolderInUse:
                if not unnamed:
                    raise
                continue
            if not unnamed or not (folder / "result.json").exists():
                yield folder
                return
            inside.close()


_DATED = re.compile(r"\d{4}-\d\d-\d\d/\d\d-\d\d-\d\d")


def run_job(job: HydraJob, sweep: Path) -> float:
    """Run one job of a sweep unless it is done. Errors other than KeyboardInterrupt stay within the job. For a sweeper
    that searches, raise them, and return the best validation metric."""
    if os.environ.get(SWEEP) == str(os.getppid()):  # workers of joblib would outlive the process of the sweep
        ctypes.CDLL(None).prctl(1, signal.SIGTERM)  # PR_SET_PDEATHSIG
    planned, code = planned_job(job, sweep), 0
    job = replace(job, run_dir=planned.run_dir)
    try:
        if planned.state()[0] != "done":
            with working_in(job.run_dir, remedy="choose another hydra.sweep.dir", say=say):
                if SHOWN not in os.environ:
                    mine = [each for each in jobs_below(sweep) if each.session == planned.session]
                    say(f"run {planned.folder}: {titles(mine)[planned.folder]}  ({snapshot(mine).line})")
                planned.begin()
                code = run_one(job, planned)
    except FolderInUse as error:
        complain(str(error))
        code = 1
    except Exception as error:
        line = file_line(error) if isinstance(error, OSError) else f"{type(error).__name__}: {error}"
        with suppress(OSError):  # the disk may be full
            planned.fail(line, refused=False)
        complain(line)
        if not isinstance(error, OSError):
            sys.stderr.write(printable("".join(traceback.format_exception(error))))
        code = 1
    if not job.searching:
        return code
    if code:
        raise JobFailed(": ".join((Job.read(job.run_dir) or planned).state()))
    metric = (valid_result(job.run_dir) or {})["metric"]
    return math.nan if metric["best_val"] is None else goodness(metric["name"], metric["best_val"])


def planned_job(job: HydraJob, sweep: Path) -> Job:
    """Return the job of this run's folder, or of a numbered one if a job of another sweeper has it."""
    session, own = os.environ.get(SESSION, ""), tuple(o for o in job.overrides if key_of(o) != "resume")
    key = ""
    for folder in numbered(job.run_dir):
        known = Job.read(folder)
        if known is not None and known.session == session and set(own) <= set(known.overrides):
            return known
        key = key or job.key()
        if known is None and not (folder / "result.json").exists():
            known = Job(sweep, os.path.relpath(folder, sweep), key, tuple(job.overrides))
        if known is not None and known.key == key:
            known = replace(known, session=session)
            known.save()
            return known
    raise AssertionError("unreachable: one of all numbers is free")


def run_one(job: HydraJob, planned: Job | None = None) -> int:
    """Run one job, in a sweep or not."""
    first, shown = int(os.environ.get("RANK", "0")) == 0, SHOWN in os.environ
    if first and planned is None and job.choices.get("tracker") == "console":
        brought = [o for o in job.overrides if sets([o], "plan", "shards", "shards.folder")]
        chosen = brought or [f"{group}={job.choices.get(group)}" for group in ("strategy", "model", "dataset")]
        say(f"starting: {', '.join(chosen)}")  # importing torch takes a second or two, in every rank
    try:
        with progress_lines(lambda: "loading torch and the settings" if first and not shown else ""), refusals():
            settings = job.settings()
            check_world(settings, job.overrides)
        if planned is not None and shown and isinstance(settings.tracker, Console):
            settings = replace(settings, tracker=Quiet())
        outcome = trained(settings, job.run_dir)
    except ValueError as error:
        if planned is not None:
            planned.fail(str(error), refused=True)
        return refuse(error)
    if outcome.status != "completed" and not outcome.quiet:
        complain(outcome.error or "the run has failed and gives no reason")
    if outcome.status == "interrupted":
        raise KeyboardInterrupt
    return outcome.exit_code


def trained(settings: Settings, run_dir: Path, callbacks: Sequence[Callback] = ()) -> Outcome:
    """Write config.yaml, train, and print the figures of a completed run, or on request a failed one's traceback."""
    first = os.environ.get("RANK", "0") == "0"
    if first:
        run_dir.mkdir(parents=True, exist_ok=True)
        write_text_atomic(run_dir / "config.yaml", as_yaml(settings))
    outcome = run_training(settings, run_dir, callbacks)
    if os.environ.get("GNNPAR_TRACEBACK") == "1":
        sys.stderr.write(printable(outcome.traceback))
    if outcome.status == "completed" and first and SHOWN not in os.environ:
        for line in summary(run_dir):
            say(line)
    return outcome


def run_training(settings: Settings, run_dir: Path, callbacks: Sequence[Callback] = ()) -> Outcome:
    """Start the ranks of a run, or join ranks of torchrun or Slurm, train, and write result.json into `run_dir`. Raises
    ValueError if the run cannot begin; joined ranks all raise the same."""
    from gnnpar.launch.launch import launch, world_of
    from gnnpar.training.checks import check
    from gnnpar.training.loop import Training
    from gnnpar.training.result.record import RunRecord

    with refusals(settings.comm.connect_seconds):
        world = world_of(settings)
        check(settings, world)
        verified = probed(settings, world.size)
    note_named(settings.resolved)
    record = RunRecord(settings, world, run_dir, verified)
    work = Training(record, plan_source_of(settings), tuple(callbacks))
    return launch(world, work, record, how=settings.launch, comm=settings.comm)


def probed(settings: Settings, size: int) -> str:
    """Return how the exactness of the strategy and the model was checked. Only rank 0 of joined ranks checks. Raises
    ConfigError if a user's class gives other results on `size` ranks than on one device."""
    if os.environ.get("RANK", "0") != "0":
        return "no"
    if all(map(is_own, classes_in([settings.resolved.get(name) for name in ("strategy", "model")]))):
        return "checked"  # by the conformance suite
    from gnnpar.verify.probe import probe  # imports PyG

    return probe(settings, size)


def plan_source_of(settings: Settings) -> PlanSource:
    """Return the planner for its own strategies, else the strategy's own plan, without importing the planner."""
    if type(settings.strategy).__module__.startswith("gnnpar.planner."):
        from gnnpar.planner.replan import MeasuredPlan

        return MeasuredPlan()
    from gnnpar.training.plans import PlanSource

    return PlanSource()


def check_world(settings: Settings, overrides: Sequence[str]) -> None:
    """Raise ConfigError if world_size= differs from the number of started ranks."""
    started = os.environ.get("WORLD_SIZE") if os.environ.get("RANK") is not None else None
    asked = [o for o in overrides if sets([o], "world_size")]
    if started is not None and asked and int(started) != settings.world_size:
        raise ConfigError(f"{asked[-1]}, but WORLD_SIZE={started} ranks were started; leave world_size out")


def summary(run_dir: Path) -> list[str]:
    """Return the last lines of a run."""
    result = read_json(run_dir / "result.json")
    metric, took = result["metric"], epoch_time(result) or 0.0
    name = metric["name"] or "metric"
    parts = [f"{name} {part} {metric[part]:.4f}" for part in ("val", "test") if metric[part] is not None]
    if fidelity := result["fidelity"]:
        parts.append(f"gradient cosine {fidelity['cosine']['mean']:.4f} (worst {fidelity['worst']['layer']})")
    parts += [f"{seconds(took)}/epoch", f"{num_bytes(result['bytes_per_epoch']['total'])}/epoch sent"]
    return [f"completed: {', '.join(parts)}  ->  {os.path.relpath(run_dir)}", *prediction(result)]


REPLAN_ABOVE = 0.2
"""Relative error of a predicted epoch above which a run prints how to plan again."""


def prediction(result: JsonObject) -> list[str]:
    """Return a line of predicted against measured figures; none without a planner's plan."""
    predicted = result["predicted"]
    if predicted is None or predicted["epoch_error"] is None:
        return []
    line = f"planned: {predicted['label']}, predicted {seconds(predicted['epoch_seconds'])}/epoch"
    if result["provenance"] == "emulated" or result["oversubscribed"]:
        return [f"{line}; times of ranks that share cores or a process are not compared with it"]
    line += f", measured {predicted['epoch_error']:+.0%}"
    if predicted["peak_error"] is not None:
        line += f", peak memory {predicted['peak_error']:+.0%}"
    if abs(predicted["epoch_error"]) > REPLAN_ABOVE:
        line += "; topology=measured topology.refresh=true measures this machine again and plans anew"
    return [line]
