"""Ablation studies: a file that names factors, and the jobs it asks for, in randomised blocks."""

from __future__ import annotations

import itertools
import json
import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import annotated_types as at
import yaml

from gnnpar.config.inputs import key_of
from gnnpar.files import JsonObject
from gnnpar.settings import ConfigError, Count, closest, construct, show

Mode = Literal["grid", "one_at_a_time", "leave_one_out"]
Overrides = tuple[str, ...]
Repeats = Annotated[int, at.Ge(1), at.Le(10_000)]
MOST_RUNS = 100_000
_OWN = {"seed": "seeds", "block": "blocks"}


@dataclass(frozen=True)
class Variant:
    """A configuration to compare. `name`: its difference to the base, '' for the base; overrides: all of the job's."""

    name: str
    overrides: Overrides
    keys: tuple[str, ...] = ()  # place in the study file, for errors


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
        """Return the base, then every variant that is compared with it."""
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
        """Return (variant, seed, block) of every run, block by block, each block in a random order of its own."""
        jobs: list[tuple[Variant, int, int]] = []
        for block in range(self.blocks):
            once = [(variant, seed, block) for variant in variants for seed in self.seed_list]
            random.Random(f"{self.order_seed}/{block}").shuffle(once)
            jobs += once
        return jobs


def read_study(file: Path) -> Study:
    """Read a study. Raises ConfigError that names the file, the key and the problem."""
    try:
        data = json.loads(json.dumps(yaml.safe_load(file.read_text(encoding="utf-8")), default=str))  # dates as text
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"{file} cannot be read: {error.strerror if isinstance(error, OSError) else error}"
        ) from error
    except (yaml.YAMLError, ValueError, TypeError, RecursionError, OverflowError) as error:
        raise ConfigError(f"{file} is no YAML: {' '.join(str(error).split())}") from error
    if not isinstance(data, Mapping):
        raise ConfigError(f"{file} must hold keys: factors, and base, mode, seeds, blocks, order_seed")
    try:
        _check_shape(data)
        return construct(Study, data)
    except ConfigError as error:
        raise ConfigError(f"{file}: {str(error).removeprefix(': ')}") from error


def listed(level: str | Sequence[str]) -> Overrides:
    return (level,) if isinstance(level, str) else tuple(level)


def merged(*groups: Sequence[str]) -> Overrides:
    """Return the overrides of all groups; the last one of each key wins."""
    by_key = {key_of(override): override for group in groups for override in group}
    return tuple(by_key.values())


def job_overrides(variant: Variant, seed: int, block: int) -> list[str]:
    """Return the overrides of one run."""
    quiet = [] if any(key_of(o) == "tracker" for o in variant.overrides) else ["tracker=jsonl"]
    return [*variant.overrides, *quiet, f"seed={seed}", f"block={block}"]


def _check_shape(data: JsonObject) -> None:
    """Raise ConfigError where a mapping or list is missing, in clearer words than the type checker's."""
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
    if "=" not in override and not override.startswith("~"):
        raise ValueError(f"{key}={override} is no override; write key=value or group=option")
    if key_of(override) in _OWN:
        raise ValueError(f"{key}={override}: the study sets it; use its key {_OWN[key_of(override)]}")
    if "hydra" in key_of(override):  # launchers, sweepers and callbacks name classes
        raise ValueError(f"{key}={show(override)} is for the command line: gnnpar ablate FILE {override}")
