"""Sweeps: what Hydra's launchers are given to run, and what they need not run again.

Whatever launcher is configured, it is wrapped here: planned jobs go into sweep.json first, jobs whose completed result
is in the folder are left out, and a job that fails, in whatever way, ends neither the sweep nor the sweeper.
"""

from __future__ import annotations

import errno
import importlib
import logging
import math
import os
import re
import shlex
import signal
import stat
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import chdir, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import yaml

from gnnpar.config.compose import NO_OTHER_FOLDER, refuse_led_away, resolved
from gnnpar.config.inputs import spelled
from gnnpar.config.jobs import (
    NOT_HASHED,
    Job,
    Manifest,
    State,
    alone_in,
    count,
    in_words,
    is_inside,
    job_key,
    read_record,
    snapshot,
    unread,
)
from gnnpar.config.replay import PARAMS, Replay, asked, quoted
from gnnpar.config.study import MOST_RUNS, key_of, plain_yaml
from gnnpar.config.submitit_jobs import is_submitit, place_of_results, results_apart
from gnnpar.durable import JsonObject, WriteError, make_folder_for_work, refuse_links_below
from gnnpar.paths import conf_dir, expanded
from gnnpar.settings import ConfigError
from gnnpar.targets import given_to_own_classes
from gnnpar.track.console import complain, say
from gnnpar.track.keys import goodness
from gnnpar.track.progress import shown
from gnnpar.track.text import counted, one_line
from gnnpar.training.result.result import valid_result

SWEEP = "GNNPAR_SWEEP"
"""The environment variable that names the sweep's process to its jobs'."""
OF_JOBS = ("GNNPAR_JOBS_AT_ONCE", "GNNPAR_SESSION")
"""Those that its jobs know, however they are started."""
Overrides = Sequence[str]
Hydras = Any  # Hydra hands its objects to launchers and sweepers without types
_SETTLE_SECONDS = 15.0  # how long a job that a launcher has lost may take to show that it runs


@dataclass
class Sweep:
    """One start of a sweep. `listed`: the jobs themselves, for a study; None: those the sweeper makes of argv.

    `show`: called with the folder of a sweep of argv that has results. `check`: of jobs that a file lists, with what a
    job resolves to and its overrides, before any job starts; it raises where one must not run.
    """

    argv: list[str]
    listed: Sequence[Overrides] | None = None
    show: Callable[[Path], object] = lambda folder: None
    replay: Replay | None = None
    check: Callable[[JsonObject, Overrides], None] | None = None
    folder: Path | None = None  # known once the launcher is there
    keys: list[str] = field(default_factory=list)  # of its jobs, each once
    planned: list[str] = field(default_factory=list)  # as they were asked for, in that order
    composing: Overrides = ()  # the job that is being planned
    asked: dict[str, Overrides] = field(default_factory=dict)  # key -> what it was first asked for with, in this start
    changed: dict[str, str] = field(default_factory=dict)  # key -> what it reads that was written after it had begun

    @contextmanager
    def through_hydra(self) -> Iterator[None]:
        """Inside, Hydra makes its sweeper and launcher as configured, and gets them wrapped."""
        from hydra.core.plugins import Plugins

        make_sweeper, make_launcher = Plugins.instantiate_sweeper, Plugins.instantiate_launcher

        def sweeper(plugins: Hydras, **given: Hydras) -> Hydras:
            folder = Path(str(given["config"].hydra.sweep.dir))
            refuse_led_away(folder, given["config"].hydra.overrides.hydra)
            if self.listed is not None:
                return Listed(launcher(plugins, **given), self.listed)
            if given["config"].hydra.sweeper is None or given["config"].hydra.launcher is None:
                raise ConfigError(
                    "hydra.sweeper and hydra.launcher of a sweep cannot be null: name one, or leave them out"
                )
            make_folder_for_work(folder)
            for name in ("multirun.yaml", "optimization_results.yaml"):  # which Hydra, or optuna's sweeper, writes
                _make_way(folder / name)
            if "optuna" in str(given["config"].hydra.sweeper._target_):
                _import_optuna()
            made: Hydras = make_sweeper(plugins, **given)
            logging.getLogger("optuna").setLevel(logging.WARNING)
            if type(made).__name__ == "BasicSweeper":  # by name: Hydra loads its plugins' modules a second time
                made.launcher.at_once, made.max_batch_size = made.max_batch_size, None  # all are planned at the start,
                made.validate_batch_is_legal = lambda batch: None  # which also says of which job a key is wrong
            return made

        def launcher(plugins: Hydras, **given: Hydras) -> Hydras:
            return Resuming(make_launcher(plugins, **given), self, **given)

        Plugins.instantiate_sweeper, Plugins.instantiate_launcher = sweeper, launcher  # type: ignore[method-assign]
        try:
            yield
        finally:
            Plugins.instantiate_sweeper, Plugins.instantiate_launcher = make_sweeper, make_launcher

    def exit_code(self, states: Mapping[str, tuple[State, str]]) -> int:
        """0: all done; 2: no job could start, its configuration is wrong; else 1."""
        if all(state == "done" for state, _ in states.values()):
            return 0
        manifest = self.manifest()
        records = [read_record(manifest.folder / manifest.jobs[key].folder) for key in self.keys]
        return 2 if all((record or {}).get("refused") for record in records) else 1

    def manifest(self) -> Manifest:
        assert self.folder is not None
        return Manifest.read(self.folder)

    def close(self) -> int:
        """What became of the jobs, failed ones with their reason, and the table; the exit code."""
        if self.folder is None or not self.keys:
            return 0
        manifest = self.manifest()
        states = manifest.states(self.keys)
        if self.listed is None and any(state == "done" for state, _ in states.values()):
            self.show(self.folder)
        self.report(manifest, states)
        return self.exit_code(states) or self.of_other_starts(manifest)

    def of_other_starts(self, manifest: Manifest) -> int:
        """1, with a line, where a sweep that is resumed by its folder lacks jobs that its last command did not name."""
        others = [] if self.replay is None else [key for key in manifest.jobs if key not in self.keys]
        left = [key for key, (state, _) in manifest.states(others).items() if state != "done"] if others else []
        if left:
            say(f"  {counted(len(left), 'job')} of earlier commands in this folder not done: give those commands again")
        return int(bool(left))

    def report(self, manifest: Manifest, states: Mapping[str, tuple[State, str]]) -> None:
        folder = one_line(os.path.relpath(manifest.folder))
        say(f"sweep: {in_words(count(states))}  ->  {folder}")
        for key, (state, why) in states.items():
            if state != "done":
                say(f"  {folder}/{manifest.jobs[key].folder} {state}{why and ': ' + why}  ({manifest.title(key)})")
        if any(state != "done" for state, _ in states.values()):
            say("  the same command again runs what is missing" + resume_line(self, os.path.relpath(manifest.folder)))


def _changed_since(settings: JsonObject, run_dir: Path) -> str | None:
    """What a job reads, and that is another one than it was at its start, or of after that: by its settings, which name
    it, it is the same job."""
    if (record := read_record(run_dir)) is None:
        return None
    now, before = _reads(settings, Path.cwd()), dict[str, tuple[Path, Path]]()
    with suppress(OSError, ValueError, yaml.YAMLError):
        if isinstance(of_then := plain_yaml(run_dir / "config.yaml"), Mapping) and "cwd" in record:
            before = _reads(of_then, Path(str(record["cwd"])))
    for key, (place, named) in now.items():
        if max(_changed(place), _turned(named)) > record["started"] or before.get(key, (place, named))[0] != place:
            return str(place)
    return None


def _turned(named: Path) -> float:
    """When a link on the way to a file was made last: it may have led elsewhere before."""
    newest = 0.0
    for place in (named, *named.parents):
        with suppress(OSError):
            if place.is_symlink():
                newest = max(newest, place.lstat().st_ctime)
    return newest


def _reads(settings: JsonObject, here: Path) -> dict[str, tuple[Path, Path]]:
    """Key -> the file or folder that settings name with it, where that is there, as seen from a working directory, and
    how it is named. What a class of the user's is made with may name one."""
    from gnnpar.data.files import find_folder

    found = {key: settings.get(key) for key in ("plan", "profile", "resume")}
    dataset, given = settings.get("dataset"), settings.get("data_dir")
    data_dir = None if given is None else here / expanded(str(given))
    if isinstance(dataset, Mapping) and dataset.get("path") is None and data_dir is not None:
        with suppress(ValueError):  # which the job says
            found["data_dir"] = find_folder(data_dir, str(dataset.get("name")))
    for group, key in (("dataset", "path"), ("shards", "folder")):
        named = settings.get(group)
        found[group] = named.get(key) if isinstance(named, Mapping) else None
    found |= given_to_own_classes(settings)
    places = dict[str, tuple[Path, Path]]()
    for key, path in found.items():
        for place in (here / str(path), (data_dir or here) / str(path)) if path not in (None, "auto") else ():
            with suppress(ValueError, OSError):
                if place.exists() and not here.is_relative_to(os.path.realpath(place)):  # where results are written
                    places.setdefault(key, (Path(os.path.realpath(place)), place.absolute()))
    return places


_MOST_FILES = 10_000


def _changed(place: Path) -> float:
    """When anything there, also behind links, was changed last. Whoever puts another file in its place may keep its
    time of writing (tar, mv), but not that of the change."""
    newest, looked, seen, pending = 0.0, 0, set[tuple[int, int]](), [place]
    while pending and (looked := looked + 1) < _MOST_FILES:  # a link may lead to the root
        here = pending.pop()
        with suppress(OSError):
            link, there = here.lstat(), here.stat()
            newest = max(newest, link.st_ctime, there.st_mtime, there.st_ctime)
            if stat.S_ISDIR(there.st_mode) and (inode := (there.st_dev, there.st_ino)) not in seen:
                seen.add(inode)
                pending += here.iterdir()
    return newest


def resume_line(sweep: Sweep, folder: str) -> str:
    return "" if sweep.listed is not None else f"; so does gnnpar train --resume {shlex.quote(folder)}"


_TELL_SECONDS = 10.0


class Listed:
    """A sweeper whose jobs are listed."""

    def __init__(self, launcher: Resuming, jobs: Sequence[Overrides]) -> None:
        self.launcher, self.jobs = launcher, jobs

    def sweep(self, arguments: list[str]) -> None:
        self.launcher.launch([[*arguments, *job] for job in self.jobs], initial_job_idx=0)


class Resuming:
    """A launcher that hands on what has no completed result yet, `at_once` jobs at a time (None: all)."""

    def __init__(
        self,
        inner: Hydras,
        sweep: Sweep,
        *,
        hydra_context: Hydras,
        config: Hydras,
        at_once: int | None = None,
        **_: Hydras,
    ) -> None:
        self.inner, self.sweep, self.at_once = inner, sweep, at_once
        self.loader, self.config = hydra_context.config_loader, config
        self.raises = "basic_sweeper" not in str(config.hydra.sweeper._target_)  # sweepers that learn from failures

    def launch(self, job_overrides: Sequence[Overrides], initial_job_idx: int) -> list[Hydras]:
        """What Hydra's sweepers call; one JobReturn a job, whose value is the best validation metric."""
        folder = Path(str(self.config.hydra.sweep.dir))
        self.sweep.folder = folder
        job_overrides = [spelled(each) for each in job_overrides]
        with alone_in(folder):
            if is_submitit(self.inner):
                place_of_results(self.inner, folder)
            manifest = Manifest.read(folder)
            manifest.argv = asked(self.sweep.argv)
            jobs = self.planned(job_overrides, manifest)
            manifest.save()
            self.sweep.planned += [job.key for job in jobs]
            self.sweep.keys += [job.key for job in jobs if job.key not in self.sweep.keys]
            todo = self.missing(manifest, jobs)
            with session(), shown(lambda: snapshot(manifest, [job.key for job in jobs])):
                chunk = self.at_once or len(todo) or 1
                for start in range(0, len(todo), chunk):
                    self.start(manifest, todo[start : start + chunk])
        return [self.returned(manifest, job) for job in jobs]

    def planned(self, job_overrides: Sequence[Overrides], manifest: Manifest) -> list[Job]:
        """All of them; a line where that takes long: a file may ask for many."""
        jobs: list[Job] = []
        told = time.monotonic()
        for overrides in job_overrides:
            if time.monotonic() - told > _TELL_SECONDS:
                told = time.monotonic()
                complain(f"{len(jobs):,} of {len(job_overrides):,} jobs are looked at before the first starts")
            jobs.append(self.plan(overrides, manifest))
        return jobs

    def plan(self, overrides: Overrides, manifest: Manifest) -> Job:
        """The job of these overrides: the one that is planned already, or a new one in a folder of its own."""
        from omegaconf import open_dict
        from omegaconf.errors import OmegaConfBaseException

        self.sweep.composing = overrides
        config = self.loader.load_sweep_config(self.config, list(overrides))
        self.sweep.composing = ()
        if config.hydra.output_subdir is not None:
            raise ConfigError("hydra.output_subdir must be null: a run writes its config.yaml itself")
        if config.hydra.job.chdir:
            raise ConfigError(f"hydra.job.chdir: {NO_OTHER_FOLDER}")
        choices = {str(group): name for group, name in config.hydra.runtime.choices.items()}
        shown = tuple(o for o in overrides if not o.startswith("hydra"))
        if self.sweep.replay is not None:
            self.sweep.replay.check_choices(choices, overrides)
        try:
            settings, names = resolved(config, choices, overrides)
        except (ValueError, OmegaConfBaseException) as error:  # the job reports it
            if self.sweep.check is not None and isinstance(error, OmegaConfBaseException):
                line = f"the classes of a job are not known before it runs: {' '.join(str(error).split())}"
                raise ConfigError(f"{' '.join(shown)}: {line}") from error
            names = {group: str(name) for group, name in choices.items() if not group.startswith("hydra")}
            settings = {"overrides": list(overrides)}
        if self.sweep.check is not None:
            self.sweep.check(settings, overrides)
        key = job_key(settings, names)
        _refuse_others(shown, self.sweep.asked.setdefault(key, shown))
        idle = unread(settings)
        kept = {group: name for group, name in names.items() if group not in idle}
        reads = job_key({k: v for k, v in settings.items() if k not in idle}, kept)
        twin = next((job for job in manifest.jobs.values() if job.reads == reads), None)
        if twin is not None and key not in manifest.jobs:
            own = " ".join(o for o in shown if re.split("[./@=]", key_of(o))[0] in idle)
            line = f"{' '.join(shown)}: its strategy does not read {own}; its result is that of job {twin.folder}"
            say(f"not trained again: {one_line(line)}")
            key = twin.key
        if key in manifest.jobs:
            refuse_links_below(manifest.folder, manifest.jobs[key].folder)
            before = manifest.folder / manifest.jobs[key].folder
            if what := _changed_since(settings, before):
                self.sweep.changed[key] = what
            return replace(manifest.jobs[key], overrides=shown)  # not those of the file: they were not looked at
        taken = {job.folder for job in manifest.jobs.values()}
        for number in range(len(manifest.jobs), len(manifest.jobs) + 1_000):
            with open_dict(config):
                config.hydra.job.num = number
            name = str(config.hydra.sweep.subdir)
            if not is_inside(name):
                raise ConfigError(f"hydra.sweep.subdir={name} must be a folder below that of the sweep")
            refuse_links_below(manifest.folder, name)
            if name not in taken and not (manifest.folder / name / "result.json").exists():
                return manifest.jobs.setdefault(key, Job(key, name, shown, reads))
        subdir = config.hydra.sweep.subdir
        raise ConfigError(f"hydra.sweep.subdir={subdir} is one folder for several jobs; put ${{hydra.job.num}} into it")

    def missing(self, manifest: Manifest, jobs: Sequence[Job]) -> list[tuple[Job, Overrides]]:
        """The jobs to run, each once, with the overrides that put them into their folders."""
        unique = {job.key: job for job in reversed(jobs)}  # of one that is asked for twice, the first
        unique = {job.key: unique[job.key] for job in jobs}
        states = manifest.states(list(unique))
        again = self.sweep.replay.again if self.sweep.replay else frozenset[str]()
        finished = {key for key in unique if states[key][0] == "done" and unique[key].folder not in again}
        todo = [job for key, job in unique.items() if key not in finished and states[key][0] != "running"]
        counts = count(states)
        if not self.raises and (counts.get("done") or counts.get("running")):
            running = f"{counts['running']} running elsewhere, " if counts.get("running") else ""
            say(f"resuming: {counts.get('done', 0)} of {len(unique)} jobs are done, {running}{len(todo)} to run")
        for what in sorted({self.sweep.changed[key] for key in finished if key in self.sweep.changed}):
            say(f"{one_line(what)} has changed since jobs that are done: another hydra.sweep.dir runs them again")
        goes_on = [] if self.sweep.replay is None else ["resume=auto"]  # inside a job that is half done
        own = {job.key for job in todo if "resume" in map(key_of, job.overrides)}
        how = {j.key: ["resume=null"] if j.folder in again else [] if j.key in own else goes_on for j in todo}
        places = {job.key: "hydra.sweep.subdir=" + quoted(job.folder) for job in todo}
        return [(job, [*job.overrides, *how[job.key], places[job.key]]) for job in todo]

    def start(self, manifest: Manifest, jobs: Sequence[tuple[Job, Overrides]]) -> None:
        """Run some jobs to their ends. Where a launcher loses one (killed, out of memory), joblib ends those beside it
        as well; those that had not begun are run."""
        try:
            at_once = str(self.beside_each_other(len(jobs)))
            mine = inherited(SWEEP, str(os.getpid())) if self.in_processes_of_mine else nullcontext()
            with (
                inherited("GNNPAR_JOBS_AT_ONCE", at_once),
                mine,
                results_apart(self.inner, manifest.folder, known=OF_JOBS),
            ):
                self.inner.launch([overrides for _, overrides in jobs], initial_job_idx=0)
        except Exception as error:
            complain(f"a job was lost: {type(error).__name__} {error}")
            keys = [job.key for job, _ in jobs]
            settle(manifest, keys)
            states = manifest.states(keys)
            left = [(job, overrides) for job, overrides in jobs if states[job.key][0] == "missing"]
            if self.in_processes_of_mine and 0 < len(left) < len(jobs):
                self.start(manifest, left)

    def beside_each_other(self, jobs: int) -> int:
        """Of so many jobs, those that run on this machine at a time: as many as a launcher has processes."""
        launcher = self.config.hydra.launcher
        kind = str(launcher.get("_target_", "")).lower()
        if self.in_processes_of_mine:
            processes = int(launcher.get("n_jobs") or 1)
            return min(jobs, processes if processes > 0 else max(1, (os.cpu_count() or 1) + 1 + processes))
        return jobs if "submitit" in kind and "local" in kind else 1

    @property
    def in_processes_of_mine(self) -> bool:
        """Whether the launcher's jobs run in processes that end with this one; those of others outlive it."""
        return "joblib" in str(self.config.hydra.launcher.get("_target_", "")).lower()

    def returned(self, manifest: Manifest, job: Job) -> Hydras:
        """A job's end as Hydra's sweepers know it."""
        from hydra.core.utils import JobReturn, JobStatus

        run_dir = manifest.folder / job.folder
        state, why = manifest.states([job.key])[job.key]
        end = JobReturn(overrides=job.overrides, working_dir=str(run_dir), status=JobStatus.COMPLETED)
        if state == "done":
            result = valid_result(run_dir) or {}
            best, name = result["metric"]["best_val"], result["metric"]["name"]
            end.return_value = math.nan if best is None else goodness(name, best)
        elif self.raises:
            end.status, end.return_value = JobStatus.FAILED, RuntimeError(f"{state}: {why}")
        return end


def _import_optuna() -> None:
    """It imports matplotlib, which evaluates a matplotlibrc of the working directory, and would remove a folder of its
    own when this process ends, after that of all temporary files is gone."""
    if not os.access(os.path.expanduser("~/.config"), os.W_OK):
        os.environ.setdefault("MPLCONFIGDIR", tempfile.gettempdir())
    with suppress(ImportError), chdir(conf_dir()):
        importlib.import_module("optuna")


def _refuse_others(mine: Overrides, planned: Overrides) -> None:
    """ConfigError where two jobs of one start differ in the places of their data, checkpoints and records alone: they
    are the same, since data may be moved until a sweep is resumed, and would run once."""
    own, other = ({o for o in some if re.split("[./@=]", key_of(o))[0] in NOT_HASHED} for some in (mine, planned))
    if own != other:
        a, b = (" ".join(sorted(these)) or "nothing of that" for these in (own - other, other - own))
        raise ConfigError(
            f"{a} and {b} in one sweep: a job is the same wherever its data lies, and whatever it keeps of a run; give "
            "each another hydra.sweep.dir"
        )


def _make_way(file: Path) -> None:
    """Before somebody writes it who writes through links, or waits for a pipe: in a folder of somebody else's it may be
    one, or a second name of another file. WriteError where it is a folder."""
    with suppress(FileNotFoundError):
        there = file.lstat()
        if stat.S_ISDIR(there.st_mode):
            raise WriteError(errno.EISDIR, "it is a folder; rename it", str(file))
        if not stat.S_ISREG(there.st_mode) or there.st_nlink > 1:
            file.unlink()


def per_job(argv: Sequence[str]) -> list[str]:
    """Keys of a group that is swept become values of each job, `strategy.chunks=8` a choice of one: before there are
    jobs, Hydra looks for every other key in the group's default, which need not have it."""
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.errors import OverrideParseException

    words = list(argv)
    try:
        parsed = OverridesParser.create().parse_overrides([a for a in argv if not a.startswith("-")])
    except OverrideParseException:  # Hydra says so itself
        return words
    _refuse_too_many(parsed)
    if any(o.key_or_group == "hydra/sweeper/sampler" and o.value() == "grid" for o in parsed):
        _refuse_intervals([*parsed, *_of_sweeper(parsed)])
    swept = tuple(f"{o.key_or_group}." for o in parsed if o.is_sweep_override() and "." not in o.key_or_group)
    for o in parsed:
        plain = not (o.is_sweep_override() or o.is_add() or o.is_force_add() or o.is_delete())
        if plain and swept and o.key_or_group.startswith(swept):
            key, _, value = str(o.input_line).partition("=")
            words[words.index(str(o.input_line))] = f"{key}=choice({value})"
    return words


def _refuse_too_many(parsed: Sequence[Hydras]) -> None:
    """ConfigError where overrides ask for more jobs than anybody waits for: Hydra lists all before the first."""
    asked = math.prod(_choices(o.value()) for o in [*parsed, *_of_sweeper(parsed)])
    if asked > MOST_RUNS:
        raise ConfigError(f"the sweep asks for {asked:,} jobs, at most {MOST_RUNS:,} are listed; give fewer values")


def _refuse_intervals(parsed: Sequence[Hydras]) -> None:
    """ConfigError: optuna's grid makes a list of all whole numbers of one, and has none for others."""
    from hydra.core.override_parser.types import IntervalSweep

    for o in parsed:
        if isinstance(o.value(), IntervalSweep):
            raise ConfigError(f"{o.input_line}: a grid has no intervals; give choice(...) or range(...)")


def _of_sweeper(parsed: Sequence[Hydras]) -> list[Hydras]:
    """What a sweeper makes sweeps of, `hydra.sweeper.params.KEY='VALUES'`, as overrides."""
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.errors import OverrideParseException

    given = [(o.key_or_group.removeprefix(PARAMS), o.value()) for o in parsed if o.key_or_group.startswith(PARAMS)]
    params = [f"{key}={value}" for key, value in given if isinstance(value, str)]
    with suppress(OverrideParseException):  # the sweeper says so itself
        return list(OverridesParser.create().parse_overrides(params))
    return []


def _choices(value: Hydras) -> int:
    """How many values a swept key takes; 1 of a key that is not swept, or of an interval."""
    from hydra.core.override_parser.types import ChoiceSweep, RangeSweep

    if isinstance(value, RangeSweep):
        try:
            start, stop, step = (float(end or 0) for end in (value.start, value.stop, value.step))
            count = (stop - start) / step if step else math.inf
        except OverflowError:  # of whole numbers beyond floats
            count = math.inf
        return max(0, math.ceil(count)) if math.isfinite(count) else MOST_RUNS + 1
    if isinstance(value, ChoiceSweep):
        return sum(_choices(each) for each in value.list)
    return 1


def settle(manifest: Manifest, keys: Sequence[str]) -> None:
    """Wait until none of these jobs runs any more."""
    deadline = time.monotonic() + _SETTLE_SECONDS
    while True:
        states = [state for state, _ in manifest.states(keys).values()]
        if "running" not in states and ("missing" not in states or time.monotonic() > deadline):
            return
        time.sleep(0.5)


@contextmanager
def session() -> Iterator[None]:
    """All jobs started inside carry one session in result.json."""
    with inherited("GNNPAR_SESSION", uuid.uuid4().hex[:12]):
        yield


@contextmanager
def with_its_sweep() -> Iterator[None]:
    """A job in a process that the sweep's has started: it ends in order where that ends, and its process with it."""
    parent, sweep = os.getppid(), os.environ.get(SWEEP, "")
    if sweep != str(parent):
        if sweep.isdecimal() and _has_ended(int(sweep)):
            complain("the sweep of this job ended while it began")
            os._exit(1)
        yield
        return
    from gnnpar.launch.forked import hear_of_its_end

    hear_of_its_end(parent, signal.SIGTERM)
    try:
        yield
    finally:
        if os.getppid() != parent:
            os._exit(1)


def _has_ended(process: int) -> bool:
    import psutil

    try:
        return psutil.Process(process).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


@contextmanager
def inherited(name: str, value: str) -> Iterator[None]:
    """An environment variable that jobs inherit, unless it is set already: by a sweep around this one."""
    if name in os.environ:
        yield
        return
    os.environ[name] = value
    try:
        yield
    finally:
        del os.environ[name]
