"""Split an epoch's wall time into phases: every instant belongs to exactly one phase, so the phases add up.

Seconds count on the machine that `launch.dilation` emulates: a rank with 1 / D of a core and links with 1 / D of
their rate takes D seconds for one second of work. All measurements and decisions of ranks use these clocks.
"""

from __future__ import annotations

import time
from collections.abc import Generator
from contextlib import contextmanager
from typing import Literal

import torch

ClockPhase = Literal["compute", "sample", "encode", "exposed", "bubble", "reduce", "other"]
CLOCK_PHASES: tuple[ClockPhase, ...] = ("compute", "sample", "encode", "exposed", "bubble", "reduce", "other")


_seconds_here = 1.0  # of this machine, per second of the emulated machine


def dilate(factor: float) -> None:
    """Slow this process's clocks: each of their seconds lasts `factor` seconds from now on."""
    global _seconds_here
    _seconds_here = factor


def perf_counter() -> float:
    """Return `time.perf_counter` of the emulated machine."""
    return time.perf_counter() / _seconds_here


def monotonic() -> float:
    """Return `time.monotonic` of the emulated machine; the same for all its processes."""
    return time.monotonic() / _seconds_here


class PhaseClock:
    """Exclusive attribution with a stack: time inside a nested phase does not count for the outer one.

    On CUDA the marks are events on the current stream, read once per epoch: measuring never synchronises a region.
    """

    def __init__(self, device: torch.device | None = None) -> None:
        self._cuda = device is not None and device.type == "cuda"
        self._stack: list[ClockPhase] = ["other"]
        self._marks: list[tuple[ClockPhase, object]] = []
        self._running = False
        self.began = 0.0  # start of the window on the host's monotonic clock, seconds

    def start(self) -> None:
        """Begin a timed window (an epoch)."""
        self.began = monotonic()
        self._marks = [("other", self._mark())]
        self._running = True

    def stop(self) -> None:
        if self._running:
            self._marks.append(("other", self._mark()))
            self._running = False

    @contextmanager
    def paused(self) -> Generator[None]:
        """Pause the clock in the context: events of a stream under capture have no time."""
        running, self._running = self._running, False
        try:
            yield
        finally:
            self._running = running

    @contextmanager
    def __call__(self, phase: ClockPhase) -> Generator[None]:
        self._switch(phase)
        self._stack.append(phase)
        try:
            yield
        finally:
            self._stack.pop()
            self._switch(self._stack[-1])

    def drain(self) -> dict[str, float]:
        """Return the seconds per phase of the last window, all phases present."""
        self.stop()
        seconds: dict[str, float] = dict.fromkeys(CLOCK_PHASES, 0.0)
        for (phase, begin), (_, end) in zip(self._marks, self._marks[1:], strict=False):
            seconds[phase] += self._elapsed(begin, end)
        self._marks = []
        return seconds

    def spans(self) -> list[tuple[ClockPhase, float, float]]:
        """Return (phase, start, end) of the last window so far, in seconds from its start, before it is drained."""
        if not self._marks:
            return []
        first = self._marks[0][1]
        return [
            (phase, self._elapsed(first, begin), self._elapsed(first, end))
            for (phase, begin), (_, end) in zip(self._marks, self._marks[1:], strict=False)
        ]

    def _switch(self, phase: ClockPhase) -> None:
        if self._running:
            self._marks.append((phase, self._mark()))

    def _mark(self) -> object:
        if not self._cuda:
            return perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def _elapsed(self, begin: object, end: object) -> float:
        if isinstance(begin, float) and isinstance(end, float):
            return end - begin
        assert isinstance(begin, torch.cuda.Event)
        assert isinstance(end, torch.cuda.Event)
        end.synchronize()
        return begin.elapsed_time(end) / 1e3


def union_seconds(intervals: list[tuple[float, float]]) -> float:
    """Return the length of the union of time intervals."""
    total, reached = 0.0, float("-inf")
    for begin, end in sorted(intervals):
        total += max(0.0, end - max(begin, reached))
        reached = max(reached, end)
    return total
