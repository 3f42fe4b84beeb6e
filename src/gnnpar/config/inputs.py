"""Merge plan=FILE and shards=FOLDER into a configuration; parse and quote overrides."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from pathlib import Path

from gnnpar.files import JsonDict, JsonObject, read_json
from gnnpar.partition.manifest import read_manifest
from gnnpar.settings import PLAN_SETUP, ConfigError, config_errors, show
from gnnpar.targets import refuse_foreign
from gnnpar.track.console import complain

Composed = tuple[JsonDict, dict[str, str]]
"""A resolved configuration, and group -> the name of the file chosen in it."""


def with_plan(config: JsonObject, names: Mapping[str, str], overrides: Sequence[str]) -> Composed:
    """Merge plan=FILE: its strategy, and the groups it was made for unless an override names them. Raises ConfigError
    if an override sets another strategy or codec."""
    config, names = dict(config), dict(names)
    if (path := config.get("plan")) is None:
        return config, names
    given = [o.lstrip("+~") for o in overrides]
    if asked := [o for o in given if group_of(o) in ("strategy", "codec") or "@strategy" in key_of(o)]:
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
    cuts = [o for o in given if group_of(o) == "partition"]
    if cuts and setup.get("partition", config["partition"]) != config["partition"]:
        raise ConfigError(f"{cuts[0]} and plan={path}: the plan has its parts; leave one of them out")
    brought: JsonDict = {}
    for group, value in setup.items():
        keys = [key_of(o).removeprefix(group) for o in given if group_of(o) == group]
        if group not in config or any(not key.startswith(".") for key in keys):  # an override chooses another
            continue
        keys = [key.removeprefix(".") for key in keys]
        mine = config[group]
        if keys and not (isinstance(value, Mapping) and isinstance(mine, Mapping) and set(keys) <= mine.keys()):
            raise ConfigError(f"{group}.{keys[0]} beside plan={path}, which brings its {group}: name {group}= as well")
        brought[group] = {**value, **{key: mine[key] for key in keys}} if keys else value
    _refuse_foreign({**brought, "strategy": strategy}, f"plan={path}", named=config)
    names |= {group: made_for[group] for group in brought if group in made_for}
    return config | brought | {"strategy": strategy}, names


def _word(name: object) -> str:
    if not isinstance(name, str):
        raise TypeError(f"{show(name)} is no name")
    return name


def with_shards(config: JsonObject, names: Mapping[str, str], overrides: Sequence[str]) -> Composed:
    """Merge the dataset, partition and ranks of shards=FOLDER. Raise ConfigError if overrides set others."""
    config, names = dict(config), dict(names)
    if not isinstance(shards := config.get("shards"), Mapping) or (path := shards.get("folder")) is None:
        return config, names
    if asked := [o.lstrip("+~") for o in overrides if group_of(o) in ("dataset", "partition", "plan")]:
        own = group_of(asked[0])
        raise ConfigError(f"{asked[0]} and shards={path}: the shards set the {own}; leave one of them out")
    with config_errors():
        manifest = read_manifest(Path(str(path)))
    brought = {group: manifest.setup.get(group) for group in ("dataset", "partition")}
    _refuse_foreign(brought, f"shards={path}", named=config)
    config |= {group: tree for group, tree in brought.items() if isinstance(tree, Mapping)}
    names |= {group: str(manifest.setup.get("names", {}).get(group, group)) for group in brought}
    if not sets(overrides, "world_size"):
        config["world_size"] = manifest.parts
    return config, names


def _refuse_foreign(brought: Mapping[str, object], source: str, *, named: object) -> None:
    for group, tree in brought.items():
        own = "" if group == "strategy" or source.startswith("shards") else f"give {group}=NAME yourself, or "
        twin = named.get(group) if isinstance(named, Mapping) else None
        with config_errors():
            refuse_foreign(tree, f"{group} of {source}", remedy=f"{own}--trust, which runs its code", named=twin)


def key_of(override: str) -> str:
    """Return the key of an override: codec.bits for ++codec.bits=4."""
    return override.partition("=")[0].lstrip("+~")


def group_of(override: str) -> str:
    """Return the first part of the key of an override: codec for ++codec.bits=4 and for codec@strategy.codec=bf16."""
    return re.split("[.@/]", key_of(override))[0]


def sets(overrides: Iterable[str], *keys: str) -> bool:
    """Return True if an override sets one of the keys, also as +key= and ++key=."""
    return any(key_of(override) in keys and "=" in override for override in overrides)


def quoted(text: str) -> str:
    """Return a literal of Hydra's override grammar, in which a backslash escapes only quotes."""
    return "'" + re.sub(r"(\\*)('|\Z)", lambda end: 2 * end[1] + ("\\'" if end[2] else ""), text) + "'"


def as_value(text: str) -> str:
    """Return a path as the value of an override, quoted if Hydra would parse it as something else."""
    plain = re.fullmatch(r"[A-Za-z_][\w.-]*|[\w./-]*/[\w./-]*", text, re.ASCII)
    return text if plain and text.lower() not in ("null", "true", "false", "nan", "inf") else quoted(text)


def expand_shorthands(overrides: Iterable[str]) -> list[str]:
    """Rewrite shorthands: shards=FOLDER, codec names, and model.kwargs.KEY, which Hydra treats as a new key."""
    full = (re.sub(r"^(\+*)shards=", r"\1shards.folder=", each) for given in overrides for each in _of_codec(given))
    return [re.sub(r"^model\.kwargs\.", "++model.kwargs.", override) for override in full]


CODECS = {"bfloat16": "bf16", "float16": "bf16", "fp16": "bf16", "none": "identity", "fp32": "identity"}
"""Other names of codecs -> their files."""
BITS = {"int8": "8", "int4": "4", "int2": "2", "fp8": "fp8"}
"""Names of types -> the bits of codec=uniform."""


def _of_codec(override: str) -> list[str]:
    """Rewrite codec=bfloat16, as printed in tables, and codec=int4, unless the working directory has such a file."""
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
