"""Event simulator: when every action of a schedule runs, from seconds of computations and a model of the links.

A rank computes one action at a time, in order. A message starts when it is sent, its receive is posted and both ranks'
ports are free; it holds the ports for bytes / bandwidth and is there a latency later. Ports are one in and one out a
rank (full duplex), or one for both (half). Asynchronous: a rank waits for its inputs only, there are no barriers
(GNNPipe's own simulator is lock step, the sum over slots of the slowest stage).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from gnnpar.parallel.pipeline.schedule.action import Action, Kind, Schedule
from gnnpar.parallel.pipeline.schedule.lower import inputs, lower, message_of

Seconds = Callable[[Kind, int, int], float]  # kind, virtual stage, slot -> seconds a rank is busy
Bytes = Callable[[Kind, int, int], float]  # of a send


@dataclass(frozen=True, kw_only=True)
class Link:
    """Seconds a message takes: latency + bytes / bandwidth. The default is free."""

    latency_seconds: float = 0.0
    bytes_per_second: float = float("inf")
    duplex: Literal["full", "half"] = "full"


@dataclass(frozen=True, order=True)
class ActionSpan:
    """One action from `start` to `end`, seconds; of a send the time on the wire, of a receive from posted to there."""

    start: float
    end: float
    rank: int
    action: Action


@dataclass(frozen=True)
class Timeline:
    """Spans in order of their start."""

    ranks: int
    spans: tuple[ActionSpan, ...]

    @property
    def makespan(self) -> float:
        """Seconds from the first start to the last end."""
        return max((s.end for s in self.spans), default=0.0) - min((s.start for s in self.spans), default=0.0)

    def busy(self, rank: int) -> float:
        """Return the seconds in which a rank computes."""
        return sum(span.end - span.start for span in self.spans if span.rank == rank and span.action.computes)

    def bubble(self, rank: int) -> float:
        """Return the seconds in which a rank does not compute."""
        return self.makespan - self.busy(rank)

    @property
    def bubble_share(self) -> float:
        """Mean over ranks of the share of the makespan that they do not compute."""
        total = self.ranks * self.makespan
        return sum(map(self.bubble, range(self.ranks))) / total if total else 0.0

    def rows(self) -> list[tuple[int, str, float, float]]:
        """Return (rank, action, start seconds, end seconds) for pictures and traces."""
        return [(span.rank, str(span.action), span.start, span.end) for span in self.spans]


def bubble_share(stages: int, slots: int, virtual: int = 1) -> float:
    """Return the closed form for equal stages and free links: (S - 1) / (v K + S - 1). For v > 1 it needs K >= S."""
    return (stages - 1) / (virtual * slots + stages - 1)


def simulate(
    schedule: Schedule, seconds: Seconds, *, link: Link = Link(), nbytes: Bytes = lambda kind, stage, slot: 0.0
) -> Timeline:
    """`seconds` of computations, and of sends and receives where posting one keeps its rank busy (0: it does not)."""
    lowered = schedule if schedule.lowered else lower(schedule)
    return _Simulation(lowered, seconds, link, nbytes).run()


class _Simulation:
    def __init__(self, schedule: Schedule, seconds: Seconds, link: Link, nbytes: Bytes) -> None:
        self._schedule, self._seconds, self._link, self._nbytes = schedule, seconds, link, nbytes
        self._done: dict[Action, float] = {}  # of a receive: when it was posted
        self._there: dict[Action, float] = {}  # receive -> when its message has arrived
        self._free = [0.0] * schedule.stages
        self._ports: dict[tuple[int, str], float] = {}
        self._spans: list[ActionSpan] = []
        self._sent: list[tuple[float, Action]] = []  # sends whose message has not started

    def run(self) -> Timeline:
        left = [list(reversed(mine)) for mine in self._schedule.actions]
        moved = True
        while moved:
            moved = False
            for rank, mine in enumerate(left):
                while mine and (start := self._ready(rank, mine[-1])) is not None:
                    self._do(rank, mine.pop(), start)
                    moved = True
            moved |= self._transfer()
        assert not any(left), "a validated schedule runs to its end"
        return Timeline(self._schedule.stages, tuple(sorted(self._spans)))

    def _ready(self, rank: int, action: Action) -> float | None:
        """Return the earliest start, or None if an input is not known yet."""
        start = self._free[rank]
        for needed in inputs(self._schedule, action):
            if needed.kind.startswith("send"):
                continue  # its message says when it is there
            known = (self._there if needed.kind.startswith("receive") else self._done).get(needed)
            if known is None:
                return None
            if self._schedule.rank_of(needed.stage) == rank:  # the others come as messages
                start = max(start, known)
        return start

    def _do(self, rank: int, action: Action, start: float) -> None:
        end = start + self._seconds(action.kind, action.stage, action.slot)
        self._free[rank] = self._done[action] = end
        if action.computes:
            self._spans.append(ActionSpan(start, end, rank, action))
        elif action.kind.startswith("send"):
            self._sent.append((end, action))

    def _transfer(self) -> bool:
        """Start the message that can start first; return False without any.

        Every rank is blocked when this is called, so a send that is not known yet starts after the earliest one.
        """
        ready: list[tuple[float, float, Action, int, int, Action]] = []
        sides = ("out", "in") if self._link.duplex == "full" else ("both", "both")
        for posted, send in self._sent:
            source, target, receive = message_of(self._schedule, send)
            if receive in self._done:
                free = (self._ports.get(port, 0.0) for port in zip((source, target), sides, strict=True))
                ready.append((max(posted, self._done[receive], *free), posted, send, source, target, receive))
        if not ready:
            return False
        begin, posted, send, source, target, receive = min(ready)
        self._sent.remove((posted, send))
        left = begin + self._nbytes(send.kind, send.stage, send.slot) / self._link.bytes_per_second
        self._ports |= dict.fromkeys(zip((source, target), sides, strict=True), left)
        there = self._there[receive] = left + self._link.latency_seconds
        self._spans += [ActionSpan(begin, there, source, send), ActionSpan(self._done[receive], there, target, receive)]
        return True


def grid(schedule: Schedule) -> str:
    """Return a schedule as text: a row a rank, a column a step in which every action takes one; dots are the bubble.

    'rank 0  F0 F1 .  .  B1 B0', and how much of it is bubble. With virtual stages a cell names its stage: F0@2.
    """
    timeline = simulate(schedule, lambda kind, stage, slot: float(kind in ("forward", "backward")))
    steps, sizes = round(timeline.makespan), f"{schedule.stages} ranks, {schedule.slots} slots"
    sizes += f", {schedule.virtual} virtual stages a rank" if schedule.virtual > 1 else ""
    cells = [["."] * steps for _ in range(schedule.stages)]
    for span in timeline.spans:
        if span.action.computes:
            text = str(span.action)
            cells[span.rank][round(span.start)] = text if schedule.virtual > 1 else text.partition("@")[0]
    width = max(len(cell) for row in cells for cell in row)
    named = len(f"rank {schedule.stages - 1}")
    lines = [
        f"{f'rank {rank}':{named}}  {' '.join(cell.ljust(width) for cell in row).rstrip()}"
        for rank, row in enumerate(cells)
    ]
    return "\n".join([*lines, f"{sizes}: {steps} steps, bubble {timeline.bubble_share:.1%}"])
