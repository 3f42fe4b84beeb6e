"""Mutations for the fuzzers of file formats, and how a case ended. The number of a case is its seed."""

from __future__ import annotations

import random
import traceback
import warnings
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

Ending = Literal["accepted", "refused", "traceback", "silent"]


class Silent(AssertionError):
    """A wrong input was accepted."""


@dataclass
class Counts:
    """Numbers of cases by ending, and `findings`: cases that ended with a traceback or silently."""

    ended: Counter[str] = field(default_factory=Counter)
    findings: list[str] = field(default_factory=list)

    def add(self, name: str, ending: Ending, what: str) -> None:
        self.ended[ending] += 1
        if ending not in ("accepted", "refused"):
            self.findings.append(f"{name}: {ending}: {what}")


def attempt(case: Callable[[], object]) -> tuple[Ending, str]:
    """Run a case. It is accepted, or refused by a ValueError of one line; anything else is a finding."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            case()
    except Silent as error:
        return "silent", str(error)
    except Exception as error:
        text = str(error)
        one_line = bool(text) and "\n" not in text and len(text) < 1000
        if type(error).__name__ in ("ValueError", "ConfigError") and one_line:
            return "refused", text
        tail = "".join(traceback.format_tb(error.__traceback__)[-3:])
        return "traceback", f"{type(error).__name__}: {text[:300]!r}\n{tail}"
    return "accepted", ""


def damaged(whole: bytes, rng: random.Random) -> bytes:
    """Flip, cut, insert, repeat or delete some bytes."""
    data = bytearray(whole)
    for _ in range(rng.choice((1, 1, 1, 2, 4))):
        at = rng.randrange(len(data) + 1)
        length = min(len(data) - at, rng.choice((1, 2, 8, 64, 1024)))
        kind = rng.randrange(6)
        if kind == 0 and data:
            data[min(at, len(data) - 1)] ^= 1 << rng.randrange(8)
        elif kind == 1:
            del data[at:]
        elif kind == 2:
            del data[at : at + length]
        elif kind == 3:
            data[at : at + length] = rng.randbytes(length)
        elif kind == 4:
            data[at:at] = data[at : at + length]
        else:
            data[at : at + length] = b"\x00" * length
    return bytes(data)
