"""Configurations by their YAML names, composed and instantiated as the command line does."""

from collections.abc import Iterable
from functools import cache
from typing import Any

import pytest
from hydra import compose, initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from hydra.utils import instantiate

from gnnpar.paths import conf_dir


def names(group: str) -> list[str]:
    """Every YAML of a group: a new file is a new test."""
    return sorted(p.stem for p in (conf_dir() / group).glob("*.yaml"))


PRESETS = frozenset({"adaqp_p", "adaqp_q"})  # of adaqp: fewer of its parts


def presets_slow(strategies: Iterable[str]) -> list[Any]:
    """Parameters of a test; a strategy that is another one with parts left out is tried in test-all alone."""
    return [pytest.param(s, marks=pytest.mark.slow) if s in PRESETS else s for s in strategies]


@cache
def configured(group: str, name: str, *overrides: str) -> Any:
    """The frozen dataclass that `group=name` chooses."""
    GlobalHydra.instance().clear()
    with initialize_config_dir(version_base="1.3", config_dir=str(conf_dir())):
        return instantiate(compose("config", [f"{group}={name}", *overrides])[group])
