"""Compose overrides into Settings; the only module that calls Hydra's compose."""

from __future__ import annotations

import functools
import json
import re
import string
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, cast

from gnnpar.config.errors import CONFIG, hydra_errors
from gnnpar.config.inputs import Composed, expand_shorthands, key_of, with_plan, with_shards
from gnnpar.config.jobs import job_key, unread
from gnnpar.files import JsonDict, JsonObject
from gnnpar.paths import GROUP, conf_dir, installed_confs, is_installed_group
from gnnpar.settings import ConfigError, Settings, build_settings, config_errors, iter_groups, show
from gnnpar.targets import refuse_foreign
from gnnpar.track.console import complain
from gnnpar.track.text import one_line, printable

if TYPE_CHECKING:
    from omegaconf import DictConfig

KEYS = frozenset(field.name for field in fields(Settings))
"""Top-level keys of the configuration."""


def compose(overrides: Sequence[str], check: Callable[[JsonObject], None] = lambda tree: None) -> Settings:
    """Return the settings of `gnnpar train` with these overrides. Raises ConfigError. check: called with the resolved
    configuration before any of its classes is imported."""
    refuse_unclear(expand_shorthands(overrides))
    config = composed(overrides)
    tree, names = resolved(config, config.hydra.runtime.choices, overrides)
    check(tree)
    return build_settings(tree, names)


def composed(overrides: Sequence[str]) -> DictConfig:
    """Compose overrides, with Hydra's own keys. Raises ConfigError."""
    import hydra

    search_installed()
    with hydra_errors(overrides), composing():
        return hydra.compose(CONFIG, overrides=expand_shorthands(overrides), return_hydra_config=True)


def without_hydra(config: DictConfig) -> DictConfig:
    """Return a copy without Hydra's own keys."""
    from omegaconf import OmegaConf

    return OmegaConf.masked_copy(config, [str(key) for key in config if key != "hydra"])


def chosen_files(overrides: Sequence[str]) -> object:
    """Return the configuration of the files that overrides choose by name, without the keys that they set."""
    named = (each for each in overrides if re.fullmatch(r"[\w./-]*", each.partition("=")[2]))  # no dictionary
    return _plain([each for each in named if is_group(_file_group(each))])


def _file_group(override: str) -> str:
    """Return the group of files that an override chooses from: model for model@other=gcn."""
    return key_of(override).partition("@")[0]


def _plain(overrides: Sequence[str]) -> object:
    """Compose overrides, without keys of Hydra. Leave references to missing keys unresolved."""
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    config = without_hydra(composed([each for each in overrides if not key_of(each).startswith("hydra")]))
    try:
        return OmegaConf.to_container(config, resolve=True)
    except OmegaConfBaseException:  # a reference to a key that other overrides set
        return OmegaConf.to_container(config, resolve=False)


@contextmanager
def composing() -> Iterator[None]:
    """Initialize Hydra with gnnpar's configuration; nests inside a running Hydra application. One thread at a time."""
    import hydra
    from hydra.core.global_hydra import GlobalHydra

    with _COMPOSING:
        running, GlobalHydra.instance().hydra = GlobalHydra.instance().hydra, None
        try:
            with hydra.initialize_config_dir(version_base="1.3", config_dir=str(conf_dir())):
                yield
        finally:
            GlobalHydra.instance().hydra = running  # a new instance: Hydra has replaced the other by a copy


_COMPOSING = threading.RLock()


def resolved(config: DictConfig, choices: Mapping[str, object], overrides: Sequence[str]) -> Composed:
    """Resolve a composed configuration, and merge plan=FILE and shards=FOLDER. choices: group -> the file chosen in it,
    of hydra.runtime."""
    from omegaconf import OmegaConf

    names = {group: str(name) for group, name in choices.items() if not group.startswith("hydra")}
    config = without_hydra(config)
    with hydra_errors(overrides):
        tree = cast("JsonDict", OmegaConf.to_container(config, resolve=True, throw_on_missing=True))
        written = cast("JsonDict", OmegaConf.to_container(config, resolve=False))
    own = written["strategy"]
    if isinstance(own, Mapping) and isinstance(own.get("codec"), Mapping):
        for override in overrides:
            if override.startswith(("codec=", "codec.")):
                mine = override.replace("codec=", "codec@strategy.codec=").replace("codec.", "strategy.codec.")
                complain(f"{override} is not read: strategy={names.get('strategy')} has its own codec; set {mine}")
    whole, names = with_plan(*with_shards(tree, names, overrides), overrides)
    brought = {key: value for key, value in whole.items() if tree.get(key) != value}
    if not brought:
        return whole, names
    _refuse_chosen_twice(brought, tree, choices, overrides)
    return whole | with_references(brought, written, tree), names


def chosen_of_several(overrides: Sequence[str]) -> str | None:
    """Return the first override that chooses a file which sets several groups."""
    groups = {override: _file_group(override) for override in overrides}
    return next((each for each, group in groups.items() if is_group(group) and _sets_several(group)), None)


def _sets_several(group: str) -> bool:
    """Return True for groups such as debug and experiment with files that set other groups."""
    return not group.startswith("hydra") and group.partition("@")[0] not in iter_groups()


def _refuse_chosen_twice(
    brought: JsonObject, before: JsonObject, choices: Mapping[str, object], overrides: Sequence[str]
) -> None:
    """Raise ConfigError if plan=FILE or shards=FOLDER sets the same group as a file that sets several groups."""
    several = [group for group in choices if _sets_several(group) and choices[group]]
    if not several:
        return
    try:
        plain = _plain([each for each in overrides if _file_group(each) not in several])
    except ConfigError:  # a key of that file only
        plain = None
    if taken := [key for key in brought if not isinstance(plain, Mapping) or plain.get(key) != before.get(key)]:
        raise ConfigError(
            f"{several[0]}={choices[several[0]]} sets the {taken[0]}, and so does the file of plan= or shards=: leave "
            f"one of them out, or name {taken[0]}= yourself"
        )


def with_references(brought: JsonObject, written: JsonObject, before: JsonObject) -> JsonDict:
    """Resolve references such as `${dataset.KEY}` again after a plan or shards set `brought`. Return the other keys.
    written: the configuration with references. before: resolved, without the plan or shards."""
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    names = " and ".join(sorted(brought))
    if "${" in json.dumps(brought):
        raise ConfigError(f"{names} of a file may hold no ${{: remove it")
    try:
        whole = OmegaConf.to_container(OmegaConf.create({**written, **brought}), resolve=True, throw_on_missing=True)
        made = {key: value for key, value in cast("JsonDict", whole).items() if key not in brought}
        refuse_foreign(made, "what a file brings", remedy="name dataset= yourself, or --trust", named=before)
    except (OmegaConfBaseException, ValueError) as error:
        raise ConfigError(f"{names} of a file: {one_line(error)}") from error
    return made


@dataclass(frozen=True)
class HydraJob:
    """One job of Hydra's application. sweep: the folder of its sweep, or None. searching: the sweeper needs the job's
    metric and its errors. typed: overrides of Hydra's own keys."""

    config: DictConfig
    choices: Mapping[str, object]
    run_dir: Path
    sweep: Path | None
    searching: bool
    overrides: list[str]
    typed: list[str]

    @staticmethod
    def running(config: object) -> HydraJob:
        """Return the job that Hydra runs in this process now. config: the argument of Hydra's task function."""
        from hydra.core.hydra_config import HydraConfig

        job = HydraConfig.get()
        return HydraJob(
            config=cast("DictConfig", config),
            choices=job.runtime.choices,
            run_dir=Path(job.runtime.output_dir),
            sweep=Path(job.sweep.dir).absolute() if str(job.mode).endswith("MULTIRUN") else None,
            searching=not re.search(r"gnnpar_jobs|basic_sweeper", str(job.sweeper._target_)),
            overrides=list(job.overrides.task),
            typed=list(job.overrides.hydra),
        )

    def settings(self) -> Settings:
        """Build the settings. Raise ConfigError as the job's error, not the sweep's."""
        study = "/".join(self.sweep.parts[-2:]) if self.sweep else ""
        return build_settings(*resolved(self.config, self.choices, self.overrides), study)

    def key(self) -> str:
        """Return the job's key in its sweep."""
        settings, names = resolved_for_key(self.config, self.choices, self.overrides)
        return job_key(settings, names, unread(settings))


def resolved_for_key(config: DictConfig, choices: Mapping[str, object], overrides: Sequence[str]) -> Composed:
    """Return `resolved`; for wrong overrides, which the job reports, the overrides."""
    try:
        return resolved(config, choices, overrides)
    except ConfigError:
        return {"overrides": [o for o in overrides if not o.startswith("hydra")]}, {}


def as_yaml(settings: Settings) -> str:
    """Return the resolved configuration, including entries of a plan or shards."""
    from omegaconf import OmegaConf

    return OmegaConf.to_yaml(OmegaConf.create(dict(settings.resolved)))


def may_be_group(name: str) -> bool:
    """Return True unless the name is a key: plan=FILE must not choose a file from a folder `plan` here."""
    return _GROUP.fullmatch(name) is not None and (name.partition("/")[0] not in KEYS or is_installed_group(name))


_GROUP = re.compile(r"[^\W\d][\w-]*(/[^\W\d][\w-]*)*")


def is_group(name: str) -> bool:
    """Return True if an override of this key chooses a file of gnnpar, of a plugin or of the working directory."""
    return is_installed_group(name) or (may_be_group(name) and Path(name).is_dir())


def refuse_unclear(overrides: Sequence[str]) -> None:
    """Raise ConfigError for an empty path, such as an unset shell variable, and for a list instead of one file."""
    for override in overrides:
        key, given, value = override.lstrip("+").partition("=")
        if key in _PLACES and given and not value.strip(" '\""):
            raise ConfigError(f"{show(override)} is empty, and names nothing: give . for the working directory")
        if key in iter_groups() and value.startswith("["):
            raise ConfigError(f"{show(override)}: a list of options is for -m, as {key}=a,b; give one name")


_PLACES = ("hydra.run.dir", "hydra.sweep.dir", "cache_dir", "data_dir", "resume", "shards.folder", "plan")


def search_installed() -> None:
    """Let Hydra find the YAML of installed packages and of the working directory. Raises ConfigError."""
    with config_errors():
        installed_confs()
    _register_sources()


@functools.cache
def _register_sources() -> None:
    from hydra._internal.core_plugins.file_config_source import FileConfigSource
    from hydra.core.config_search_path import ConfigSearchPath
    from hydra.core.plugins import Plugins
    from hydra.plugins.search_path_plugin import SearchPathPlugin

    class Installed(SearchPathPlugin):
        def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
            for folder in installed_confs():
                search_path.append(GROUP, f"file://{folder}")

    class OwnYaml(FileConfigSource):
        """Source of `own://FOLDER`: like file://FOLDER, but a folder with the name of a key is not a group."""

        @staticmethod
        def scheme() -> str:
            return "own"

        def available(self) -> bool:
            return True

        def is_group(self, config_path: str) -> bool:
            return may_be_group(config_path) and super().is_group(config_path)

    for plugin in (Installed, OwnYaml):
        Plugins.instance().register(plugin)


def train_help(argv: Sequence[str]) -> str:
    """Return the template of conf/config.yaml, filled with the groups and the composed keys.

    Hydra's own help takes 2.7 s of CPU time, this 1.25 s: Hydra copies its repository of files for every group."""
    from omegaconf import OmegaConf

    config = composed([argument for argument in argv if not argument.startswith("-")])
    template = string.Template(str(config.hydra.help.template))
    keys = OmegaConf.to_yaml(without_hydra(config))
    lines = "".join(f"{group}: {', '.join(options)}\n" for group, options in group_options().items())
    return printable(template.safe_substitute(APP_CONFIG_GROUPS=lines, CONFIG=keys)) + "\n"


def group_options() -> dict[str, list[str]]:
    """Return group -> the names of its files: of gnnpar, of installed packages and of the working directory."""
    brought = [conf_dir(), *installed_confs()]
    groups = {str(file.parent.relative_to(root)) for root in brought for file in root.glob("*/**/*.yaml")}
    found = {
        group: {file.stem for root in (*brought, Path()) for file in root.glob(f"{group}/*.yaml")} for group in groups
    }
    return {group: sorted(found[group]) for group in sorted(found) if group.partition("/")[0] != "hydra"}
