"""Turn errors of Hydra and OmegaConf into one line with key, value and allowed values."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

from gnnpar.paths import conf_dir, is_installed_group
from gnnpar.settings import ConfigError, closest, show, unknown_key

if TYPE_CHECKING:
    from yaml import YAMLError

CONFIG = "config"
"""File of conf/ that lists the groups."""
PLUGINS = {"hydra/launcher": ("joblib", "submitit_local", "submitit_slurm"), "hydra/sweeper": ("optuna",)}
"""Options of Hydra's groups that extras of gnnpar install."""


class JobFailed(RuntimeError):
    """A job of a sweeper that searches has failed."""


@contextmanager
def hydra_errors(overrides: Sequence[str]) -> Iterator[None]:
    """Raise errors of Hydra, OmegaConf and PyYAML in the block as a ConfigError of one line."""
    try:
        yield
    except Exception as error:
        if (line := hydra_line(error, overrides)) is None:
            raise
        raise ConfigError(line) from error


def hydra_line(error: Exception, argv: Sequence[str]) -> str | None:
    """Return one line for an exception of Hydra; None if its own message is clear, or if it is not Hydra's."""
    import yaml
    from hydra.errors import HydraException, MissingConfigException, OverrideParseException
    from omegaconf.errors import OmegaConfBaseException

    text = " ".join(str(error).split()) or " ".join(str(error.__cause__).split())
    if isinstance(error, yaml.YAMLError):
        return _yaml_line(error)
    if isinstance(error, MissingConfigException) and error.missing_cfg_file:
        return _missing_line(str(error.missing_cfg_file), sorted(error.options or ()))
    if isinstance(error, OverrideParseException):
        return f"{error.override} is no override; write key=value, +key=value to add a key, group=option to choose"
    if not isinstance(error, (HydraException, OmegaConfBaseException)):
        if isinstance(error, (ConfigError, JobFailed, OSError, MemoryError, RecursionError)):
            return None
        if none := [each for each in argv if each.endswith("=null") and is_installed_group(each[:-5])]:
            return f"{none[0]}: a group is chosen by a name, and ~{none[0][:-5]} chooses none; leave it out"
        return f"an override, or a key of hydra, cannot be used ({text[:200]}); correct it, or leave it out"
    if match := re.search(r"Could not override '([^']+)'", text):
        return no_such_key(match[1], argv)
    if match := re.search(r"Could not append to config\. An item is already at '([^']+)'", text):
        return f"{match[1]} is there already; write it without +"
    if match := re.search(r"[Ii]n '[^']*': Could not find '([^']+)'|You must specify '([^']+)'", text):
        return f"{match[1] or match[2]} does not exist"
    if match := re.search(r"Ambiguous value for argument '(.*?)' 1\.", text):
        return f"{match[1]}: several values are a sweep, which needs -m; write KEY=[A,B] for a list"
    return re.sub(r"\S*/(conf|site-packages)/\S*", "the configuration", text)


def _missing_line(file: str, options: Sequence[str]) -> str:
    group, _, option = file.rpartition("/")
    if option in PLUGINS.get(group, ()):
        return f"{group}: {option} is an extra; pip install 'gnnpar[{option.partition('_')[0]}]'"
    if not group:
        return f"there is no {option}"
    hint = "; for real targets set dataset.task=regression" if (group, option) == ("task", "regression") else ""
    hint = hint or closest(option, options)
    return f"{group}={option} does not exist{hint}; {group} can be {', '.join(options) or 'nothing'}"


def _yaml_line(error: YAMLError) -> str:
    from yaml import MarkedYAMLError

    mark = error.problem_mark if isinstance(error, MarkedYAMLError) else None
    if not isinstance(error, MarkedYAMLError) or mark is None:
        return f"a file is no YAML ({' '.join(str(error).split())[:200]}); correct it"
    return f"{os.path.relpath(mark.name)} is no YAML: {error.problem} in line {mark.line + 1}; correct it"


def _elsewhere(key: str) -> str:
    """Name the options of the same group that have the key; for a key without a group, the groups that have it."""
    import yaml

    group, _, name = key.rpartition(".")
    found = []
    for file in sorted(conf_dir().glob(f"{group or '*'}/*.yaml")):
        tree = yaml.safe_load(file.read_text(encoding="utf-8"))
        if isinstance(tree, dict) and name in tree:
            found.append(f"{group}={file.stem}" if group else f"{file.parent.name}.{name}")
    if "model." + name in found:
        found.append(f"model.kwargs.{name}, where the model is a class of PyG")
    keys = ", ".join(dict.fromkeys(found))
    return f"; {'it is a key of' if group else 'there is'} {keys}" if keys else ""


def no_such_key(key: str, argv: Sequence[str]) -> str:
    """Return the line for an override of an unknown key, with the keys that exist."""
    value = next((a.partition("=")[2] for a in argv if a.partition("=")[0].lstrip("+~") == key), "")
    parent = key.rpartition(".")[0]
    try:
        from omegaconf import OmegaConf

        from gnnpar.config.compose import composed, without_hydra

        rest = [a for a in argv if "=" in a and "," not in a and a.partition("=")[0] != key and "hydra" not in a]
        config = without_hydra(composed(rest))
        if parent and parent.partition(".")[0] not in config:
            return f"unknown key {key}={show(value)}{closest(parent, map(str, config))}"
        node = OmegaConf.select(config, parent) if parent else config
        return unknown_key(key, value, map(str, node or ())) + _elsewhere(key)
    except Exception:
        return f"unknown key {key}={show(value)}"
