"""Random overrides compose to settings that can be checked, or are refused in one line."""

import random
import re
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from composing import names
from gnnpar.config.compose import compose
from gnnpar.launch.launch import world_of
from gnnpar.settings import iter_groups
from gnnpar.training.checks import check

CASES, SLOW_CASES = 25, 1000
TINY = ("debug=tiny", "comm=threads", "tracker=jsonl", "threads_per_rank=1", "checkpoint.keep=0", "epochs=1")
VALUES = (
    *("0", "1", "-1", "0.5", "64", "4097", "1e3", "1e400", "9223372036854775808", "nan", "-inf", "null", "true", "''"),
    *("x", "auto", "a/b", "../x", "[]", "[1,2]", "[null]", "[[1]]", "{}", "{a:1}", "{_target_:os.system}", "'\x1b[2J'"),
    *("${seed}", "${nothing}", "${oc.env:NOT_THERE}", "???", "'a=b'", "a:b", "#", "gcn", "x" * 300, "1,2", "range(3)"),
)
SHAPES = ("{key}={value}", "+{key}={value}", "++{key}={value}", "~{key}", "{key}", "={value}", "{key}.x={value}")


@cache
def keys(choice: str) -> tuple[str, ...]:
    """Return every key of the group that a choice such as model=gat is of; every key for no choice."""
    group = choice.partition("=")[0]
    found = paths(compose([choice] if choice else []).resolved, "")
    return tuple(path for path in found if path.startswith(f"{group}." if group else ""))


def paths(tree: Mapping[str, Any], prefix: str) -> Iterator[str]:
    for key, value in tree.items():
        yield f"{prefix}{key}"
        if isinstance(value, Mapping):
            yield from paths(value, f"{prefix}{key}.")


def overrides(number: int) -> list[str]:
    """Return the overrides of case `number`."""
    rng = random.Random(f"override/{number}")
    group = rng.choice(("strategy", "model", "optim", "partition", "codec", "comm", ""))
    choice = group and f"{group}={rng.choice(names(group))}"
    found = [choice] if choice else []
    for _ in range(rng.choice((1, 1, 2, 3))):
        if rng.random() < 0.1:
            other = rng.choice([*iter_groups()])
            found.append(f"{other}={rng.choice([*names(other), 'x', 'null', '../x', '[]'])}")
        else:
            shape = SHAPES[0] if rng.random() < 0.6 else rng.choice(SHAPES)
            found.append(shape.format(key=rng.choice(keys(choice) or keys("")), value=rng.choice(VALUES)))
    return found


def is_accepted(given: list[str], place: Path) -> bool:
    try:
        settings = compose([*TINY, f"data_dir={place}", f"cache_dir={place}", *given])
        check(settings, world_of(settings))
    except Exception as error:
        if not isinstance(error, ValueError) or not re.fullmatch(".{1,999}", str(error)):
            raise AssertionError(given) from error
        return False
    return True


@pytest.mark.slow
def test_random_overrides_are_accepted_or_refused_in_one_line(tmp_path: Path) -> None:
    accepted = [is_accepted(overrides(number), tmp_path) for number in range(CASES)]
    assert any(accepted) and not all(accepted)


@pytest.mark.slow
def test_many_random_overrides_are_accepted_or_refused_in_one_line(tmp_path: Path) -> None:
    for number in range(CASES, SLOW_CASES):
        is_accepted(overrides(number), tmp_path)


@pytest.mark.parametrize("given", ["codec=[null]", "optim=[1]", "shards=64"])
def test_group_or_shards_without_a_name_are_refused(given: str, tmp_path: Path) -> None:
    assert not is_accepted([given], tmp_path)
