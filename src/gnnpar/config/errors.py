"""Errors of Hydra and OmegaConf as one line that names the key, the value and what is allowed; their own leak paths."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from pathlib import Path
from traceback import walk_tb
from typing import TYPE_CHECKING

from gnnpar.paths import conf_dir, is_brought_group
from gnnpar.settings import closest, show, unknown_key

if TYPE_CHECKING:
    from yaml import YAMLError

CONFIG = "config"
"""The file of conf/ that lists the groups."""
PLUGINS = {"hydra/launcher": ("joblib", "submitit_local", "submitit_slurm"), "hydra/sweeper": ("optuna",)}
OF_HYDRA = {group: ("basic", *names) for group, names in PLUGINS.items()} | {
    "hydra/sweeper/sampler": ("tpe", "random", "cmaes", "grid", "nsgaii", "motpe")
}
"""Options of Hydra's own groups that it, or a plugin that gnnpar names, brings."""


def hydra_line(error: Exception, argv: Sequence[str]) -> str | None:
    """One line for an exception of Hydra, OmegaConf or the YAML that they read; None for any other."""
    import yaml
    from hydra.errors import HydraException, MissingConfigException, OverrideParseException
    from omegaconf.errors import OmegaConfBaseException

    if isinstance(error, ValueError) and "integer string conversion" in str(error):
        return "an override holds a whole number of more than 4300 digits; give a smaller one"
    if isinstance(error, TypeError) and _is_of_a_logger_of_hydra(error):
        return "hydra.verbose holds what is no name of a logger; write true, false, a name or a list of names"
    if isinstance(error, TypeError) and _is_of_hydra(error):
        return "an override chooses no name in a group, but a list of numbers or nulls; write group=name"
    if isinstance(error, ValueError) and "Config group override deletion" in str(error) and _is_of_hydra(error):
        return "an override takes out of a group what is no name; write ~group, or ~group=name"
    if isinstance(error, ValueError) and "Config group override must be" in str(error) and _is_of_hydra(error):
        none = [override for override in argv if override.endswith("=null") and is_brought_group(override[:-5])]
        if none:
            return f"{none[0]}: a group is chosen by a name, and ~{none[0][:-5]} chooses none; leave it out"
        there = [override for override in argv if os.path.isdir(override.partition("=")[0])]
        what = there[0] if there else "an override"
        return _a_group_here(what)
    if type(error) is RuntimeError and _is_of_hydra(error):
        return f"a plugin of Hydra cannot be had ({' '.join(str(error).split())[:200]}); name one of those installed"
    if isinstance(error, AttributeError) and _is_of_hydra(error):
        return f"a key of hydra is not what its plugin reads ({str(error).splitlines()[0]}); write it key by key"
    if isinstance(error, AssertionError) and _is_of_hydra(error):
        return f"an override sets a key below something that has none ({' '.join(str(error).split())}); leave it out"
    if _is_of_a_sweeper(error):
        return f"the sweeper cannot use what it is given ({' '.join(str(error).split())[:200]}); correct hydra.sweeper"
    if isinstance(error, yaml.YAMLError):
        return _yaml_line(error)
    if isinstance(error, UnicodeDecodeError) and _is_read_by_hydra(error):
        return f"a file of YAML is no UTF-8 ({error.reason} at byte {error.start}); save it as UTF-8"
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
        hint = "; for real targets set dataset.task=regression" if (group, option) == ("task", "regression") else ""
        hint = hint or closest(option, options)
        return f"{group}={option} does not exist{hint}; {group} can be {', '.join(options) or 'nothing'}"
    if isinstance(error, OverrideParseException):
        return f"{error.override} is no override; write key=value, +key=value to add a key, group=option to choose"
    if match := re.search(r"Could not override '([^']+)'", text):
        return _a_group_here(match[1]) if os.path.isdir(match[1]) else no_such_key(match[1], argv)
    if match := re.search(r"Could not append to config\. An item is already at '([^']+)'", text):
        return f"{match[1]} is there already; write it without +"
    if match := re.search(r"[Ii]n '[^']*': Could not find '([^']+)'|You must specify '([^']+)'", text):
        return f"{match[1] or match[2]} does not exist"
    return re.sub(r"\S*/(conf|site-packages)/\S*", "the configuration", text)


def _yaml_line(error: YAMLError) -> str:
    """Of a file that is no YAML: where it is, and what the parser says."""
    from yaml import MarkedYAMLError

    mark = error.problem_mark if isinstance(error, MarkedYAMLError) else None
    if not isinstance(error, MarkedYAMLError) or mark is None:
        return f"a file is no YAML ({' '.join(str(error).split())[:200]}); correct it"
    return f"{os.path.relpath(mark.name)} is no YAML: {error.problem} in line {mark.line + 1}; correct it"


def _is_of_hydra(error: Exception) -> bool:
    """Whether Hydra or OmegaConf has raised it."""
    return any(f"/{package}/" in place for place in _places(error)[-1:] for package in ("hydra", "omegaconf"))


def _is_of_a_logger_of_hydra(error: Exception) -> bool:
    last = [place for place in _places(error) if "/logging/" not in place][-1:]
    return "logger name" in str(error) and all(place.endswith("/hydra/core/utils.py") for place in last)


def _is_of_a_sweeper(error: Exception) -> bool:
    """Whether a plugin of Hydra, or what it calls, has raised it, and no job."""
    places = _places(error)
    plugins = [at for at, place in enumerate(places) if "/hydra_plugins/" in place]
    own = str(Path(__file__).parents[1]) + os.sep
    return bool(plugins) and not any(place.startswith(own) for place in places[plugins[0] :])


def _is_read_by_hydra(error: Exception) -> bool:
    return any("/hydra/_internal/" in place and "source" in place for place in _places(error))


def _places(error: Exception) -> list[str]:
    """Of the frames that it came through, the files; the last is of who raised it."""
    return [frame.f_code.co_filename for frame, _ in walk_tb(error.__traceback__)]


def _elsewhere(key: str) -> str:
    """The options of the same group that have the key; of a key without a group, the groups that have it."""
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


def _a_group_here(what: str) -> str:
    return f"{what}: Hydra takes the folder of this name here for a group; rename it"


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
        return unknown_key(key, value, map(str, node or ())) + _elsewhere(key)
    except Exception:
        return f"unknown key {key}={show(value)}"
