"""Numbers with units, as in topology files: '25 Gbit/s', '16 GiB', '5 us', '14 Tflop/s'."""

from __future__ import annotations

import difflib
import math
import re
from typing import Literal

Dimension = Literal["rate", "bytes", "seconds", "speed"]

_DECIMAL = {"": 1.0, "k": 1e3, "M": 1e6, "G": 1e9, "T": 1e12, "P": 1e15}
_BINARY = {"Ki": 2.0**10, "Mi": 2.0**20, "Gi": 2.0**30, "Ti": 2.0**40}
_BYTES = {f"{p}B": f for p, f in (_DECIMAL | _BINARY).items()}
UNITS: dict[Dimension, dict[str, float]] = {
    "bytes": _BYTES,
    "rate": {f"{u}/s": f for u, f in _BYTES.items()} | {f"{p}bit/s": f / 8 for p, f in _DECIMAL.items()},
    "seconds": {"s": 1.0, "ms": 1e-3, "us": 1e-6, "ns": 1e-9},
    "speed": {f"{p}flop/s": f for p, f in _DECIMAL.items()},
}
_EXAMPLE: dict[Dimension, str] = {"bytes": "16 GiB", "rate": "25 Gbit/s", "seconds": "5 us", "speed": "14 Tflop/s"}
_SHAPE = re.compile(r"\s*([-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?)\s*([A-Za-z/]+)\s*")


def parse(text: object, dimension: Dimension, *, name: str, zero: bool = False) -> float:
    """Return the value in base units: bytes, bytes/s, s, flop/s. Raises ValueError in one line. `zero`: 0 is
    allowed."""
    example = _EXAMPLE[dimension]
    match = _SHAPE.fullmatch(text) if isinstance(text, str) else None
    if match is None:
        raise ValueError(f"{name}={text} must be a number and a unit, such as {example}")
    number, unit = float(match[1]), match[2]
    factors = UNITS[dimension]
    if unit not in factors:
        close = [u for u in factors if u.lower() == unit.lower()] or difflib.get_close_matches(
            unit, factors, cutoff=0.5
        )
        hint = f", did you mean {close[0]}?" if close else ""
        raise ValueError(f"{name}={text} has the unknown unit {unit}{hint}; write it as in {example}")
    value = number * factors[unit]
    if not math.isfinite(value) or value < 0 or (value == 0 and not zero):
        raise ValueError(f"{name}={text} must be {'>= 0' if zero else 'above 0'}; write it as in {example}")
    return value


def rate_text(bytes_per_second: float) -> str:
    """Return '25 Gbit/s'."""
    bits = 8 * bytes_per_second
    prefix = next(p for p in ("T", "G", "M", "k", "") if bits >= _DECIMAL[p] or not p)
    return f"{bits / _DECIMAL[prefix]:.3g} {prefix}bit/s"


def bytes_text(nbytes: float) -> str:
    """Return '16 GiB'."""
    prefix = next((p for p in ("Ti", "Gi", "Mi", "Ki") if nbytes >= _BINARY[p]), "")
    return f"{nbytes / _BINARY.get(prefix, 1.0):.4g} {prefix}B"


def seconds_text(seconds: float) -> str:
    """Return '12.3 ms'."""
    unit = next((u for u in ("s", "ms", "us") if seconds >= UNITS["seconds"][u]), "us")
    return f"{seconds / UNITS['seconds'][unit]:.3g} {unit}"
