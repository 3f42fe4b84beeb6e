"""Hydra's application: one job, a sweep, or the jobs of a study."""

from __future__ import annotations

import os
import sys
import time
import uuid
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gnnpar.config.compose import refuse_unclear, search_installed
from gnnpar.config.errors import CONFIG, hydra_errors
from gnnpar.config.inputs import expand_shorthands
from gnnpar.config.jobs import AT_ONCE, SESSION, SWEEP, count, in_words, titles
from gnnpar.launch import environment
from gnnpar.paths import conf_dir
from gnnpar.settings import ConfigError
from gnnpar.track.console import say
from gnnpar.track.text import one_line, printable

if TYPE_CHECKING:
    from gnnpar.config.sweep import Start

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
    import hydra

    for word in argv:
        if word.startswith("-") and (word.partition("=")[0] if word.startswith("--") else word) not in _OPTIONS:
            raise ConfigError(f"there is no option {printable(word[:80])}; gnnpar train has {', '.join(_OPTIONS)}")
    search_installed()
    given = expand_shorthands(argv)
    refuse_unclear(given)
    multirun = listed is not None or any(flag in argv for flag in MULTIRUN)
    if multirun:
        from gnnpar.config.sweep import per_job

        with hydra_errors(argv):
            given = per_job(given)
    codes: list[int] = []
    raised: list[BaseException] = []

    def single(config: object) -> None:
        try:
            codes.append(int(job(config)))
        except BaseException as error:  # `hydra_errors` would treat it as Hydra's
            raised.append(error)

    main: Any = hydra.main(version_base="1.3", config_path=str(conf_dir()), config_name=CONFIG)  # Hydra's is untyped
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
    from gnnpar.config import sweep

    with ExitStack() as inside, environment(**{SESSION: os.environ.get(SESSION) or uuid.uuid4().hex[:12]}):
        start = sweep.start = sweep.Start(listed=listed, inside=inside)
        try:
            application()
        except KeyboardInterrupt:
            inside.close()
            if start.jobs():
                _close(start, show)
            raise
        finally:
            os.environ.pop(AT_ONCE, None)
            os.environ.pop(SWEEP, None)
        inside.close()
        if not start.jobs():
            raise ConfigError(f"{' '.join(argv)}: the sweep has no job; a glob or a range is empty")
        return _close(start, show), start.keys


def _close(start: Start, show: Callable[[Path], object]) -> int:
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
