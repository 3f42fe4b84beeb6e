"""What plan=FILE and shards=FOLDER bring to a configuration, and which overrides they exclude."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping
from functools import cache
from pathlib import Path

from gnnpar.config.study import plain_yaml
from gnnpar.durable import JsonDict, JsonObject, read_json
from gnnpar.partition.manifest import read_manifest
from gnnpar.paths import conf_dir
from gnnpar.settings import PLAN_SETUP, WRITTEN_FOLDERS, ConfigError, show
from gnnpar.targets import TRUST, refuse_foreign
from gnnpar.track.console import complain

Composed = tuple[JsonDict, dict[str, str]]
"""A resolved configuration, and of every group the name of the file chosen in it."""
_BROUGHT = ("dataset", "partition")


def with_inputs(config: JsonObject, names: Mapping[str, str], overrides: Iterable[str]) -> Composed:
    """Configuration and names after shards=FOLDER and plan=FILE. Raises ConfigError in one line."""
    overrides = list(overrides)
    return with_plan(*with_shards(config, names, overrides), overrides)


def with_plan(config: JsonObject, names: Mapping[str, str], overrides: Iterable[str]) -> Composed:
    """Configuration and names after plan=FILE, which sets the strategy; a strategy asked for beside it is an error.

    A plan of `gnnpar plan` also brings what it was made for: the groups that no override names.
    """
    config, names = dict(config), dict(names)
    if (path := config.get("plan")) is None:
        return config, names
    given = [o.lstrip("+~") for o in overrides]
    asked = [o for o in given if re.match(r"(strategy|codec)[=.@]|[\w/]*@strategy", o)]
    if asked:
        raise ConfigError(f"{asked[0]} and plan={path}: the plan sets the strategy; leave one of them out")
    try:
        data = read_json(Path(path))
        strategy = dict(data["strategy"])
        names["strategy"] = _word(strategy.pop("name"))
        setup = dict(data.get("setup") or {})
        made_for = {group: _word(name) for group, name in dict(setup.pop("names", {})).items()}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"plan={path} cannot be read: {type(error).__name__} {error}; give a plan.json") from error
    if other := sorted(setup.keys() - set(PLAN_SETUP)):
        raise ConfigError(f"plan={path}: nothing reads setup.{other[0]}; remove it")
    cuts = [o for o in given if re.match(r"partition[=./]", o)]
    if cuts and setup.get("partition", config["partition"]) != config["partition"]:
        raise ConfigError(f"{cuts[0]} and plan={path}: the plan has its parts; leave one of them out")
    brought: JsonDict = {}
    for group, value in setup.items():
        if group not in config or any(re.match(rf"{group}(=|/)", o) for o in given):
            continue
        keys = [found[1] for o in given if (found := re.match(rf"{group}\.([^=]+)", o))]
        mine = config[group]
        if keys and not (isinstance(value, Mapping) and isinstance(mine, Mapping) and set(keys) <= mine.keys()):
            raise ConfigError(f"{group}.{keys[0]} beside plan={path}, which brings its {group}: name {group}= as well")
        brought[group] = {**value, **{key: mine[key] for key in keys}} if keys else value
    _refuse_foreign({**brought, "strategy": strategy}, f"plan={path}", named=config)
    _refuse_folders({"strategy": strategy}, f"plan={path}")
    names |= {group: made_for[group] for group in brought if group in made_for}
    _refuse_other_names({**brought, "strategy": strategy}, names, f"plan={path}")
    return config | brought | {"strategy": strategy}, names


def _refuse_other_names(brought: JsonObject, names: Mapping[str, str], where: str) -> None:
    """ConfigError where a file calls a class, or a dataset, by the name of another one of gnnpar's, by which results
    are compared, or by a name with blanks or other signs, which a table would show as another."""
    if os.environ.get(TRUST) == "1":
        return
    for group, value in brought.items():
        name = str(names.get(group, group)).removesuffix(".yaml")
        if not re.fullmatch(r"\w[\w.+/-]{0,79}", name):
            raise ConfigError(f"{where} calls its {group} {show(name)}: a name has letters, digits, _ . + - and /")
        file = conf_dir() / group / f"{name}.yaml"
        if not isinstance(value, Mapping) or not file.is_file():
            continue
        yaml = plain_yaml(file)
        yaml = yaml if isinstance(yaml, Mapping) else {}
        known = str(yaml.get("_target_", ""))
        given = str(value.get("_target_", known))
        if group == "dataset" and known == given and "name" in yaml:  # Cora's class is CiteSeer's, too
            known, given = str(yaml["name"]), str(value.get("name", yaml["name"]))
        if known != given:
            raise ConfigError(f"{where} calls {show(given)} {group} {names[group]}, which is {known}: correct the name")


def _word(name: object) -> str:
    """Of what a file calls a group's choice. TypeError."""
    if not isinstance(name, str):
        raise TypeError(f"{show(name)} is no name")
    return name


def with_shards(config: JsonObject, names: Mapping[str, str], overrides: Iterable[str]) -> Composed:
    """Configuration and names after shards=FOLDER: its dataset and partition, and a rank a part. Asking for others
    beside it is an error."""
    config, names = dict(config), dict(names)
    if not isinstance(shards := config.get("shards"), Mapping) or (path := shards.get("folder")) is None:
        return config, names
    given = [o.lstrip("+~") for o in overrides]
    if asked := next((o for o in given if re.match(r"(dataset|partition)(=|\.)|plan=", o)), None):
        group = re.split(r"[=.]", asked)[0]
        raise ConfigError(f"{asked} and shards={path}: the shards set the {group}; leave one of them out")
    try:
        manifest = read_manifest(Path(str(path)))
    except ValueError as error:
        raise ConfigError(str(error)) from error
    _refuse_foreign({group: manifest.setup.get(group) for group in _BROUGHT}, f"shards={path}", named=config)
    for group in _BROUGHT:
        if isinstance(manifest.setup.get(group), Mapping):
            config[group] = manifest.setup[group]
        names |= {group: str(manifest.setup.get("names", {}).get(group, group))}
    _refuse_other_names({group: manifest.setup.get(group) for group in _BROUGHT}, names, f"shards={path}")
    if not sets(given, "world_size"):
        config["world_size"] = manifest.parts
    return config, names


def _refuse_foreign(brought: Mapping[str, object], source: str, *, named: object) -> None:
    for group, tree in brought.items():
        own = "" if group == "strategy" or source.startswith("shards") else f"give {group}=NAME yourself, or "
        remedy = f"{own}--trust, which runs its code"
        try:
            twin = named.get(group) if isinstance(named, Mapping) else None
            refuse_foreign(tree, f"{group} of {source}", remedy=remedy, named=twin)
        except ValueError as error:
            raise ConfigError(str(error)) from error


def _refuse_folders(tree: Mapping[str, object], source: str, prefix: str = "") -> None:
    """A plan decides what runs, not where it writes."""
    for key, value in tree.items():
        if key in WRITTEN_FOLDERS and value is not None:
            raise ConfigError(
                f"{source} sets {prefix}{key}={show(value)}, and a plan chooses no folder to write to: set it to null "
                "there; TMPDIR names the folder"
            )
        if isinstance(value, Mapping):
            _refuse_folders(value, source, f"{prefix}{key}.")


def sets(overrides: Iterable[str], key: str) -> bool:
    """Do they set it, also as +key= and ++key=?"""
    return any(override.lstrip("+").startswith(f"{key}=") for override in overrides)


def spelled(overrides: Iterable[str]) -> list[str]:
    """shards=FOLDER in full, and codecs by the names of their files. Arguments of a PyG model are whatever its class
    takes: new keys to Hydra."""
    full = (re.sub(r"^(\+*)shards=", r"\1shards.folder=", each) for given in overrides for each in _of_codec(given))
    return [re.sub(r"^model\.kwargs\.", "++model.kwargs.", override) for override in full]


CODECS = {"bfloat16": "bf16", "float16": "bf16", "fp16": "bf16", "none": "identity", "fp32": "identity"}
"""Other names of codecs -> their files."""
BITS = {"int8": "8", "int4": "4", "int2": "2", "fp8": "fp8"}
"""Names of types -> the bits of codec=uniform."""


def _of_codec(override: str) -> list[str]:
    """An override; codec=bfloat16, as tables print it, or codec=int4 in the names of files, unless there is one of its
    own name."""
    found = re.fullmatch(r"(\+*codec(?:@([\w.]+))?)=(\w+)", override)
    name = found[3] if found else ""
    if found is None or not (name in CODECS or name in BITS) or Path("codec", f"{name}.yaml").exists():
        return [override]
    if name in BITS:
        return [f"{found[1]}=uniform", f"{found[2] or 'codec'}.bits={BITS[name]}"]
    if name in ("float16", "fp16"):
        _tell(f"{override}: rows travel as bfloat16 (codec=bf16), the format of 16 bits that there is")
    return [f"{found[1]}={CODECS[name]}"]


_tell = cache(complain)
