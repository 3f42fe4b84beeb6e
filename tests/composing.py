"""Configurations by their YAML names, composed and instantiated as the command line does."""

import os
from collections.abc import Iterable
from functools import cache
from typing import Any

import pytest
from hydra import compose, initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from hydra.utils import instantiate
from omegaconf import DictConfig, OmegaConf

from gnnpar.config.compose import compose as compose_settings
from gnnpar.config.compose import search_installed
from gnnpar.paths import conf_dir
from gnnpar.settings import Settings


def names(group: str) -> list[str]:
    """Every YAML of a group: a new file is a new test. model=pyg is no model before it has a target; models that read
    all nodes run under some strategies alone (conformance/test_totals.py)."""
    found = {p.stem for p in (conf_dir() / group).glob("*.yaml")}
    return sorted(found - {"pyg", *READS_ALL_NODES} if group == "model" else found)


READS_ALL_NODES = ("sgformer", "polynormer")
WORLDS = (1, 2, 4) if os.environ.get("HYPOTHESIS_PROFILE") == "nightly" else (3,)
"""Ranks of a model that is tried at all of them in test-all."""


ALIKE = frozenset(
    {"sage", "gin", "resgcn", "gine", "gcnii", "transformer", "rgat", "hgt"}
)  # models whose folds are those of others
REFUSED = frozenset({("feature", "rgat")})  # (strategy, model): the fold separates by neither columns nor heads
PRESETS = frozenset({"adaqp_p", "adaqp_q"})  # of adaqp: fewer of its parts


def rest_slow(strategies: Iterable[str], *others: str) -> list[Any]:
    """Parameters of a test; a strategy that is another one with parts left out is tried in test-all alone, and so are
    `others`, whose parts are tried one by one."""
    return [pytest.param(s, marks=pytest.mark.slow) if s in {*PRESETS, *others} else s for s in strategies]


@cache
def configured(group: str, name: str, *overrides: str) -> Any:
    """The frozen dataclass that `group=name` chooses."""
    inside = [o.removeprefix(f"{group}.") for o in overrides if o.startswith(f"{group}.")]
    choice = _chosen(group, name, *(o for o in overrides if not o.startswith(f"{group}.")))
    return instantiate(OmegaConf.merge(choice, OmegaConf.from_dotlist(inside)))


@cache
def _chosen(group: str, name: str, *overrides: str) -> DictConfig:
    """The group before it is instantiated. Composing takes longer than most tests that ask for it, and the whole
    configuration twice as long as a group."""
    GlobalHydra.instance().clear()
    search_installed()
    with initialize_config_dir(version_base="1.3", config_dir=str(conf_dir())):
        if overrides:
            return compose("config", [f"{group}={name}", *overrides])[group]
        return OmegaConf.create(_referred_to() | _tree(f"{group}/{name}"))[group]


def _tree(config: str) -> dict[str, Any]:
    tree = OmegaConf.to_container(compose(config), resolve=False)
    assert isinstance(tree, dict)
    return tree  # type: ignore[return-value]


@cache
def _referred_to() -> dict[str, Any]:
    """What groups refer to, as it is by default."""
    return {key: value for key, value in _tree("config").items() if key in {"codec", "dataset", "profile"}}


@cache
def settings_of(*overrides: str) -> Settings:
    """What `gnnpar train` has with these overrides; for tests that train often with the same ones."""
    return compose_settings(overrides)
