"""YAML of folders, as Hydra finds it: none that another user has put there; and of the working directory a file of a
group, by its name, and nothing else.

Hydra takes any folder for a group and any text for the name of a file in it. The working directory may be somebody
else's, so what a key, an empty option or a path would lead to is not there.
"""

from __future__ import annotations

import re
from pathlib import Path, PurePath

from hydra._internal.core_plugins.file_config_source import FileConfigSource
from hydra.plugins.config_source import ConfigResult

from gnnpar.config.groups import may_be_group
from gnnpar.durable import OF_ANOTHER, planted
from gnnpar.paths import conf_dir, installed_confs
from gnnpar.settings import ConfigError

_OPTION = re.compile(r"\w[^/]*")


def refuse_yaml_of_others(source: type[FileConfigSource]) -> None:
    """From now on in this process it reads none that another user has put into a folder that is searched, but for what
    lies beside installed code: ConfigError. Hydra has a second class of the name, as it loads its modules anew."""
    load = source.load_config
    if load.__module__ == __name__:  # it is guarded already
        return

    def guarded(self: FileConfigSource, config_path: str) -> ConfigResult:
        folder = Path(self.path)
        place = planted(folder / self._normalize_file_name(config_path))
        if place is not None and folder not in (conf_dir(), *installed_confs()):
            raise ConfigError(f"{place}: {OF_ANOTHER}, and names what runs; copy it into a folder of yours")
        return load(self, config_path)

    source.load_config = guarded


refuse_yaml_of_others(FileConfigSource)  # also in processes that a launcher starts, which compose their jobs


class OwnYaml(FileConfigSource):
    """The source of `own://FOLDER` in hydra.searchpath."""

    @staticmethod
    def scheme() -> str:
        return "own"

    def available(self) -> bool:
        return True

    def is_group(self, config_path: str) -> bool:
        return may_be_group(config_path) and super().is_group(config_path)

    def is_config(self, config_path: str) -> bool:
        group, _, option = config_path.rpartition("/")
        named = may_be_group(group) and _OPTION.fullmatch(option) and PurePath(option).stem != "None"
        return bool(named) and super().is_config(config_path)
