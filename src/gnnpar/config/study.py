"""Studies: a file with cells and methods, or factors, and its jobs in randomised blocks."""

from __future__ import annotations

import itertools
import json
import math
import random
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Annotated, Literal

import annotated_types as at
import yaml

from gnnpar.config.inputs import key_of
from gnnpar.files import JsonObject
from gnnpar.settings import ConfigError, Count, closest, config_errors, construct, show

Mode = Literal["grid", "one_at_a_time", "leave_one_out"]
Overrides = tuple[str, ...]
Repeats = Annotated[int, at.Ge(1), at.Le(10_000)]
MOST_RUNS = 100_000
_OWN = {"seed": "seeds", "block": "blocks"}
_KEY_OF = {"method": "methods", "cell": "cells"}  # axis -> its key in the file


Level = str | list[str]
BASE = "base"  # name of the reference configuration in a study of factors


@dataclass(frozen=True)
class Variant:
    """A configuration to compare. name: its difference to the base, '' for the base. overrides: the job's, in full."""

    name: str
    overrides: Overrides
    keys: tuple[str, ...] = ()  # place in the study file, for errors
    place: tuple[str, ...] = ()  # its name on each axis of the study


@dataclass(frozen=True, kw_only=True)
class Table:
    """A table of a study's report.

    title: text above it; with {AXIS} in it, a table for each name of that axis. rows: axes that make rows (all).
    columns: names of `gnnpar.report.columns`, or heading -> text with {NAME} in it. where: jobs that have a row.
    """

    columns: list[str] | dict[str, str]
    title: str = ""
    rows: list[str] = field(default_factory=list)
    where: list[str] = field(default_factory=list)


@dataclass(frozen=True, kw_only=True)
class Figure:
    """A figure of a study's report: `y`, a column, against the names of the axis `x`; a line for each name of `lines`.
    panels: axes with a panel per name. styles: name -> [colour, matplotlib's format]. letters: font size in points."""

    x: str
    y: str
    lines: str = "method"
    kind: Literal["line", "bar"] = "line"
    panels: list[str] = field(default_factory=list)
    scale: Literal["linear", "log", "log x", "log y"] = "linear"
    xlabel: str = ""
    ylabel: str = ""
    styles: dict[str, list[str]] = field(default_factory=dict)
    size: tuple[float, float] = (6, 4)
    letters: float = 9


@dataclass(frozen=True, kw_only=True)
class Study:
    """The keys of a study file, of methods (cells, methods) or of factors (base, factors, mode).

    cells: name -> overrides of `gnnpar train`, or axis -> name -> overrides, with their products as cells. methods:
    name -> overrides, or a list of names of methods in the file `methods_of` of the same folder. common: overrides of
    all jobs; later ones win: common, cells, methods.
    also: jobs as 'NAME' or 'NAME; NAME' -> overrides with the highest precedence. skip: jobs that do not run.
    only: NAME -> names that it combines with. at_most: jobs -> maximum number of runs of each. job: pattern of job
    names in raw lines, such as '{cell}; {method}'. smoke: overrides of a rehearsal.
    base: overrides. factors: name -> levels, each an override or a list of overrides.
    mode: grid (every combination of one level or none of each factor), one_at_a_time (the base and one level changed),
    leave_one_out (the base has all factors with all their overrides; each variant lacks one factor).
    run: seeds, their number or a list; blocks, the number of repetitions, each in another random order; shared_cores:
    show times even if ranks share cores; needs, minutes: for lists of studies.
    table: columns of one table; tables: several. headline: text above the tables, with {EXPRESSION:FORMAT} of
    `gnnpar.report.columns` in it, where a name in brackets is a job; note: text below them.
    """

    cells: dict[str, list[Level] | dict[str, list[Level]]] = field(default_factory=dict)
    methods: dict[str, list[Level]] = field(default_factory=dict)
    common: list[Level] = field(default_factory=list)
    also: dict[str, list[Level]] = field(default_factory=dict)
    skip: list[str] = field(default_factory=list)
    only: dict[str, list[str]] = field(default_factory=dict)
    at_most: dict[str, Count] = field(default_factory=dict)
    job: str = ""
    smoke: list[str] = field(default_factory=list)
    factors: dict[str, list[Level]] = field(default_factory=dict)
    base: list[str] = field(default_factory=list)
    mode: Mode = "one_at_a_time"
    seeds: Repeats | list[Count] = 1
    blocks: Repeats = 1
    order_seed: Count = 0
    needs: list[Literal["root", "quiet", "data"]] = field(default_factory=list)
    minutes: Count = 0
    table: list[str] | dict[str, str] = field(default_factory=list)
    tables: list[Table] = field(default_factory=list)
    figure: Figure | None = None
    headline: str = ""
    note: str = ""
    shared_cores: bool = False

    def __post_init__(self) -> None:
        if bool(self.factors) == bool(self.methods):
            raise ValueError("factors is empty; name at least one, as codec: [codec=bf16], or methods")
        if isinstance(self.seeds, list) and len(set(self.seeds)) < max(1, len(self.seeds)):
            raise ValueError(f"seeds={self.seeds} must be a list of different seeds, or how many there are")
        groups = {"also": self.also, "factors": self.factors}
        groups |= {_KEY_OF.get(axis, f"cells.{axis}"): names for axis, names in self.axes.items() if self.methods}
        given = {f"{key}.{name}": levels for key, names in groups.items() for name, levels in names.items()}
        for key, levels in {"base": self.base, "common": self.common, **given}.items():
            if not levels and key.startswith("factors"):
                raise ValueError(f"{key} is empty; give it at least one override, as codec=bf16")
            for i, override in ((i, o) for i, level in enumerate(levels) for o in listed(level)):
                _check(f"{key}[{i}]", override)
        variants = math.prod(map(len, self.axes.values())) if self.methods else sum(map(len, self.factors.values()))
        if self.mode == "grid":
            variants = math.prod(1 + len(levels) for levels in self.factors.values())
        runs = variants * len(self.seed_list) * self.blocks
        if runs > MOST_RUNS:
            raise ValueError(f"the study asks for {runs:,} runs, at most {MOST_RUNS:,} are listed; name fewer factors")
        known = [name for names in self.axes.values() for name in names]
        patterns = {"skip": self.skip, "at_most": self.at_most, "only": [*self.only, *chain(*self.only.values())]}
        patterns |= {"also": self.also, "where": chain(*(table.where for table in self.tables))}
        for key, name in ((key, name) for key, each in patterns.items() for p in each for name in p.split("; ")):
            if name not in known:
                raise ValueError(f"{key}: {show(name)} is no cell or method{closest(name, known)}")
        try:
            self.job.format(**dict.fromkeys(self.axes, ""))
        except (KeyError, ValueError, IndexError) as error:
            raise ValueError(f"job={show(self.job)} has a name that is no axis: {error}") from error

    @property
    def axes(self) -> Mapping[str, Mapping[str, Sequence[Level]]]:
        """Return axis -> name -> overrides, the methods last; for factors one axis of variants."""
        if self.factors:
            return {"variant": {variant.name or BASE: list(variant.overrides) for variant in self.variants()}}
        nested = {axis: names for axis, names in self.cells.items() if isinstance(names, dict)}
        flat = {name: levels for name, levels in self.cells.items() if isinstance(levels, list)}
        return nested | ({"cell": flat} if flat else {}) | {"method": self.methods}

    def _is_selected(self, place: Sequence[str]) -> bool:
        """Return False for a job in skip, or with a name that `only` combines with others of its axis."""
        wanted = [set(names) for name, names in self.only.items() if name in place]
        others = (
            (name, names & self.axes[axis].keys()) for axis, name in self.named(place).items() for names in wanted
        )
        return all(name in some for name, some in others if some) and not applies(self.skip, place)

    def named(self, place: Sequence[str]) -> dict[str, str]:
        """Return axis -> name."""
        return dict(zip(self.axes, place, strict=True))

    @property
    def seed_list(self) -> list[int]:
        return self.seeds if isinstance(self.seeds, list) else list(range(self.seeds))

    def variants(self) -> list[Variant]:
        """Return every cell with every method; for factors the base, then every variant to compare with it."""
        if self.methods:
            made: list[Variant] = []
            for place in itertools.product(*self.axes.values()):
                at = self.named(place)
                if self._is_selected(place):
                    also = [levels for name, levels in self.also.items() if applies([name], place)]
                    overrides = merged(self.common, *(self.axes[axis][name] for axis, name in at.items()), *also)
                    keys = tuple(f"{_KEY_OF.get(axis, f'cells.{axis}')}.{name}" for axis, name in at.items())
                    made.append(Variant(self.job.format(**at) or "; ".join(place), overrides, keys, place))
            return made

        def variant(name: str, groups: Iterable[Overrides], keys: Sequence[str]) -> Variant:
            return Variant(name, merged(self.base, *groups), tuple(keys) or ("base",), (name or BASE,))

        if self.mode == "leave_one_out":
            whole = {name: tuple(chain(*map(listed, given))) for name, given in self.factors.items()}
            return [variant("", whole.values(), ())] + [
                variant(f"without {gone}", [own for name, own in whole.items() if name != gone], [f"factors.{gone}"])
                for gone in whole
            ]
        levels = [
            [(listed(level), f"factors.{name}[{i}]") for i, level in enumerate(given)]
            for name, given in self.factors.items()
        ]
        chosen = [(), *((level,) for level in chain(*levels))]
        if self.mode == "grid":
            each_or_none = itertools.product(*([None, *given] for given in levels))
            chosen = [tuple(level for level in choice if level is not None) for choice in each_or_none]
        return [
            variant(" ".join(chain(*(own for own, _ in each))), [own for own, _ in each], [key for _, key in each])
            for each in chosen
        ]

    def max_runs(self, variant: Variant) -> int:
        """Return the maximum number of runs of a variant, blocks times seeds."""
        limits = [n for pattern, n in self.at_most.items() if applies([pattern], variant.place)]
        return min([self.blocks * len(self.seed_list), *limits])

    def jobs(self, variants: Sequence[Variant]) -> list[tuple[Variant, int, int]]:
        """Return (variant, seed, block) of every run, block by block, seed by seed, each in a random order."""
        jobs: list[tuple[Variant, int, int]] = []
        for block in range(self.blocks):
            order = random.Random(f"{self.order_seed}/{block}")
            for i, seed in order.sample([*enumerate(self.seed_list)], len(self.seed_list)):
                once = [v for v in variants if block * len(self.seed_list) + i < self.max_runs(v)]
                jobs += [(variant, seed, block) for variant in order.sample(once, len(once))]
        return jobs


def read_study(file: Path) -> Study:
    """Read a study. Raise ConfigError that names the file, the key and the problem."""
    data = _read(file)
    with config_errors(str(file)):
        if isinstance(run := data.get("run", {}), dict):
            data = {key: value for key, value in data.items() if key != "run"} | run
        if "methods_of" in data:
            data = _with_methods(file.parent, data)
        _check_shape(data)
        return construct(Study, data)


def _read(file: Path) -> JsonObject:
    try:
        data = json.loads(json.dumps(yaml.safe_load(file.read_text(encoding="utf-8")), default=str))  # dates as text
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"{file} cannot be read: {error.strerror if isinstance(error, OSError) else error}"
        ) from error
    except (yaml.YAMLError, ValueError, TypeError, RecursionError, OverflowError) as error:
        raise ConfigError(f"{file} is no YAML: {' '.join(str(error).split())}") from error
    if not isinstance(data, dict):
        raise ConfigError(f"{file} must hold keys: cells, methods, common, run, table; or base, factors, seeds, blocks")
    return data


def _with_methods(folder: Path, data: JsonObject) -> JsonObject:
    """Replace the list of names in `methods` by these methods of the file in `methods_of`."""
    names, known = data.get("methods"), _read(folder / str(data["methods_of"])).get("methods")
    if not isinstance(names, list) or not isinstance(known, dict):
        raise ConfigError(f"methods_of={show(data['methods_of'])} must have methods, and methods be a list of names")
    for name in names:
        if name not in known:
            raise ConfigError(f"methods: {show(name)} is not in {data['methods_of']}{closest(str(name), known)}")
    return {key: value for key, value in data.items() if key != "methods_of"} | {
        "methods": {name: known[name] for name in names}
    }


def applies(patterns: Iterable[str], place: Iterable[str]) -> bool:
    """Return True if one of the patterns 'NAME; NAME' has only names of this place."""
    return any(set(pattern.split("; ")) <= set(place) for pattern in patterns)


def listed(level: str | Sequence[str]) -> Overrides:
    return (level,) if isinstance(level, str) else tuple(level)


def merged(*groups: Sequence[Level]) -> Overrides:
    """Return the overrides of all groups; the last one of each key wins."""
    by_key = {key_of(override): override for group in groups for level in group for override in listed(level)}
    return tuple(by_key.values())


def job_overrides(variant: Variant, seed: int, block: int) -> list[str]:
    """Return the overrides of one run."""
    quiet = [] if any(key_of(o) == "tracker" for o in variant.overrides) else ["tracker=jsonl"]
    return [*variant.overrides, *quiet, f"seed={seed}", f"block={block}"]


def _check_shape(data: JsonObject) -> None:
    """Raise ConfigError for a missing mapping or list, in clearer words than the type checker's."""
    if "methods" in data or "cells" in data:
        return
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
        raise ValueError(f"{key}={show(override)} is for the command line: gnnpar study FILE {override}")
