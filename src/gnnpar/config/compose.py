"""Settings from overrides: the one place where Hydra composes, for a command and for a running job alike."""

from __future__ import annotations

import functools
import json
import os
import re
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, cast

from gnnpar.config.errors import CONFIG, OF_HYDRA, hydra_line
from gnnpar.config.groups import is_group
from gnnpar.config.inputs import Composed, spelled, with_inputs
from gnnpar.config.study import key_of
from gnnpar.durable import JsonDict, JsonObject, refuse_link_of_others, refuse_link_to_others, refuse_links_below
from gnnpar.paths import GROUP, conf_dir, installed_confs
from gnnpar.settings import ConfigError, Settings, build_settings, iter_groups, show
from gnnpar.targets import let_in, refuse_foreign
from gnnpar.track.console import complain
from gnnpar.track.text import one_line

if TYPE_CHECKING:
    from omegaconf import DictConfig


def compose(overrides: Sequence[str], check: Callable[[JsonObject], None] = lambda tree: None) -> Settings:
    """The settings that `gnnpar train` has with these overrides. Raises ConfigError for whatever is wrong.

    `check`: called with the resolved configuration before any of its classes is imported.
    """
    import hydra

    search_installed(overrides)
    try:
        with composing():
            config = hydra.compose(CONFIG, overrides=spelled(overrides), return_hydra_config=True)
        choices = {str(group): name for group, name in config.hydra.runtime.choices.items()}
        tree, names = resolved(config, choices, overrides)
        check(tree)
        return build_settings(tree, names)
    except Exception as error:
        if isinstance(error, ConfigError) or (line := hydra_line(error, overrides)) is None:
            raise
        raise ConfigError(line) from error


def chosen_files(overrides: Sequence[str]) -> object:
    """What the YAML says that overrides choose by name, without the keys that they set."""
    groups = {override: key_of(override).partition("@")[0] for override in overrides}
    return _composed([each for each, group in groups.items() if is_group(group) and not group.startswith("hydra")])


def _composed(overrides: Sequence[str]) -> object:
    import hydra
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    search_installed(overrides)
    with composing():
        config = hydra.compose(CONFIG, overrides=list(overrides))
        try:
            return OmegaConf.to_container(config, resolve=True)
        except OmegaConfBaseException:  # it reads what only other overrides say
            return OmegaConf.to_container(config, resolve=False)


@contextmanager
def composing() -> Iterator[None]:
    """Hydra composes gnnpar's configuration inside, also where it runs already: a sweep asks, or the caller's program
    is an application of Hydra. One thread at a time: its state is the process's."""
    import hydra
    from hydra.core.global_hydra import GlobalHydra

    with _COMPOSING:
        running, GlobalHydra.instance().hydra = GlobalHydra.instance().hydra, None
        try:
            with hydra.initialize_config_dir(version_base="1.3", config_dir=str(conf_dir())):
                yield
        finally:
            GlobalHydra.instance().hydra = running  # another instance: Hydra has put a copy in its place


_COMPOSING = threading.RLock()


def resolved(config: DictConfig, choices: Mapping[str, object], overrides: Sequence[str]) -> Composed:
    """What Hydra composed of the overrides, resolved, with what plan=FILE and shards=FOLDER bring.

    `choices`: group -> the file chosen in it, as Hydra has them.
    """
    from omegaconf import OmegaConf

    refuse_paths(overrides)
    names = {group: str(name) for group, name in choices.items() if not group.startswith("hydra")}
    keys = [str(key) for key in config if key != "hydra"]
    tree = OmegaConf.to_container(OmegaConf.masked_copy(config, keys), resolve=True, throw_on_missing=True)
    let_in(tree)
    own = OmegaConf.to_container(config.strategy, resolve=False)
    if isinstance(own, Mapping) and isinstance(own.get("codec"), Mapping):
        for override in overrides:
            if override.startswith(("codec=", "codec.")):
                mine = override.replace("codec=", "codec@strategy.codec=").replace("codec.", "strategy.codec.")
                complain(f"{override} is not read: strategy={names.get('strategy')} has its own codec; set {mine}")
    written = OmegaConf.to_container(OmegaConf.masked_copy(config, keys), resolve=False)
    composed, names = with_inputs(cast("JsonDict", tree), names, overrides)
    _refuse_chosen_otherwise(composed, cast("JsonDict", tree), choices, overrides)
    return of_what_is_brought(composed, cast("JsonDict", written), cast("JsonDict", tree)), names


def chosen_of_several(overrides: Sequence[str]) -> str | None:
    """The first override that chooses a file which sets several groups."""
    groups = {override: key_of(override).partition("@")[0] for override in overrides}
    return next((each for each, group in groups.items() if is_group(group) and _sets_several(group)), None)


def _sets_several(group: str) -> bool:
    """Whether its files set what other groups have, as those of debug and of +experiment do."""
    return not group.startswith("hydra") and group.partition("@")[0] not in iter_groups()


def _refuse_chosen_otherwise(
    composed: JsonObject, before: JsonObject, choices: Mapping[str, object], overrides: Sequence[str]
) -> None:
    """ConfigError where plan=FILE or shards=FOLDER have brought other settings than a file that sets several groups has
    chosen."""
    from hydra.errors import HydraException

    several = [group for group in choices if _sets_several(group) and choices[group]]
    brought = [key for key, value in composed.items() if before.get(key) != value]
    if not several or not brought:
        return
    rest = [each for each in overrides if key_of(each).partition("@")[0] not in several]
    try:
        plain = _composed([each for each in rest if not key_of(each).startswith("hydra")])
    except HydraException:  # a key that only that file has
        plain = None
    if taken := [key for key in brought if not isinstance(plain, Mapping) or plain.get(key) != before.get(key)]:
        raise ConfigError(
            f"{several[0]}={choices[several[0]]} sets the {taken[0]}, and so does the file of plan= or shards=: leave "
            f"one of them out, or name {taken[0]}= yourself"
        )


def of_what_is_brought(composed: JsonObject, written: JsonObject, before: JsonObject) -> JsonDict:
    """Where plan=FILE or shards=FOLDER have brought some of the settings, what the others take from these, as
    `${dataset.KEY}` in YAML of a model, is of those that were brought. `written`: with references; `before`: without.
    """
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    rest = {key: value for key, value in written.items() if key in composed and composed[key] == before[key]}
    references = " ".join(_REFERENCE.findall(json.dumps(rest)))
    brought = {key: composed[key] for key in composed.keys() - rest if re.search(rf"\b{re.escape(key)}\b", references)}
    if not brought:
        return dict(composed)
    if "${" in json.dumps(brought):
        raise ConfigError(f"{' and '.join(sorted(brought))} of a file may hold no ${{: remove it")
    try:
        whole = OmegaConf.to_container(OmegaConf.create({**written, **brought}), resolve=True, throw_on_missing=True)
    except OmegaConfBaseException as error:
        raise ConfigError(f"{' and '.join(sorted(brought))} of a file: {one_line(error)}") from error
    made = {key: value for key, value in cast("JsonDict", whole).items() if key in rest}
    try:
        refuse_foreign(made, "what a file brings", remedy="name dataset= yourself, or --trust", named=before)
    except ValueError as error:
        raise ConfigError(str(error)) from error
    return {**composed, **made}


_REFERENCE = re.compile(r"\$\{[^}]*")


NO_OTHER_FOLDER = "a job works in the folder that it was started in, where your classes and files are; leave it out"


def refuse_paths(overrides: Sequence[str]) -> None:
    """Refuse an option of a group that is no name: a path may lead to YAML that whoever wrote the override has put
    there, and a list hides what is chosen."""
    for override in spelled(overrides):
        key, given, value = override.partition("=")
        if key.lstrip("+") in _PLACES and given and not value.strip(" '\""):
            raise ConfigError(f"{show(override)} is empty, and names nothing: give . for the working directory")
        group = key.lstrip("+~").partition("@")[0]
        if not given or not is_group(group):
            continue
        if not value.strip(" \t'\""):
            raise ConfigError(f"{show(override)} names no file of {group}: give a name, or leave it out")
        if value.startswith("[") and group in iter_groups():
            raise ConfigError(f"{show(override)}: a list of options is for -m, as {group}=a,b; give one name")
        if ".." in value or _ABSOLUTE.search(value):
            raise ConfigError(f"{show(override)}: options are names of files in a folder {group}, and no paths")


_PLACES = ("hydra.run.dir", "hydra.sweep.dir", "cache_dir", "data_dir", "resume", "shards.folder", "plan", "out")
_ABSOLUTE = re.compile(r"""(^|[\[,'"\s])/""")


def refuse_led_away(folder: Path, typed: Sequence[str]) -> None:
    """WriteError where the folder that runs have by themselves, as outputs/DATE/TIME, lies elsewhere, by a link in it.
    `outputs` may be one of the user's own: that is how runs are kept on another disk, and so may a folder that he
    names. `typed`: Hydra's own overrides, which may name it.
    """
    if names_folder(typed):
        refuse_link_of_others(folder)
    else:
        first, *below = Path(os.path.relpath(folder)).parts or (".",)  # where the user's YAML has runs lie just here
        refuse_link_of_others(Path(first))
        refuse_link_to_others(Path(first))
        refuse_links_below(Path(first), Path(*below))


def names_folder(typed: Sequence[str]) -> bool:
    """Is where runs are kept among these overrides?"""
    return any(override.lstrip("+").startswith(("hydra.run.dir=", "hydra.sweep.dir=")) for override in typed)


def named_folders(typed: Sequence[str]) -> list[Path]:
    """The folders that overrides name for runs, as they stand there; up to the first that has a value in its name."""
    found = (re.fullmatch(r"\++?hydra\.(?:run|sweep)\.dir=(['\"]?)(.*)\1", f"+{each.lstrip('+')}") for each in typed)
    names = [match[2].partition("${") for match in found if match]
    return [Path(name) if not rest else Path(f"{name}x").parent for name, rest, _ in names]


@dataclass(frozen=True)
class HydraJob:
    """One job of Hydra's application. `sweep`: the folder of its sweep, None outside of one. `typed`: overrides of
    Hydra's own keys."""

    config: DictConfig
    choices: Mapping[str, object]
    run_dir: Path
    sweep: Path | None
    title: str
    overrides: list[str]
    typed: list[str]

    @staticmethod
    def running(config: object) -> HydraJob:
        """The one that Hydra runs in this process now; `config` is what it called its function with."""
        from hydra.core.hydra_config import HydraConfig

        job = HydraConfig.get()
        if job.job.chdir:
            raise ConfigError(f"hydra.job.chdir: {NO_OTHER_FOLDER}")
        run_dir = Path(job.runtime.output_dir)
        sweep = Path(job.sweep.dir) if str(job.mode).endswith("MULTIRUN") else None
        return HydraJob(
            config=cast("DictConfig", config),
            choices={str(group): name for group, name in job.runtime.choices.items()},
            run_dir=run_dir,
            sweep=sweep,
            title=f"run {run_dir.name}: {job.job.override_dirname.replace(',', ' ')}" if sweep else "",
            overrides=list(job.overrides.task),
            typed=list(job.overrides.hydra),
        )

    def settings(self) -> Settings:
        """Built when asked for: what is wrong with them is the job's own error."""
        study = "/".join(self.sweep.parts[-2:]) if self.sweep else ""
        return build_settings(*resolved(self.config, self.choices, self.overrides), study)

    def yaml(self, settings: Settings) -> str:
        """The configuration as it runs, with what a plan or shards have brought."""
        from omegaconf import OmegaConf

        return OmegaConf.to_yaml(OmegaConf.create(dict(settings.resolved)))


def search_installed(overrides: Sequence[str]) -> None:
    """Hydra looks for YAML in what other packages bring, too: after gnnpar's own. ConfigError where overrides choose
    anything but names: Hydra makes what a file says of it before a job can look."""
    try:
        installed_confs()
    except ValueError as error:
        raise ConfigError(str(error)) from error
    refuse_paths(overrides)
    _register_sources()
    _refuse_shadows(Path.cwd())


def _refuse_shadows(folder: Path) -> None:
    """ConfigError where YAML of a folder would be read in the place of Hydra's own, or of a plugin's, which nobody has
    named there: Hydra looks into the working directory first, and a sweeper's classes and parameters are code."""
    from hydra.core.config_store import ConfigStore
    from hydra.core.plugins import Plugins

    for place in (folder, folder / "hydra"):  # Hydra opens by their names files of a folder that cannot be listed
        if not os.access(place, os.R_OK | os.X_OK) and (place == folder or os.path.lexists(place)):
            raise ConfigError(f"{place} may not be listed, and Hydra looks for YAML in it: call gnnpar elsewhere")
    for group in sorted(path.name for path in conf_dir().iterdir() if path.is_dir()):
        if (file := folder / group / "None.yaml").exists():
            raise ConfigError(f"{file} would be read where no {group} is chosen: rename it, or call gnnpar elsewhere")
    if not (folder / "hydra").is_dir():
        return
    Plugins.instance()  # which fill the store
    there = {str(path) for path in _paths(ConfigStore.instance().repo.get("hydra", {}), Path("hydra"))}
    there |= {f"{group}/{option}.yaml" for group, options in OF_HYDRA.items() for option in options}
    there |= {str(Path(name).with_name("None.yaml")) for name in there}  # of a group with nothing chosen
    there |= {str(file.relative_to(folder)) for file in (folder / "hydra").glob("*/None.yaml")}  # nor any to choose
    for name in sorted(there):
        if (folder / name).exists():
            raise ConfigError(
                f"{folder / name} would be read in the place of Hydra's own {name}: rename it, or call gnnpar elsewhere"
            )


def _paths(tree: Mapping[str, object], folder: Path) -> Iterator[Path]:
    """Of files in Hydra's store."""
    for name, node in tree.items():
        if isinstance(node, Mapping):
            yield from _paths(node, folder / name)
        else:
            yield folder / name


@functools.cache
def _register_sources() -> None:
    from hydra._internal.core_plugins.file_config_source import FileConfigSource
    from hydra._internal.sources_registry import SourcesRegistry
    from hydra.core.config_search_path import ConfigSearchPath
    from hydra.core.plugins import Plugins
    from hydra.plugins.search_path_plugin import SearchPathPlugin

    from gnnpar.config.own_yaml import OwnYaml, refuse_yaml_of_others

    class Installed(SearchPathPlugin):
        def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
            for folder in installed_confs():
                search_path.append(GROUP, f"file://{folder}")

    for plugin in (Installed, OwnYaml):
        Plugins.instance().register(plugin)
    for scheme in ("file", OwnYaml.scheme()):
        refuse_yaml_of_others(cast("type[FileConfigSource]", SourcesRegistry.instance().types[scheme]))
