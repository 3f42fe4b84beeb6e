"""Overrides that somebody may type, or a sweep hold: each gives a run that can be trained, or is refused in a line."""

from __future__ import annotations

import dataclasses
import random
import re
from collections.abc import Iterator, Mapping
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest

from attack.fuzzing import Counts, Silent, attempt
from composing import names
from gnnpar.cli.train import run_training
from gnnpar.config.compose import compose
from gnnpar.launch.launch import world_of
from gnnpar.settings import iter_groups
from gnnpar.training.checks import check

FEW, MANY = 60, 2000
TRAINED = 40
"""Every so manyth case is trained, where it is accepted."""
TINY = ("debug=tiny", "comm=threads", "tracker=jsonl", "threads_per_rank=1", "checkpoint.keep=0", "epochs=1")

VALUES = (
    *("0", "1", "-1", "2", "3", "0.5", "-0.5", "7", "64", "4096", "4097", "1e3", "1e12", "1e400", "-1e400", "1e-400"),
    *("10000000000000000000", "9223372036854775807", "9223372036854775808", "2147483648", "1000000000000"),
    *("nan", "inf", "-inf", ".inf", ".nan", "null", "true", "false", "''", "' '", "x", "auto", "one", "a/b", "../x"),
    *(
        "[]",
        "[1]",
        "[1,2]",
        "[null]",
        "{}",
        "{a:1}",
        "{_target_:os.system}",
        "[[1]]",
        "[1e400]",
        "\\x1b[2J",
        "'\x1b[2J'",
    ),
    *("${seed}", "${nothing}", "${oc.env:HOME}", "${oc.env:NOT_THERE}", "???", "'a=b'", "a:b", "#", "1_000", "0x10"),
    *("gcn", "single", "os.system", "gnnpar.models.gcn.GCN", "\u202e", "x" * 300, "1,2", "range(3)", "glob(*)"),
)
SHAPES = ("{key}={value}", "{key}={value}", "{key}={value}", "{key}={value}", "+{key}={value}", "++{key}={value}")
ODD_SHAPES = (
    "~{key}",
    "~{key}={value}",
    "{key}",
    "{key}=",
    "={value}",
    "{key}.x={value}",
    "{key}@x={value}",
    "--{key}",
)


@cache
def keys(choice: str) -> dict[str, Any]:
    """Every key of the group that a choice such as model=gat is of, with its value; of the rest for no choice."""
    group = choice.partition("=")[0]
    paths = dict(_paths(compose([choice] if choice else []).resolved, ""))
    return {path: value for path, value in paths.items() if not group or path.startswith(f"{group}.")}


def _paths(tree: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, Any]]:
    for key, value in tree.items():
        yield f"{prefix}{key}", value
        if isinstance(value, Mapping):
            yield from _paths(value, f"{prefix}{key}.")


def near(value: Any, rng: random.Random) -> str:
    """A value that a user might change another to."""
    if isinstance(value, bool):
        return str(not value).lower()
    if isinstance(value, (int, float)):
        return str(rng.choice((value, value + 1, value * 2, max(0, value - 1), value / 2)))
    return "null" if value is None else str(value) if isinstance(value, str) else rng.choice(VALUES)


def overrides(number: int) -> list[str]:
    """Those of case `number`, beside a small run's."""
    rng = random.Random(f"override/{number}")
    group = rng.choice(("strategy", "model", "optim", "partition", "codec", "comm", ""))
    choice = group and f"{group}={rng.choice(names(group))}"
    found = [choice] if choice else []
    for _ in range(rng.choice((1, 1, 2, 3))):
        if rng.random() < 0.1:
            other = rng.choice([*iter_groups()])
            found.append(f"{other}={rng.choice([*names(other), 'x', 'null', '../x', '[]'])}")
            continue
        known = keys(choice) or keys("")
        key = rng.choice(list(known))
        if rng.random() < 0.5:
            found.append(f"{key}={near(known[key], rng)}")
            continue
        shape = rng.choice(SHAPES if rng.random() < 0.9 else ODD_SHAPES)
        found.append(shape.format(key=key, value=rng.choice(VALUES)))
    return found


def one(number: int, place: Path) -> None:
    """Compose it as a command does; where all checks accept it, and its turn has come, train an epoch."""
    given = overrides(number)
    settings = compose([*TINY, f"data_dir={place}", f"cache_dir={place}", *given])
    if re.search(r"=(-?inf|nan)\b", repr(dataclasses.replace(settings, resolved={}, names={}))):
        raise Silent(f"{given} brings a number that is not finite")
    check(settings, world_of(settings))
    if number % TRAINED or settings.world_size > 8 or settings.epochs > 8:
        return
    quiet = dataclasses.replace(settings, tracker=compose(["tracker=jsonl"]).tracker)
    folder = place / str(number)
    folder.mkdir()
    outcome = run_training(quiet, folder)
    if (
        outcome.error is not None
        and re.match(r"rank \d+: (ValueError|ConfigError|MemoryError): ", outcome.error) is None
    ):
        raise RuntimeError(f"{given}: {outcome.error}\n{outcome.traceback[-600:]}")


def fuzz(numbers: range, place: Path, counts: Counts) -> None:
    for number in numbers:
        counts.add(f"override {number} {overrides(number)}", *attempt(partial(one, number, place)))


def test_an_override_is_taken_or_refused_in_one_line(tmp_path: Path) -> None:
    counts = Counts()
    fuzz(range(FEW), tmp_path, counts)
    assert not counts.findings, "\n".join(counts.findings)
    assert counts.ended["accepted"] > FEW // 10
    assert counts.ended["refused"] > FEW // 10


@pytest.mark.slow
def test_many_overrides_are_taken_or_refused_in_one_line(tmp_path: Path) -> None:
    counts = Counts()
    fuzz(range(FEW, MANY), tmp_path, counts)
    assert not counts.findings, "\n".join(counts.findings[:20])


@pytest.mark.parametrize("given", ["codec=[null]", "optim=[1]", "shards=64"])
def test_a_group_or_shards_that_are_no_name_are_one_line(given: str) -> None:
    """Hydra and pathlib raised TypeErrors."""
    assert attempt(lambda: compose([*TINY, given]))[0] == "refused"
