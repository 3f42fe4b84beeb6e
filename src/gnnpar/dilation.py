"""Clocks of a rank: seconds of the machine that `launch.dilation` emulates, which are longer than this one's.

A rank that gets 1 / D of a core, over links of 1 / D of their rate, does in D seconds what it would do in one. So all
that a rank measures and decides by is read here, and no reader knows of D.
"""

from __future__ import annotations

import time

_seconds_here = 1.0  # of this machine, for one of the emulated machine's


def dilate(factor: float) -> None:
    """From now on a second of this process's clocks takes `factor` seconds."""
    global _seconds_here
    _seconds_here = factor


def perf_counter() -> float:
    """`time.perf_counter` of the emulated machine."""
    return time.perf_counter() / _seconds_here


def monotonic() -> float:
    """`time.monotonic` of the emulated machine; the same for all processes of this one."""
    return time.monotonic() / _seconds_here
