"""Available strategies: one YAML file each in strategy/ of gnnpar's conf, installed packages, and the working folder.

Files are read without Hydra, since ranks plan too. Only plain keys are used; references to other groups (codec) take
the class's default. Files of the working folder need --trust: the user did not name them, and they may name any class.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path

import yaml

from gnnpar.files import JsonDict
from gnnpar.models.gnn import ModelSource
from gnnpar.parallel.declared import Enumerated, Priced, Problem
from gnnpar.parallel.needs import refuse
from gnnpar.parallel.strategy import Strategy, check_members
from gnnpar.paths import conf_dir, installed_confs
from gnnpar.placement import QUALITIES, Quality
from gnnpar.pricing.candidate import Candidate, Scope
from gnnpar.pricing.machine import Machine
from gnnpar.pricing.price import Price
from gnnpar.pricing.work import Work
from gnnpar.settings import instantiate
from gnnpar.targets import TRUST
from gnnpar.track.text import printable

GROUP = "strategy"


@dataclass(frozen=True)
class Registry:
    """Strategies by name. yaml: plain keys of each file. broken: why a file is not a strategy. with_codec: strategies
    that take the command line's codec=."""

    strategies: Mapping[str, Strategy]
    yaml: Mapping[str, JsonDict] = field(default_factory=dict)
    broken: Mapping[str, str] = field(default_factory=dict)
    with_codec: frozenset[str] = frozenset()

    def candidates(
        self, scope: Scope, ranks: int, problem: Problem | None = None, allowed: frozenset[Quality] = frozenset()
    ) -> list[Candidate]:
        """Return all configurations on exactly `ranks` ranks. problem: for strategies that price only their YAML. Omit
        sampling strategies unless `sampled` is allowed, since pricing draws samples."""
        candidates: dict[Candidate, None] = {}
        for name, strategy in self.strategies.items():
            if (scope.ir.moments or scope.ir.totals) and not strategy.capabilities.moments:
                continue
            if isinstance(strategy, Enumerated):
                candidates |= dict.fromkeys(strategy.candidates(scope, ranks))
                continue
            runs = ranks <= (strategy.capabilities.max_ranks or ranks)
            if isinstance(strategy, Priced) and problem is not None and runs and not _left_out(strategy, allowed):
                candidates[Configured(family=name, parts=ranks, strategy=strategy, problem=problem)] = None
        return list(candidates)

    def carrying(self, model: ModelSource) -> Registry:
        """Return a registry of the strategies that can run a model; the others are `broken`, with the reason."""
        refused: dict[str, str] = {}
        for name, strategy in self.strategies.items():
            try:
                refuse(strategy, model, {"strategy": name})
            except ValueError as error:
                refused[name] = str(error)
        able = {name: strategy for name, strategy in self.strategies.items() if name not in refused}
        return replace(self, strategies=able, broken={**self.broken, **refused})

    def unpriced(self, allowed: frozenset[Quality] = frozenset()) -> dict[str, str]:
        """Return name -> why a strategy has no candidates for these classes."""
        unpriced = dict(self.broken)
        for name, strategy in self.strategies.items():
            if not isinstance(strategy, Priced):
                unpriced[name] = f"{type(strategy).__name__} has no cost(problem, machine)"
            elif _left_out(strategy, allowed):
                unpriced[name] = "it is sampled, which is not allowed; --quality sampled or gnnpar estimate prices it"
        return unpriced

    def strategy_of(self, candidate: Candidate) -> Strategy:
        """Return the strategy of a candidate, with the fields that the candidate sets."""
        if not candidate.fields:
            return self.strategies[candidate.family]
        return instantiate({**self.yaml[candidate.family], **candidate.fields}, "strategy")


def _left_out(strategy: Strategy, allowed: frozenset[Quality]) -> bool:
    """Return True if the strategy's YAML samples and sampling is not allowed."""
    sampled = not isinstance(strategy, Enumerated) and "sampled" in strategy.exactness
    return sampled and "sampled" not in allowed


@dataclass(frozen=True, kw_only=True)
class Configured(Candidate):
    """A strategy as its YAML configures it, if it prices itself and enumerates no candidates."""

    strategy: Strategy = field(compare=False, repr=False)
    problem: Problem | None = field(default=None, compare=False, repr=False)

    @property
    def label(self) -> str:
        return self.family

    @property
    def quality(self) -> frozenset[Quality]:
        return frozenset(q for q in QUALITIES if q in self.strategy.exactness)

    @property
    def engine(self) -> str:
        return ""

    def as_json(self) -> JsonDict:
        return {"family": self.family, "parts": self.parts, "stages": self.stages, "held": self.held}

    def price(self, work: Work, machine: Machine) -> Price:
        assert self.problem is not None
        assert isinstance(self.strategy, Priced)
        other = self.problem.work_of
        here = replace(self.problem, ranks=self.ranks, work_of=lambda n: work if n == self.parts else other(n))
        try:
            price = self.strategy.cost(here, machine)
        except ValueError as error:
            price = Price(unpriced=" ".join(str(error).split()))
        return replace(price, label=price.label or self.label)


def registry() -> Registry:
    """Return strategies of gnnpar, of installed packages and, with --trust, of the working folder."""
    installed, here = (conf_dir(), *installed_confs()), Path.cwd()
    if os.environ.get(TRUST) == "1":
        return _read((*installed, here))
    read = _read(installed)
    there = {printable(file.stem) for file in (here / GROUP).glob("*.yaml")} - {*read.strategies, *read.broken}
    closed = dict.fromkeys(sorted(there), f"it lies in this folder's {GROUP}/, which is read with --trust, as code")
    return replace(read, broken={**read.broken, **closed})


def shipped() -> Registry:
    """Return gnnpar's own strategies."""
    return _read((conf_dir(),))


def _read(folders: Iterable[Path]) -> Registry:
    files: dict[str, Path] = {}
    for folder in folders:
        for file in sorted((folder / GROUP).glob("*.yaml")):
            files.setdefault(file.stem, file)
    there = {name: file for name, file in sorted(files.items()) if file.exists()}
    of_files = tuple((name, file, file.stat().st_mtime_ns) for name, file in there.items())
    return _merged(of_files)


@cache
def _merged(files: tuple[tuple[str, Path, int], ...]) -> Registry:
    paths = {name: file for name, file, _ in files}
    strategies: dict[str, Strategy] = {}
    yaml_of: dict[str, JsonDict] = {}
    broken: dict[str, str] = {}
    with_codec = set[str]()
    for name in paths:
        try:
            keys = _keys(name, paths)
            plain = {key: value for key, value in keys.items() if not (isinstance(value, str) and "${" in value)}
            strategy = instantiate(plain, f"strategy={name}")
            check_members(strategy)
            strategies[name], yaml_of[name] = strategy, plain
        except RecursionError:
            broken[name] = "it is nested too deeply"
        except (ValueError, yaml.YAMLError, OSError, KeyError) as error:
            broken[name] = " ".join(str(error).split()) or type(error).__name__
        else:
            with_codec |= {name} if keys.get("codec") == "${codec}" else set()
    return Registry(strategies, yaml_of, broken, frozenset(with_codec))


def _keys(name: str, paths: Mapping[str, Path], extending: tuple[str, ...] = ()) -> JsonDict:
    """Return the keys of a file and of the strategies that it extends. ValueError for an invalid file."""
    data = yaml.safe_load(paths[name].read_text(encoding="utf-8")) or {}
    if name in extending:
        raise ValueError(f"it extends itself: {' -> '.join((*extending, name))}")
    if not isinstance(data, dict) or not isinstance(defaults := data.pop("defaults", []), list):
        raise ValueError("it must hold keys, and its defaults be a list")
    keys: JsonDict = {}
    for other in defaults:
        if isinstance(other, str) and other in paths:
            keys |= _keys(other, paths, (*extending, name))
    return keys | data
