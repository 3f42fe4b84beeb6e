"""Hydra's application: one job, a sweep, or jobs that are listed."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from gnnpar.config.compose import (
    NO_OTHER_FOLDER,
    named_folders,
    names_folder,
    refuse_led_away,
    search_installed,
)
from gnnpar.config.errors import CONFIG, hydra_line
from gnnpar.config.inputs import spelled
from gnnpar.config.replay import FLAGS, Replay
from gnnpar.config.sweep import Overrides, Sweep, per_job
from gnnpar.durable import JsonObject, refuse_link_of_others
from gnnpar.paths import conf_dir
from gnnpar.settings import ConfigError
from gnnpar.targets import fenced
from gnnpar.track.text import printable


def run_jobs(
    argv: Sequence[str],
    job: Callable[[object], int],
    *,
    listed: Sequence[Overrides] | None = None,
    show: Callable[[Path], object] = lambda folder: None,
    replay: Replay | None = None,
    check: Callable[[JsonObject, Overrides], None] | None = None,
) -> tuple[int, list[str]]:
    """The worst exit code of the jobs, and their keys in sweep.json; no keys outside of a sweep.

    `job`: a function at the top of its module, which other processes import; Hydra calls it with a configuration, and
    `HydraJob.running` reads that. `listed`: the jobs, instead of those that a sweeper makes of argv. `show`: called
    with the folder of a sweep of argv that has results. `replay`: where argv comes from a file. `check`: of listed
    jobs, as in `Sweep`; with it, or a replay, no class is imported but trusted ones and those that it lets in.
    """
    import hydra

    for words in (argv, *(listed or ())):
        _refuse_other_options(words)
    if "${" in (here := os.getcwd()):
        raise ConfigError(f"{printable(here)}: Hydra would read ${{ in its name as a value of its own; run elsewhere")
    search_installed([word for words in (argv, *(listed or ())) for word in words])
    codes: list[int] = []

    def single(config: object) -> None:
        codes.append(job(config))

    multirun = listed is not None or any(flag in argv for flag in FLAGS)
    if names_folder(argv):  # Hydra makes the folder before a job can look
        for place in named_folders(argv):
            refuse_link_of_others(place)
    else:
        refuse_led_away(Path("multirun" if multirun else "outputs", time.strftime("%Y-%m-%d"), "run"), argv)
    shows = [argument for argument in argv if argument.partition("=")[0] in _SHOW]
    if shows and (multirun or len(shows) > 1):
        others = "-m, or --resume," if multirun else " ".join(shows[1:])
        raise ConfigError(f"{shows[0]} shows the configuration of one run; leave {others} out")
    main: Any = hydra.main(version_base="1.3", config_path=str(conf_dir()), config_name=CONFIG)  # Hydra's is untyped
    application: Callable[[], None] = main(job if multirun else single)
    argv, listed = spelled(argv), None if listed is None else [spelled(each) for each in listed]
    sweep = Sweep(argv, listed, show, replay, replay.check_settings if replay else check)
    before, given = sys.argv, per_job(argv) if multirun else argv
    given = [*given, "hydra/job_logging=none", "hydra/hydra_logging=none"]
    options = [argument for argument in given if not _is_override(argument)]  # argparse takes overrides in one row
    options += ["all"] if options[-1:] in (["--info"], ["-i"]) else []  # it would take one of them
    sys.argv = ["gnnpar train", *options, *filter(_is_override, given)]
    try:
        with fenced(of_file=True) if sweep.check else nullcontext(), sweep.through_hydra():
            application()
    except KeyboardInterrupt:
        sweep.close()
        raise
    except Exception as error:
        if not sweep.composing or (line := hydra_line(error, sweep.composing)) is None:
            raise
        raise ConfigError(line) from error  # of the job that has no such key, not of the defaults
    finally:
        sys.argv = before
    if multirun and not sweep.keys:
        raise ConfigError(f"{' '.join(argv)}: there is no job in this sweep; does a glob or a range hold nothing?")
    return (max(codes) if codes else sweep.close()), sweep.planned


_SHOW = ("--cfg", "-c", "--info", "-i")
_OPTIONS = (*FLAGS, *_SHOW, "--resolve", "--hydra-help")


def _refuse_other_options(argv: Sequence[str]) -> None:
    """Hydra has others, and takes all of them shortened, too: --experimental-rerun unpickles the file that it names,
    and --config-path and --config-dir compose YAML of any folder, as the config.yaml of somebody's run. Nor does Hydra
    write files of its own: through links, where a folder holds any."""
    for word in argv:
        key, _, value = word.lstrip("+").partition("=")
        if key == "hydra.output_subdir" and value != "null":
            raise ConfigError(f"{printable(word[:80])}: a run writes its config.yaml itself; leave it out")
        if key == "hydra.job.chdir" and value not in ("false", "False", "null"):
            raise ConfigError(f"{printable(word[:80])}: {NO_OTHER_FOLDER}")
        if word.startswith("-") and (word.partition("=")[0] if word.startswith("--") else word) not in _OPTIONS:
            raise ConfigError(f"there is no option {printable(word[:80])}; gnnpar train has {', '.join(_OPTIONS)}")
    if "--resolve" in argv and not any(word.partition("=")[0] in ("--cfg", "-c") for word in argv):
        raise ConfigError("--resolve says how --cfg job is shown: give both, or neither")


def _is_override(argument: str) -> bool:
    """key=value, +key=value, ~key; not an option of Hydra's or its value (--cfg job)."""
    return not argument.startswith("-") and ("=" in argument or argument.startswith(("+", "~")))


def without_folders(argv: Sequence[str], rank: int) -> list[str]:
    """Joined ranks: one job, and no folders but rank 0's, which is the same after a restart by torchrun."""
    if any(flag in argv for flag in FLAGS):
        raise ConfigError(
            "a sweep (-m) starts its own ranks and cannot join those of torchrun; start one job at a time"
        )
    if rank:
        return [*argv, "hydra.run.dir=."]
    restarts = os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0") != "0"
    if restarts and not any(a.lstrip("+").startswith("hydra.run.dir=") for a in argv):
        import psutil

        began = time.localtime(psutil.Process(os.getppid()).create_time())  # when torchrun was started
        folder = time.strftime("outputs/%Y-%m-%d/%H-%M-%S", began)
        refuse_led_away(Path(folder), ())  # which Hydra takes for a folder that was typed
        return [*argv, f"hydra.run.dir={folder}"]
    return list(argv)
