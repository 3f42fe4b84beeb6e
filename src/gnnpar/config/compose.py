"""Hydra's entry point: compose once, in the parent, and hand Settings to the commands. Nothing else imports Hydra.

Hydra's own errors become one line that names the key, the value and what is allowed; its texts leak paths.
"""

from __future__ import annotations

import functools
import os
import re
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

from gnnpar.launch.slurm import rank_on_host
from gnnpar.paths import GROUP, conf_dir, installed_confs
from gnnpar.settings import ConfigError, Settings, build_settings, closest, show, unknown_key, with_plan
from gnnpar.track.console import complain_once
from gnnpar.training.shards import spelled, with_shards

COMMANDS = (
    "train",
    "partition",
    "plan",
    "estimate",
    "compare",
    "ablate",
    "status",
    "dashboard",
    "doctor",
    "check",
    "new",
    "cite",
    "export",
)
CONFIG = "config"
PLUGINS = {"hydra/launcher": ("joblib", "submitit_local", "submitit_slurm"), "hydra/sweeper": ("optuna",)}


def run(command: str, argv: list[str]) -> int:
    """One subcommand; its exit code. A wrong configuration is one line and 2."""
    os.environ["HYDRA_FULL_ERROR"] = "1"  # exceptions come to us instead of being printed and exited on
    sys.path.insert(0, os.getcwd())  # strategies and models in the user's own folder
    try:
        if command == "train":
            return train(argv)
        module: Any = import_module(f"gnnpar.cli.{command}")
        given: dict[str, tuple[Callable[..., Any], ...]] = {
            "check": (compose,),
            "partition": (composed,),
            "plan": (composed,),
            "estimate": (composed,),
            "cite": (composed,),
            "ablate": (composed, sweep),
        }
        return module.run(argv, *given.get(command, ()))
    except ValueError as error:
        if not is_user_error(error):
            raise
        return refuse(error)
    except KeyboardInterrupt:
        if any(thread.name.startswith("rank") for thread in threading.enumerate()):  # still in an epoch of minutes
            sys.stdout.flush()
            os._exit(1)
        return 1
    except Exception as error:
        if (line := hydra_line(error, argv)) is None:
            raise
        return refuse(ConfigError(line), error)


def refuse(error: Exception, cause: Exception | None = None) -> int:
    if os.environ.get("GNNPAR_TRACEBACK") == "1":
        traceback.print_exception(cause or error)
    complain_once(str(error), rank=rank_on_host())
    return 2


def is_user_error(error: ValueError) -> bool:
    """A ValueError raised by gnnpar says what to change; one from elsewhere is a defect and keeps its traceback."""
    return isinstance(error, ConfigError)


def train(argv: list[str]) -> int:
    """`gnnpar train`: a Hydra application. Returns the worst exit code of its jobs."""
    from gnnpar.config.sweep import resumed
    from gnnpar.launch.slurm import as_rank

    os.environ.update(as_rank(os.environ))
    joined = os.environ.get("RANK")
    argv = resumed(argv) if joined is None else without_folders(argv, rank=int(joined))
    return sweep(argv)


def sweep(argv: list[str], jobs: list[Sequence[str]] | None = None, keys: list[str] | None = None) -> int:
    """Hydra's application with these arguments: one job, a sweep, or the jobs that are listed; the worst exit code.

    keys: is given the key of each listed job.
    """
    import hydra

    from gnnpar.config.sweep import Sweep, per_job

    search_installed()
    codes: list[int] = []

    def one(config: Any) -> None:
        codes.append(job(config))

    multirun = jobs is not None or any(flag in argv for flag in ("-m", "--multirun"))
    task = job if multirun else one  # what launchers send to other processes must be found there by its name
    main: Any = hydra.main(version_base="1.3", config_path=str(conf_dir()), config_name=CONFIG)
    application: Callable[[], None] = main(task)
    argv, jobs = spelled(argv), None if jobs is None else [spelled(one) for one in jobs]
    run = Sweep(argv, jobs)
    before, given = sys.argv, per_job(argv) if multirun else argv
    sys.argv = ["gnnpar train", *given, "hydra/job_logging=none", "hydra/hydra_logging=none"]
    try:
        with run.through_hydra():
            application()
    except KeyboardInterrupt:
        run.close()
        raise
    except Exception as error:
        if not run.composing or (line := hydra_line(error, run.composing)) is None:
            raise
        raise ConfigError(line) from error  # of the job that has no such key, not of the defaults
    finally:
        sys.argv = before
    if keys is not None:
        keys += run.planned
    return max(codes) if codes else run.close()


def job(config: Any) -> int:
    """One Hydra job, also in a process that a launcher has started."""
    from gnnpar.cli.train import train_one

    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    return train_one(*compose_job(config))


def without_folders(argv: list[str], rank: int) -> list[str]:
    """Joined ranks: one job, and no folders but rank 0's, which is the same after a restart by torchrun."""
    if any(flag in argv for flag in ("-m", "--multirun")):
        raise ConfigError(
            "a sweep (-m) starts its own ranks and cannot join those of torchrun; start one job at a time"
        )
    if rank:
        return [*argv, "hydra.run.dir=."]
    restarts = os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0") != "0"
    if restarts and not any(a.lstrip("+").startswith("hydra.run.dir=") for a in argv):
        import psutil

        began = time.localtime(psutil.Process(os.getppid()).create_time())  # when torchrun was started
        return [*argv, time.strftime("hydra.run.dir=outputs/%Y-%m-%d/%H-%M-%S", began)]
    return argv


def compose_job(config: Any) -> tuple[Callable[[], Settings], Path, Mapping[str, Any]]:
    """(settings, folder, facts) of the running Hydra job. Settings are built late: their errors are the job's.

    facts["sweep"]: the sweep's folder, None outside of one.
    """
    from hydra.core.hydra_config import HydraConfig
    from omegaconf import OmegaConf

    job = HydraConfig.get()
    folder = Path(job.runtime.output_dir)
    sweep = str(job.mode).endswith("MULTIRUN")
    facts = {
        "sweep": Path(job.sweep.dir) if sweep else None,
        "title": f"run {folder.name}: {job.job.override_dirname.replace(',', ' ')}" if sweep else "",
        "overrides": list(job.overrides.task),
        "yaml": "",
    }
    names = {group: str(name) for group, name in job.runtime.choices.items() if not group.startswith("hydra")}
    study = "/".join(Path(job.sweep.dir).parts[-2:]) if sweep else ""

    def settings() -> Settings:
        facts["yaml"] = OmegaConf.to_yaml(config, resolve=True)
        resolved: Any = OmegaConf.to_container(config, resolve=True, throw_on_missing=True)
        given = with_shards(resolved, names, job.overrides.task)
        return build_settings(*with_plan(*given, job.overrides.task), study)

    return settings, folder, facts


def compose(overrides: Sequence[str]) -> Settings:
    """Settings for a list of overrides, without a Hydra application."""
    import hydra
    from omegaconf import OmegaConf

    search_installed()
    with hydra.initialize_config_dir(version_base="1.3", config_dir=str(conf_dir())):
        config = hydra.compose(CONFIG, overrides=spelled(overrides), return_hydra_config=True)
    names = {group: str(name) for group, name in config.hydra.runtime.choices.items() if not group.startswith("hydra")}
    keys = [str(key) for key in config if key != "hydra"]
    resolved: Any = OmegaConf.to_container(OmegaConf.masked_copy(config, keys), resolve=True)
    return build_settings(*with_shards(resolved, names, overrides))


def search_installed() -> None:
    """Hydra looks for YAML in what other packages bring, too: after gnnpar's own."""
    try:
        installed_confs()
    except ValueError as error:
        raise ConfigError(str(error)) from error
    _register_search_path()


@functools.cache
def _register_search_path() -> None:
    from hydra.core.config_search_path import ConfigSearchPath
    from hydra.core.plugins import Plugins
    from hydra.plugins.search_path_plugin import SearchPathPlugin

    class Installed(SearchPathPlugin):
        def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
            for folder in installed_confs():
                search_path.append(GROUP, f"file://{folder}")

    Plugins.instance().register(Installed)


def composed(overrides: Sequence[str]) -> Settings:
    """As compose; whatever is wrong is a ConfigError."""
    try:
        return compose(overrides)
    except Exception as error:
        if isinstance(error, ConfigError) or (line := hydra_line(error, overrides)) is None:
            raise
        raise ConfigError(line) from error


def hydra_line(error: Exception, argv: Sequence[str]) -> str | None:
    """One line for an exception of Hydra or OmegaConf; None for any other."""
    from hydra.errors import HydraException, MissingConfigException, OverrideParseException
    from omegaconf.errors import OmegaConfBaseException

    if not isinstance(error, (HydraException, OmegaConfBaseException)):
        return None
    text = " ".join(str(error).split()) or f"the configuration cannot be read: {' '.join(str(error.__cause__).split())}"
    if isinstance(error, MissingConfigException) and error.missing_cfg_file:
        group, _, option = str(error.missing_cfg_file).rpartition("/")
        if group in PLUGINS and option in PLUGINS[group]:
            return f"{group}: {option} is an extra; pip install 'gnnpar[{option.partition('_')[0]}]'"
        options = sorted(o for o in error.options or ())
        if not group:
            return f"there is no {option}"
        hint = closest(option, options)
        return f"{group}={option} does not exist{hint}; {group} can be {', '.join(options) or 'nothing'}"
    if isinstance(error, OverrideParseException):
        return f"{error.override} is no override; write key=value, +key=value to add a key, group=option to choose"
    if found := re.search(r"Could not override '([^']+)'", text):
        return no_such_key(found[1], argv)
    if found := re.search(r"Could not append to config\. An item is already at '([^']+)'", text):
        return f"{found[1]} is there already; write it without +"
    if found := re.search(r"[Ii]n '[^']*': Could not find '([^']+)'|You must specify '([^']+)'", text):
        return f"{found[1] or found[2]} does not exist"
    return re.sub(r"\S*/(conf|site-packages)/\S*", "the configuration", text)


def no_such_key(key: str, argv: Sequence[str]) -> str:
    """The line for an override of a key that is not there, with the keys that are."""
    value = next((a.partition("=")[2] for a in argv if a.partition("=")[0].lstrip("+~") == key), "")
    parent = key.rpartition(".")[0]
    try:
        import hydra
        from omegaconf import OmegaConf

        rest = [a for a in argv if "=" in a and "," not in a and a.partition("=")[0] != key and "hydra" not in a]
        with hydra.initialize_config_dir(version_base="1.3", config_dir=str(conf_dir())):
            node = (
                OmegaConf.select(hydra.compose(CONFIG, overrides=rest), parent)
                if parent
                else hydra.compose(CONFIG, rest)
            )
        return unknown_key(key, value, map(str, node or ()))
    except Exception:
        return f"unknown key {key}={show(value)}"
