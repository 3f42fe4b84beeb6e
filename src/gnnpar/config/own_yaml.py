"""YAML of the working directory, as Hydra finds it: a file of a group, by its name, and nothing else.

Hydra takes any folder for a group and any text for the name of a file in it. The folder may be somebody else's, so what
a key, an empty option or a path would lead to is not there.
"""

from __future__ import annotations

import re
from pathlib import Path, PurePath

from hydra._internal.core_plugins.file_config_source import FileConfigSource
from hydra.plugins.config_source import ConfigResult

from gnnpar.config.groups import may_be_group
from gnnpar.durable import OF_ANOTHER, planted
from gnnpar.settings import ConfigError

_OPTION = re.compile(r"\w[^/]*")


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

    def load_config(self, config_path: str) -> ConfigResult:
        """ConfigError where another user has put the file there."""
        if (place := planted(Path(self.path) / self._normalize_file_name(config_path))) is not None:
            raise ConfigError(f"{place}: {OF_ANOTHER}, and names what runs; copy it into a folder of yours")
        return super().load_config(config_path)
