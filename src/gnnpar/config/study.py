"""Ablation studies: a file that names factors, and the jobs it asks for, in randomised blocks."""

from __future__ import annotations

import itertools
import math
import os
import random
import re
from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import annotated_types as at
import yaml

from gnnpar.config.groups import is_group
from gnnpar.durable import JsonObject, require_file
from gnnpar.paths import is_brought_group
from gnnpar.settings import WRITTEN_FOLDERS, ConfigError, Count, closest, construct, show
from gnnpar.targets import TRUST, refuse_foreign

Mode = Literal["grid", "one_at_a_time", "leave_one_out"]
Overrides = tuple[str, ...]
Repeats = Annotated[int, at.Ge(1), at.Le(10_000)]
MOST_RUNS = 100_000
_REFERENCE = re.compile(r"\$\{[A-Za-z_][\w.]*\}")
"""The value of another key. Whatever else $ begins may be a resolver, whose name may be a reference again, also where
a backslash stands before the brace, which Hydra takes away."""
_OWN = {"seed": "seeds", "block": "blocks"}


@dataclass(frozen=True)
class Variant:
    """What is compared. `name`: what sets it apart from the base, '' for the base; overrides: the whole job's."""

    name: str
    overrides: Overrides
    keys: tuple[str, ...] = ()  # where the study file says so: for errors


@dataclass(frozen=True, kw_only=True)
class Study:
    """The keys of a study file.

    base: overrides of `gnnpar train`. factors: name -> levels, each an override or a list of overrides.
    mode: grid (every combination of one level or none of each factor), one_at_a_time (the base and one level changed),
    leave_one_out (the base has all factors with all their overrides; each variant lacks one factor).
    seeds: a number of seeds or a list of them. blocks: how often everything runs, each time in another random order.
    """

    factors: dict[str, list[str | list[str]]]
    base: list[str] = ()  # type: ignore[assignment]
    mode: Mode = "one_at_a_time"
    seeds: Repeats | list[Count] = 1
    blocks: Repeats = 1
    order_seed: Count = 0

    def __post_init__(self) -> None:
        if not self.factors:
            raise ValueError("factors is empty; name at least one, as codec: [codec=bf16]")
        if isinstance(self.seeds, list) and len(set(self.seeds)) < max(1, len(self.seeds)):
            raise ValueError(f"seeds={self.seeds} must be a list of different seeds, or how many there are")
        given = {"base": self.base} | {f"factors.{name}": levels for name, levels in self.factors.items()}
        for key, levels in given.items():
            if not levels and key != "base":
                raise ValueError(f"{key} is empty; give it at least one override, as codec=bf16")
            for i, override in ((i, o) for i, level in enumerate(levels) for o in listed(level)):
                _check(f"{key}[{i}]", override)
        variants = sum(map(len, self.factors.values()))
        if self.mode == "grid":
            variants = math.prod(1 + len(levels) for levels in self.factors.values())
        runs = variants * len(self.seed_list) * self.blocks
        if runs > MOST_RUNS:
            raise ValueError(f"the study asks for {runs:,} runs, at most {MOST_RUNS:,} are listed; name fewer factors")

    @property
    def seed_list(self) -> list[int]:
        return self.seeds if isinstance(self.seeds, list) else list(range(self.seeds))

    def variants(self) -> list[Variant]:
        """The base first; then what is compared with it."""
        levels = {
            name: [(listed(level), f"factors.{name}[{i}]") for i, level in enumerate(given)]
            for name, given in self.factors.items()
        }
        if self.mode == "leave_one_out":
            whole = {name: tuple(o for level, _ in given for o in level) for name, given in levels.items()}
            lacking = [None, *whole]
            return [
                Variant(
                    "" if gone is None else f"without {gone}",
                    merged(self.base, *(overrides for name, overrides in whole.items() if name != gone)),
                    (f"factors.{gone}",) if gone else ("base",),
                )
                for gone in lacking
            ]
        if self.mode == "grid":
            chosen = itertools.product(*([None, *given] for given in levels.values()))
        else:
            chosen = [(), *((level,) for given in levels.values() for level in given)]
        picked = [[level for level in choice if level is not None] for choice in chosen]
        return [
            Variant(
                " ".join(o for overrides, _ in levels for o in overrides),
                merged(self.base, *(overrides for overrides, _ in levels)),
                tuple(key for _, key in levels) or ("base",),
            )
            for levels in picked
        ]

    def jobs(self, variants: Sequence[Variant]) -> list[tuple[Variant, int, int]]:
        """(variant, seed, block) of every run: block by block, each in an order of its own."""
        jobs: list[tuple[Variant, int, int]] = []
        for block in range(self.blocks):
            once = [(variant, seed, block) for variant in variants for seed in self.seed_list]
            random.Random(f"{self.order_seed}/{block}").shuffle(once)
            jobs += once
        return jobs


def read_study(file: Path) -> Study:
    """The study of a YAML file; ConfigError names the file, the key and what is wrong with it."""
    try:
        data = plain_yaml(file)
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"{file} cannot be read: {error.strerror if isinstance(error, OSError) else error}"
        ) from error
    except (yaml.YAMLError, ValueError, RecursionError, OverflowError) as error:
        raise ConfigError(f"{file} is no YAML: {' '.join(str(error).split())}") from error
    if not isinstance(data, Mapping):
        raise ConfigError(f"{file} must hold keys: factors, and base, mode, seeds, blocks, order_seed")
    try:
        _check_shape(data)
        return construct(Study, data)
    except ConfigError as error:
        raise ConfigError(f"{file}: {str(error).removeprefix(': ')}") from error


_MOST_BYTES = 1 << 16  # a study of 1 MB took two minutes before its first line
_LONGEST = 10_000  # letters of a value
_DEEPEST = 20


def plain_yaml(file: Path) -> object:
    """What a YAML file holds. ValueError where it names a part of itself again, which may make it endless, or says of a
    value what it is, which YAML's reader takes at its word."""
    if (size := require_file(file)) > _MOST_BYTES:
        raise ValueError(f"it is {size} bytes, more than {_MOST_BYTES}")
    text = file.read_text(encoding="utf-8")
    depth = 0
    for event in yaml.parse(text, yaml.SafeLoader):
        depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
        if depth > _DEEPEST:
            raise ValueError(f"it is nested too deeply: {_DEEPEST} levels at most")
        if isinstance(event, yaml.AliasEvent):
            raise ValueError("it repeats a part of itself by *; write it out")
        if isinstance(event, yaml.ScalarEvent | yaml.CollectionStartEvent) and event.tag not in (None, "!"):
            raise ValueError(f"it says {show(str(event.tag))} of a value; write the value alone")
        if isinstance(event, yaml.ScalarEvent) and len(event.value) > _LONGEST:
            raise ValueError(f"it holds a value of {len(event.value)} letters, more than {_LONGEST}")
    return _plain(_OnceEach(text).get_single_data())


class _OnceEach(yaml.SafeLoader):
    """YAML's reader of plain data, which would take the last of keys that are the same."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, object]:
        keys = [self.construct_object(key, deep=True) for key, _ in node.value]
        for key, times in Counter(key for key in keys if isinstance(key, Hashable)).items():
            if times > 1:
                raise ValueError(f"it has {show(str(key))} twice; of the same keys only one would count")
        return super().construct_mapping(node, deep=deep)


def _plain(node: object) -> object:
    """The same. ValueError where YAML makes more of it than JSON knows: dates, bytes, sets."""
    if isinstance(node, Mapping):
        for key, value in node.items():
            _plain(key)
            _plain(value)
    elif isinstance(node, list):
        for each in node:
            _plain(each)
    elif not isinstance(node, str | int | float | None):
        raise ValueError(f"it holds a {type(node).__name__} ({show(str(node))}); put it into quotes")
    return node


def listed(level: str | Sequence[str]) -> Overrides:
    return (level,) if isinstance(level, str) else tuple(level)


def merged(*groups: Sequence[str]) -> Overrides:
    """Overrides of all groups; of those of one key the last counts."""
    by_key = {key_of(override): override for group in groups for override in group}
    return tuple(by_key.values())


def key_of(override: str) -> str:
    return override.partition("=")[0].lstrip("+~")


def job_overrides(variant: Variant, seed: int, block: int) -> list[str]:
    """What one run is trained with."""
    quiet = [] if any(key_of(o) == "tracker" for o in variant.overrides) else ["tracker=jsonl"]
    return [*variant.overrides, *quiet, f"seed={seed}", f"block={block}"]


def _check_shape(data: JsonObject) -> None:
    """What the types cannot say in words a user understands."""
    for key, value in data.items():
        if key == "factors" and not isinstance(value, Mapping):
            raise ConfigError(f"factors={show(value)} must map names to lists of overrides, as codec: [codec=bf16]")
    if "factors" not in data:
        other = next((str(key) for key in data if closest("factors", [str(key)])), None)
        meant = f"; rename {other}" if other else ""
        raise ConfigError(f"factors is missing; it maps names to lists of overrides{meant}")
    for name, levels in data["factors"].items():
        if not isinstance(levels, list):
            raise ConfigError(f"factors.{name}={show(levels)} must be a list of overrides, as [codec=bf16, codec=drop]")


def _check(key: str, override: str) -> None:
    trusted = os.environ.get(TRUST) == "1"
    if "=" not in override and not override.startswith("~"):
        raise ValueError(f"{key}={override} is no override; write key=value or group=option")
    if key_of(override) in _OWN:
        raise ValueError(f"{key}={override}: the study sets it; use its key {_OWN[key_of(override)]}")
    if "$" in _REFERENCE.sub("", override) and not trusted:
        raise ValueError(
            f"{key}={show(override)} reads the environment or more, and a study is data: give the value, or --trust"
        )
    if len(_REFERENCE.findall(override)) > 1 and not trusted:  # a row of such values doubles with each
        raise ValueError(f"{key}={show(override)} reads two keys; a value of a study may read one, as ${{seed}}")
    if key_of(override).rpartition(".")[2] in WRITTEN_FOLDERS and not trusted:
        raise ValueError(
            f"{key}={show(override)}: a study, which is data, chooses no folder to write to: take it out, or --trust"
        )
    if key_of(override) == "resume" and override.partition("=")[2] not in ("null", "auto") and not trusted:
        raise ValueError(
            f"{key}={show(override)}: a study, which is data, begins from no run of yours: take it out, or --trust"
        )
    if key_of(override) == "tracker.entity" and not trusted:
        raise ValueError(
            f"{key}={show(override)} sends runs to whom the study names: set WANDB_ENTITY in its place, or --trust"
        )
    group = key_of(override).partition("@")[0]
    if is_group(group) and not is_brought_group(group) and not trusted:
        raise ValueError(
            f"{key}={show(override)} chooses YAML of the folder {group} here, and a study is data: put it into a group "
            "of gnnpar, as model/, or --trust"
        )
    names_class = "_target_" in override or key_of(override) == "model.target"
    at_hydra = "hydra" in key_of(override).partition("@")[2]  # `_global_.hydra` is it, too
    if at_hydra or (names_class and not _is_known(override)):
        raise ValueError(
            f"{key}={show(override)} may run code of its own, and a study is data: put the class into a YAML file of "
            "its group and choose it by name, or --trust"
        )
    if re.search(r"\{.*:", override.partition("=")[2], re.DOTALL) and not trusted:
        raise ValueError(f"{key}={show(override)} sets several keys at once: write an override a key, or --trust")
    if key_of(override).startswith("hydra"):
        raise ValueError(f"{key}={override} is for the command line: gnnpar ablate FILE {override}")


def _is_known(override: str) -> bool:
    """Whether an override names one class, of gnnpar or of a plugin, or --trust allows any."""
    key, _, target = override.partition("=")
    with suppress(ValueError):
        refuse_foreign({"_target_": target}, override, remedy="")
        hidden = "$" in target or "_target_" in target or "_target_" in key.rpartition(".")[0]
        return os.environ.get(TRUST) == "1" or not hidden
    return False
