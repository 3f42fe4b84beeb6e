"""`gnnpar train`: one job or a sweep, from the command line to an exit code."""

from __future__ import annotations

import json
import os
import re
import sys
import traceback
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from gnnpar.cli.main import file_line, refuse
from gnnpar.config import jobs
from gnnpar.config.application import run_jobs, without_folders
from gnnpar.config.compose import HydraJob, names_folder, refuse_led_away
from gnnpar.config.help import asks_for_help, train_help
from gnnpar.config.inputs import sets
from gnnpar.config.replay import resumed
from gnnpar.config.sweep import with_its_sweep
from gnnpar.durable import JsonObject, WriteError, make_folder, write_text_whole
from gnnpar.folder_lock import FolderInUse, numbered, working_in
from gnnpar.launch.environment import check_rank
from gnnpar.launch.slurm import as_rank
from gnnpar.settings import ConfigError, Settings
from gnnpar.targets import classes_in, is_own, note_named
from gnnpar.track import progress
from gnnpar.track.console import Console, complain, pulse, say
from gnnpar.track.text import printable
from gnnpar.track.tracker import Quiet

if TYPE_CHECKING:
    from gnnpar.comm.world import Outcome
    from gnnpar.training.loop import Callback, PlanSource


def run(argv: list[str]) -> int:
    """The worst exit code of the jobs."""
    if asks_for_help(argv):
        sys.stdout.write(train_help(argv))
        return 0
    os.environ.update(as_rank(os.environ))
    check_rank(os.environ)
    joined = os.environ.get("RANK")
    argv, replay = resumed(argv) if joined is None else (without_folders(argv, rank=int(joined)), None)
    code, _ = run_jobs(argv, job, show=show, replay=replay)
    return code


def show(sweep: Path) -> None:
    """The table of `gnnpar compare`."""
    from gnnpar.cli import compare

    compare.run([str(sweep)])


def job(config: object) -> int:
    """One Hydra job, also in a process that a launcher has started."""
    return train_one(HydraJob.running(config))


def train_one(job: HydraJob) -> int:
    """0 completed, 1 failed or interrupted, 2 the configuration is wrong. An interruption ends a sweep as well, and
    nothing else does: also a defect is the job's alone, whose traceback goes to stderr."""
    if int(os.environ.get("RANK", "0")) != 0:  # of joined ranks, the first has the folder
        return run_one(job)
    with with_its_sweep(), ExitStack() as inside:
        try:
            refuse_led_away(job.run_dir, job.typed)
            job = replace(job, run_dir=inside.enter_context(_folder_of(job)))
        except (FolderInUse, WriteError) as error:
            from gnnpar.launch.joined import refusal

            return refuse(refusal(ConfigError(str(error))), error)
        return run_one(job) if job.sweep is None else run_job(job, job.sweep)


@contextmanager
def _folder_of(job: HydraJob) -> Iterator[Path]:
    """Inside, it is this run's alone. One that nobody has named, outputs/DATE/TIME, gets a number where another run has
    it: it began in the same second, or the clock has gone back."""
    unnamed = job.sweep is None and not names_folder(job.typed) and _DATED.fullmatch("/".join(job.run_dir.parts[-2:]))
    with ExitStack() as inside:
        for folder in numbered(job.run_dir):
            try:
                inside.enter_context(working_in(folder, otherwise="choose another hydra.run.dir", say=say))
            except FolderInUse:
                if not unnamed:
                    raise
                continue
            if not unnamed or not (folder / "result.json").exists():
                yield folder
                return
            inside.close()


_DATED = re.compile(r"\d{4}-\d\d-\d\d/\d\d-\d\d-\d\d")


def run_job(job: HydraJob, sweep: Path) -> int:
    """One of a sweep."""
    try:
        if not quiet():
            say(title(job, sweep))
        jobs.begin_job(job.run_dir, job.overrides)
        return run_one(job)
    except OSError as error:
        complain(file_line(error))
        with suppress(OSError):  # the same disk is full
            jobs.refuse_job(job.run_dir, file_line(error), refused=False)
        return 1
    except Exception as error:
        jobs.refuse_job(job.run_dir, f"{type(error).__name__}: {error}", refused=False)
        sys.stderr.write(printable("".join(traceback.format_exception(error))))
        return 1


def quiet() -> bool:
    """Whether the parent shows the jobs of a sweep itself."""
    return progress.SHOWN in os.environ


def title(job: HydraJob, sweep: Path) -> str:
    """The line before a job of a sweep: which it is, and how far the sweep."""
    manifest = jobs.Manifest.read(sweep)
    seen = jobs.snapshot(manifest, list(manifest.jobs)) if manifest.jobs else None
    return job.title + (f"  ({seen.line})" if seen else "")


def run_one(job: HydraJob) -> int:
    """One job, in a sweep or not."""
    run_dir = job.run_dir
    first = int(os.environ.get("RANK", "0")) == 0
    if first and job.sweep is None and job.choices.get("tracker") == "console":
        brought = [o for o in job.overrides if re.match(r"\+*(plan|shards|shards\.folder)=", o)]
        chosen = brought or [f"{group}={job.choices.get(group)}" for group in ("strategy", "model", "dataset")]
        say(f"starting: {', '.join(chosen)}")  # torch takes a second or two to import, in every rank
    try:
        with pulse(lambda: "loading torch and the settings" if first and not quiet() else ""):
            settings = composed_settings(job)
        if job.sweep is not None and quiet() and isinstance(settings.tracker, Console):
            settings = replace(settings, tracker=Quiet())
        if first:
            make_folder(run_dir)
            write_text_whole(run_dir / "config.yaml", job.yaml(settings))
        from gnnpar.cli.train import run_training

        outcome = run_training(settings, run_dir)
    except ValueError as error:
        if job.sweep is not None:
            jobs.refuse_job(run_dir, str(error), refused=True)
        return refuse(error)
    if outcome.error or outcome.status == "failed":
        if os.environ.get("GNNPAR_TRACEBACK") == "1" and outcome.traceback:
            sys.stderr.write(printable(outcome.traceback))
        if not outcome.quiet:
            complain(outcome.error or "the run has failed and gives no reason")
    elif first and not quiet():
        for line in summary(run_dir):
            say(line)
    if outcome.status == "interrupted":
        raise KeyboardInterrupt
    return outcome.exit_code


def run_training(settings: Settings, run_dir: Path, callbacks: Sequence[Callback] = ()) -> Outcome:
    """Start the ranks of a run, or join those that are there, and train; result.json is in `run_dir` in any case.

    ValueError where the run cannot begin: of joined ranks, which meet for it, all raise the same.
    """
    from gnnpar.launch.joined import refusal
    from gnnpar.launch.launch import launch, world_of
    from gnnpar.training.checks import check
    from gnnpar.training.loop import Training
    from gnnpar.training.result.record import RunRecord

    try:
        world = world_of(settings)
        check(settings, world)
        verified = probed(settings, world.size)
    except ValueError as error:
        raise refusal(error, settings.comm.connect_seconds) from error
    note_named(settings.resolved)
    record = RunRecord(settings, world, run_dir, verified)
    work = Training(record, plan_source_of(settings), tuple(callbacks))
    return launch(world, work, record, how=settings.launch, comm=settings.comm)


def probed(settings: Settings, size: int) -> str:
    """What stands behind the exactness of a run. ConfigError where its model, or its strategy, cannot train on so many
    ranks as on one device. Of joined ranks, rank 0 finds out, and tells the others of a refusal."""
    if os.environ.get("RANK", "0") != "0":
        return "no"
    if all(map(is_own, classes_in([settings.resolved.get(name) for name in ("strategy", "model")]))):
        return "checked"  # by the conformance suite
    from gnnpar.verify.probe import probe  # imports PyG

    return probe(settings, size)


def plan_source_of(settings: Settings) -> PlanSource:
    """A strategy of the planner plans with it; any other plans for itself, and the planner is not imported."""
    if type(settings.strategy).__module__.startswith("gnnpar.planner."):
        from gnnpar.planner.replan import MeasuredPlan

        return MeasuredPlan()
    from gnnpar.training.plans import OwnPlan

    return OwnPlan()


def composed_settings(job: HydraJob) -> Settings:
    """Of one job. Joined ranks hear of the one whose settings cannot be had (a folder that this host lacks)."""
    try:
        settings = job.settings()
        check_world(settings, job.overrides)
        return settings
    except ValueError as error:
        from gnnpar.launch.joined import refusal

        raise refusal(error) from error


def check_world(settings: Settings, overrides: Sequence[str]) -> None:
    """A world size asked for and another one started cannot both be meant."""
    started = os.environ.get("WORLD_SIZE") if os.environ.get("RANK") is not None else None
    asked = [o for o in overrides if sets([o], "world_size")]
    if started is not None and asked and int(started) != settings.world_size:
        raise ConfigError(f"{asked[-1]}, but WORLD_SIZE={started} ranks were started; leave world_size out")


def summary(run_dir: Path) -> list[str]:
    """The last line of a run."""
    from gnnpar.track.console import num_bytes, seconds
    from gnnpar.training.result.result import epoch_time

    result = json.loads((run_dir / "result.json").read_text(encoding="utf-8"))
    metric, took = result["metric"], epoch_time(result) or 0.0
    name = metric["name"] or "metric"
    parts = [f"{name} {part} {metric[part]:.4f}" for part in ("val", "test") if metric[part] is not None]
    if fidelity := result["fidelity"]:
        worst = fidelity["worst"]
        parts.append(f"gradient cosine {fidelity['cosine']['mean']:.4f} (worst {worst['layer']})")
    figures = ", ".join(
        [*parts, f"{seconds(took)}/epoch", f"{num_bytes(result['bytes_per_epoch']['total'])}/epoch sent"]
    )
    return [f"completed: {figures}  ->  {os.path.relpath(run_dir)}", *prediction(result)]


REPLAN_ABOVE = 0.2
"""Share by which an epoch may differ from its prediction before a run says how to plan again."""


def prediction(result: JsonObject) -> list[str]:
    """Predicted against measured, a line; none where no planner made the plan."""
    from gnnpar.track.console import seconds

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
