"""YAML of the working directory, as Hydra finds it: a file of a group, by its name, and nothing else.

Hydra takes any folder for a group and any text for the name of a file in it. The folder may be somebody else's, so what
a key, an empty option or a path would lead to is not there.
"""

from __future__ import annotations

import re
from pathlib import PurePath

from hydra._internal.core_plugins.file_config_source import FileConfigSource

from gnnpar.config.groups import may_be_group

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
