"""What the fuzzers share: mutations, and a trap that says how one case ended.

A case is its number: the same number is the same mutation, in `make test`, in `make test-all` and when one is looked
into.
"""

from __future__ import annotations

import json
import math
import random
import resource
import signal
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal

Ending = Literal["accepted", "refused", "traceback", "hung", "silent"]
CPU_SECONDS = 20.0  # of one case, before it counts as hung
MEMORY_BYTES = 4 << 30  # of address space, beyond what the process has


class Silent(AssertionError):
    """Something was accepted and is not what it says."""


class _Hung(BaseException):
    pass


@dataclass
class Counts:
    """How cases ended; `findings`: those that must not be."""

    ended: Counter[str] = field(default_factory=Counter)
    findings: list[str] = field(default_factory=list)

    def add(self, name: str, ending: Ending, what: str) -> None:
        self.ended[ending] += 1
        if ending not in ("accepted", "refused"):
            self.findings.append(f"{name}: {ending}: {what}")


def attempt(case: Callable[[], object]) -> tuple[Ending, str]:
    """Run one case: it ends with a result, or is refused by a ValueError of one line; all else is a finding."""
    try:
        with warnings.catch_warnings(), limited():
            warnings.simplefilter("ignore")
            case()
    except Silent as error:
        return "silent", str(error)
    except _Hung:
        return "hung", f"more than {CPU_SECONDS:g} CPU seconds"
    except ValueError as error:
        text = str(error)
        plain = type(error).__name__ in ("ValueError", "ConfigError")
        if plain and text and "\n" not in text and len(text) < 1000:
            return "refused", text
        return "traceback", f"{type(error).__name__}: {text[:300]!r}\n{_tail(error)}"
    except Exception as error:
        return "traceback", f"{type(error).__name__}: {str(error)[:300]}\n{_tail(error)}"
    return "accepted", ""


def _tail(error: BaseException) -> str:
    return "".join(traceback.format_tb(error.__traceback__)[-3:])


@contextmanager
def limited() -> Iterator[None]:
    """Inside, CPU time and memory are bounded: what asks for too much fails as it would on a small machine."""

    def hung(signum: int, frame: object) -> None:
        raise _Hung

    before = signal.signal(signal.SIGPROF, hung)
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (_address_space() + MEMORY_BYTES, hard))
    signal.setitimer(signal.ITIMER_PROF, CPU_SECONDS)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
        signal.signal(signal.SIGPROF, before)


def _address_space() -> int:
    with open("/proc/self/statm", encoding="ascii") as statm:
        return int(statm.read().split()[0]) * resource.getpagesize()


BYTES_OF_NOTE = (
    b"\x00",
    b"\xff",
    b"\n",
    b'"',
    b"[",
    b"]",
    b"{",
    b"}",
    b",",
    b"-",
    b"9" * 400,
    b"\x1b[2J",
    b"NaN",
    b"1e999",
)


def damaged(whole: bytes, rng: random.Random) -> bytes:
    """Some bytes flipped, cut, doubled, inserted or lost."""
    data = bytearray(whole)
    for _ in range(rng.choice((1, 1, 1, 2, 4))):
        at = rng.randrange(len(data) + 1)
        length = min(len(data) - at, rng.choice((1, 2, 8, 64, 1024)))
        kind = rng.randrange(7)
        if kind == 0 and data:
            data[min(at, len(data) - 1)] ^= 1 << rng.randrange(8)
        elif kind == 1:
            del data[at:]
        elif kind == 2:
            del data[at : at + length]
        elif kind == 3:
            data[at:at] = rng.choice(BYTES_OF_NOTE)
        elif kind == 4:
            data[at : at + length] = rng.randbytes(length)
        elif kind == 5:
            data[at:at] = data[at : at + length]
        else:
            data[at : at + length] = b"\x00" * length
    return bytes(data)


def _nested(depth: int) -> Any:
    tree: Any = 0
    for i in range(depth):
        tree = [tree] if i % 2 else {"a": tree}
    return tree


VALUES: tuple[Any, ...] = (
    *(None, True, False, 0, 1, 2, -1, 3.5, -0.0, 7, 255, 2**31, 2**32, 2**63 - 1, -(2**63), 2**63, 10**25, 10**400),
    *(1e300, -1e300, 5e-324, math.nan, math.inf, -math.inf),
    *("", "x", "0", "-1", "null", "nan", "../../x", "/etc/passwd", "a/b", "x" * 5000, "\x1b[31mred\x1b]0;t\x07"),
    *("\u202e\u0000", "\ud800", "line\nline", "gnnpar.models.gcn.GCN", "os.system", "{} %s {0}"),
    *([], {}, [[]], [{}], [None], [1, 2], ["x"], {"a": 1}, {"_target_": "os.system"}, [1] * 300),
    *(_nested(70), _nested(400)),
)


def changed(tree: Any, rng: random.Random) -> Any:
    """JSON with one node replaced, lost, renamed or added."""
    if isinstance(tree, (dict, list)) and tree and rng.random() < 0.85:
        key = rng.choice(list(tree)) if isinstance(tree, dict) else rng.randrange(len(tree))
        copy: Any = dict(tree) if isinstance(tree, dict) else list(tree)
        kind = rng.random()
        if kind < 0.12:
            del copy[key]
        elif kind < 0.17 and isinstance(copy, dict):
            copy[rng.choice(("", "x", "_target_", "\x1b[2J", "a.b", str(key).upper()))] = copy.pop(key)
        elif kind < 0.22 and isinstance(copy, list):
            copy.append(copy[key])
        elif kind < 0.27:
            other = rng.choice(list(copy)) if isinstance(copy, dict) else rng.randrange(len(copy))
            copy[key], copy[other] = copy[other], copy[key]
        else:
            copy[key] = changed(copy[key], rng)
        return copy
    if isinstance(tree, (int, float)) and not isinstance(tree, bool) and rng.random() < 0.3:
        return rng.choice((tree + 1, tree - 1, -tree, tree * 1000, str(tree), [tree], tree * 10**18))
    return rng.choice(VALUES)


def json_text(tree: Any) -> str:
    """JSON, whatever the size of a whole number."""
    import sys

    before = sys.get_int_max_str_digits()
    sys.set_int_max_str_digits(0)
    try:
        return json.dumps(tree)
    finally:
        sys.set_int_max_str_digits(before)
