"""Hydra's application: one job, a sweep, or the jobs of a study. gnnpar's sweeper of grids and studies runs the jobs
without a completed result. Launchers and other sweepers of Hydra run unchanged; a job that is already done ends at once
(`gnnpar.cli.train`)."""

from __future__ import annotations

import itertools
import logging
import math
import os
import sys
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import hydra
from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import OverrideParseException
from hydra.experimental.callback import Callback
from omegaconf import OmegaConf, open_dict

from gnnpar.config.compose import refuse_unclear, resolved_for_key, search_installed
from gnnpar.config.errors import CONFIG, hydra_errors
from gnnpar.config.inputs import expand_shorthands, group_of, key_of, quoted
from gnnpar.config.jobs import (
    AT_ONCE,
    NOT_HASHED,
    SESSION,
    SWEEP,
    Job,
    State,
    count,
    in_words,
    job_key,
    jobs_below,
    snapshot,
    titles,
    unread,
)
from gnnpar.config.study import MOST_RUNS
from gnnpar.files import working_in
from gnnpar.launch import environment
from gnnpar.paths import conf_dir
from gnnpar.settings import ConfigError, config_errors
from gnnpar.track.console import complain, progress_lines, say, shown
from gnnpar.track.text import one_line, printable

Overrides = Sequence[str]
Hydras = Any  # Hydra's objects are not typed


@dataclass
class Start:
    """One start of a sweep in this process. listed: the jobs of a study. keys: keys of the planned jobs, in order."""

    listed: Sequence[Overrides] | None = None
    folder: Path | None = None
    keys: list[str] = field(default_factory=list)
    inside: ExitStack = field(default_factory=ExitStack)

    def jobs(self) -> list[Job]:
        """Return the jobs that this start has requested."""
        found = [] if self.folder is None else jobs_below(self.folder)
        return [job for job in found if job.session == os.environ.get(SESSION)]


start = Start()


MULTIRUN = ("-m", "--multirun")
_SHOW = ("--cfg", "-c", "--info", "-i")
_OPTIONS = (*MULTIRUN, *_SHOW, "--resolve", "--hydra-help")


def run_jobs(
    argv: Sequence[str],
    job: Callable[[object], float],
    *,
    listed: Sequence[Sequence[str]] | None = None,
    show: Callable[[Path], object] = lambda folder: None,
) -> tuple[int, list[str]]:
    """Run one job, or a sweep. Return the largest exit code, and the keys of the planned jobs of a sweep.

    job: a top-level function, which launchers import in other processes; `HydraJob.running` reads its argument. listed:
    overrides of each job, instead of a sweeper's combinations of argv. show: called with the folder of a sweep with
    results.
    """
    for word in argv:
        if word.startswith("-") and (word.partition("=")[0] if word.startswith("--") else word) not in _OPTIONS:
            raise ConfigError(f"there is no option {printable(word[:80])}; gnnpar train has {', '.join(_OPTIONS)}")
    search_installed()
    given = expand_shorthands(argv)
    refuse_unclear(given)
    multirun = listed is not None or any(flag in argv for flag in MULTIRUN)
    if multirun:
        with hydra_errors(argv):
            given = per_job(given)
    codes: list[int] = []
    raised: list[BaseException] = []

    def single(config: object) -> None:
        try:
            codes.append(int(job(config)))
        except BaseException as error:  # `hydra_errors` would treat it as Hydra's
            raised.append(error)

    main: Hydras = hydra.main(version_base="1.3", config_path=str(conf_dir()), config_name=CONFIG)
    application: Callable[[], None] = main(job if multirun else single)
    overrides = [word for word in given if not word.startswith("-") and ("=" in word or word.startswith(("+", "~")))]
    options = [word for word in given if word not in overrides]  # argparse needs consecutive overrides
    options += ["all"] if options[-1:] in (["--info"], ["-i"]) else []  # otherwise an override would be their argument
    quiet = ["hydra/job_logging=none", "hydra/hydra_logging=none"]
    before, sys.argv = sys.argv, ["gnnpar train", *options, *overrides, *quiet]
    try:
        with hydra_errors(argv):
            if multirun:
                return _sweep(application, listed, argv, show)
            application()
    finally:
        sys.argv = before
    for error in raised:
        raise error
    return max(codes, default=0), []


def _sweep(
    application: Callable[[], None],
    listed: Sequence[Sequence[str]] | None,
    argv: Sequence[str],
    show: Callable[[Path], object],
) -> tuple[int, list[str]]:
    global start
    with ExitStack() as inside, environment(**{SESSION: os.environ.get(SESSION) or uuid.uuid4().hex[:12]}):
        start = Start(listed=listed, inside=inside)
        try:
            application()
        except KeyboardInterrupt:
            inside.close()
            if start.jobs():
                _close(show)
            raise
        finally:
            os.environ.pop(AT_ONCE, None)
            os.environ.pop(SWEEP, None)
        inside.close()
        if not start.jobs():
            raise ConfigError(f"{' '.join(argv)}: the sweep has no job; a glob or a range is empty")
        return _close(show), start.keys


def _close(show: Callable[[Path], object]) -> int:
    """Print the states of the jobs. Return 0 if all are done, 2 if a wrong configuration stopped all, else 1."""
    assert start.folder is not None
    jobs = start.jobs()
    states = {job.folder: job.state() for job in jobs}
    if start.listed is None and any(state == "done" for state, _ in states.values()):
        show(start.folder)
    folder, names = one_line(os.path.relpath(start.folder)), titles(jobs)
    say(f"sweep: {in_words(count([state for state, _ in states.values()]))}  ->  {folder}")
    for name, (state, why) in states.items():
        if state != "done":
            say(f"  {folder}/{name} {state}{why and ': ' + why}  ({names[name]})")
    if all(state == "done" for state, _ in states.values()):
        return 0
    where = "" if start.listed is not None else f" with hydra.sweep.dir={folder}"
    say(f"  the same command again{where} runs what is missing")
    return 2 if all(job.refused for job in jobs) else 1


def without_folders(argv: Sequence[str], rank: int) -> list[str]:
    """Return a joined rank's arguments: one job; a folder on rank 0 only, the same after a restart by torchrun."""
    if any(flag in argv for flag in MULTIRUN):
        raise ConfigError(
            "a sweep (-m) starts its own ranks and cannot join those of torchrun; start one job at a time"
        )
    if rank:
        return [*argv, "hydra.run.dir=."]
    restarts = os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0") != "0"
    if restarts and not any(a.lstrip("+").startswith("hydra.run.dir=") for a in argv):
        import psutil

        began = time.localtime(psutil.Process(os.getppid()).create_time())  # start of torchrun
        return [*argv, f"hydra.run.dir={time.strftime('outputs/%Y-%m-%d/%H-%M-%S', began)}"]
    return list(argv)


class Show(Callback):
    """Record the folder of a sweep and show its progress on a terminal."""

    def on_multirun_start(self, config: Hydras, **_: Hydras) -> None:
        start.folder = Path(str(config.hydra.sweep.dir)).absolute()
        os.environ[AT_ONCE] = str(num_concurrent_jobs(config, int(config.hydra.sweeper.get("n_jobs") or 1)))
        logging.getLogger("optuna").setLevel(logging.WARNING)
        start.inside.enter_context(shown(lambda: snapshot(start.jobs())))


def run_missing(arguments: list[str], config: Hydras, loader: Hydras, launcher: Hydras, at_once: int | None) -> None:
    """Run the jobs of a grid, or of a study, without a completed result. Compose every job before the first one starts;
    resume started ones from their last checkpoint."""
    folder = Path(str(config.hydra.sweep.dir)).absolute()
    with config_errors(), working_in(folder, remedy="choose another hydra.sweep.dir", say=say):
        OmegaConf.save(config, folder / "multirun.yaml")
        jobs = planned(listed(arguments, loader), folder, lambda job: loader.load_sweep_config(config, job))
        states: dict[str, State] = {job.key: job.state()[0] for job in jobs}
        todo = [job for job in jobs if states[job.key] not in ("done", "running")]
        counts = count(states.values())
        if counts.get("done") or counts.get("running"):
            running = f"{counts['running']} running elsewhere, " if counts.get("running") else ""
            say(f"resuming: {counts.get('done', 0)} of {len(jobs)} jobs are done, {running}{len(todo)} to run")
        chunk = at_once or len(todo) or 1
        for at in range(0, len(todo), chunk):
            launch(todo[at : at + chunk], launcher, config)


def listed(arguments: list[str], loader: Hydras) -> list[list[str]]:
    """Return the overrides of every job."""
    if start.listed is not None:
        return [expand_shorthands([*arguments, *job]) for job in start.listed]
    parsed = OverridesParser.create(config_loader=loader).parse_overrides(arguments)
    return [expand_shorthands(job) for job in BasicSweeper.split_arguments(parsed, None)[0]]


def planned(jobs: Sequence[list[str]], folder: Path, compose: Callable[[list[str]], Hydras]) -> list[Job]:
    """Return every job once, and write a job.json for each."""
    known = {job.key: job for job in jobs_below(folder)}
    mine: dict[str, Job] = {}
    with progress_lines(lambda: f"looking at {len(jobs):,} jobs before the first starts"):
        for overrides in jobs:
            with hydra_errors(overrides):
                job = plan(overrides, folder, known, compose(overrides))
            start.keys.append(job.key)
            known[job.key] = mine[job.key] = job
    for job in mine.values():
        job.save()
    return list(mine.values())


def plan(overrides: list[str], folder: Path, known: Mapping[str, Job], config: Hydras) -> Job:
    """Return the job of these overrides: a known one, or a new one in its own folder."""
    own = tuple(o for o in overrides if not o.startswith("hydra"))
    settings, names = resolved_for_key(config, config.hydra.runtime.choices, overrides)
    idle, session = unread(settings), os.environ.get(SESSION, "")
    key = job_key(settings, names, idle)
    if (same := known.get(key)) is not None:
        mine, earlier = (" ".join(o for o in each if group_of(o) in idle) for each in (own, same.overrides))
        if mine == earlier:
            return replace(same, overrides=own, session=session)
        line = f"{' '.join(own)}: its strategy does not read {mine}; its result is that of job {same.folder}"
        say(f"not trained again: {one_line(line)}")
        return replace(same, session=session)
    taken = {job.folder for job in known.values()}
    for number in range(len(known), len(known) + 1_000):
        with open_dict(config):
            config.hydra.job.num = number
        name = os.path.normpath(str(config.hydra.sweep.subdir))
        if name.startswith((".", "/")):
            raise ConfigError(f"hydra.sweep.subdir={name} must be a folder below that of the sweep")
        if name not in taken and not (folder / name).exists():
            return Job(folder, name, key, own, session)
    subdir = config.hydra.sweep.subdir
    raise ConfigError(f"hydra.sweep.subdir={subdir} is one folder for several jobs; put ${{hydra.job.num}} into it")


def launch(jobs: Sequence[Job], launcher: Hydras, config: Hydras) -> None:
    """Run jobs to their ends. If a process of the launcher is killed, restart the jobs that had not begun."""
    os.environ[AT_ONCE] = str(num_concurrent_jobs(config, len(jobs)))
    try:
        launcher.launch([_job_overrides(job) for job in jobs], initial_job_idx=0)
    except Exception as error:
        complain(f"a job was lost: {type(error).__name__} {error}")
        left = [job for job in jobs if (Job.read(job.run_dir) or job).started == job.started]
        if 0 < len(left) < len(jobs):
            launch(left, launcher, config)


def _job_overrides(job: Job) -> list[str]:
    goes_on = job.started is not None and start.listed is None and "resume" not in map(key_of, job.overrides)
    resume = ["resume=auto"] if goes_on else []
    return [*job.overrides, *resume, f"hydra.sweep.subdir={quoted(job.folder)}"]


def num_concurrent_jobs(config: Hydras, jobs: int) -> int:
    """Return how many of these jobs run on this machine at a time: one per process of the launcher."""
    kind = str(config.hydra.launcher._target_).lower()
    if "joblib" in kind:
        os.environ[SWEEP] = str(os.getpid())
        processes = int(config.hydra.launcher.get("n_jobs") or 1)
        return min(jobs, processes if processes > 0 else max(1, (os.cpu_count() or 1) + 1 + processes))
    return jobs if "submitit" in kind and "local" in kind else 1


def per_job(argv: Sequence[str]) -> list[str]:
    """Write keys of a swept group as choices of one value, as Hydra looks up other keys in the group's default. Raises
    ConfigError for more than MOST_RUNS jobs, or for equal jobs."""
    words = list(argv)
    try:
        parsed = OverridesParser.create().parse_overrides([a for a in argv if not a.startswith("-")])
    except OverrideParseException:  # Hydra reports it
        return words
    grids = [o for o in parsed if o.is_sweep_override() and o.is_discrete_sweep() and "glob(" not in str(o.input_line)]
    for o in grids:
        if o.key_or_group.partition(".")[0] in NOT_HASHED and o.key_or_group != "resume":
            raise ConfigError(
                f"{o.input_line}: a job is the same wherever its data lies, and whatever it keeps of a run; give each "
                "another hydra.sweep.dir"
            )
    jobs = math.prod(sum(1 for _ in itertools.islice(o.sweep_iterator(), MOST_RUNS + 1)) for o in grids)
    if jobs > MOST_RUNS:
        raise ConfigError(f"the sweep asks for more than {MOST_RUNS:,} jobs; give fewer values")
    swept = tuple(f"{o.key_or_group}." for o in parsed if o.is_sweep_override() and "." not in o.key_or_group)
    for o in parsed:
        plain = not (o.is_sweep_override() or o.is_add() or o.is_force_add() or o.is_delete())
        if plain and swept and o.key_or_group.startswith(swept):
            key, _, value = str(o.input_line).partition("=")
            words[words.index(str(o.input_line))] = f"{key}=choice({value})"
    return words
