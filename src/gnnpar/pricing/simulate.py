"""Event simulator of a task graph: serial streams on devices, and flows that share links max-min fairly.

A stream runs one task at a time, by priority, then by number. A flow waits for its latency, then for its stream, and
progresses at its fair share. While a flow touches a device, compute there is `slowdown` times slower. Ties go to the
lower number, so equal input gives equal timelines.
"""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from gnnpar.files import JsonDict
from gnnpar.pricing.candidate import Candidate
from gnnpar.pricing.machine import Machine
from gnnpar.pricing.quantity import bytes_text
from gnnpar.pricing.tasks import SimulatedTask
from gnnpar.pricing.work import Work
from gnnpar.track.timelines import Row, chrome_trace

_END = 1e-12  # relative tolerance of event times, for rounding


class TaskSpan(NamedTuple):
    """Start and end of a task, in seconds."""

    start: float
    end: float


@dataclass(frozen=True)
class EpochTimeline:
    """The timeline of an epoch."""

    tasks: tuple[SimulatedTask, ...]
    spans: tuple[TaskSpan, ...]

    @property
    def seconds(self) -> float:
        return max((span.end for span in self.spans), default=0.0)

    def chrome_trace(self) -> JsonDict:
        """Return trace events for Perfetto or chrome://tracing, flows in the rows of their receivers."""
        rows: list[Row] = []
        for task, span in zip(self.tasks, self.spans, strict=True):
            size = f" ({bytes_text(task.nbytes)})" if task.kind == "flow" else ""
            rows.append((task.devices[-1], task.name + size, span.start, span.end))
        return chrome_trace(rows, {}, lambda text: "receive" if text.endswith(")") else "compute")


def simulate(tasks: Sequence[SimulatedTask], capacity: Sequence[float], *, slowdown: float = 1.0) -> EpochTimeline:
    """Run the graph. capacity: bytes/s of each link. ValueError for a cycle of tasks."""
    return _Simulation(tasks, capacity, slowdown).run()


def simulated(candidate: Candidate, work: Work, machine: Machine) -> EpochTimeline:
    """Simulate an epoch of a candidate."""
    lost = machine.lost(range(candidate.ranks))
    capacity = [link.rate for link in machine.fabric.links]
    return simulate(candidate.tasks(*candidate.in_engine(work, machine)), capacity, slowdown=1.0 + lost)


class _Simulation:
    def __init__(self, tasks: Sequence[SimulatedTask], capacity: Sequence[float], slowdown: float) -> None:
        self.tasks, self.capacity, self.slowdown = tuple(tasks), capacity, slowdown
        self.waiting = [len(set(t.after)) for t in tasks]
        self.followers: list[list[int]] = [[] for _ in tasks]
        for i, task in enumerate(tasks):
            for before in set(task.after):
                self.followers[before].append(i)
        self.queues: dict[Hashable, list[tuple[int, int]]] = defaultdict(list)
        self.occupied: set[Hashable] = set()
        self.now = 0.0
        self.left: dict[int, float] = {}  # active: seconds of compute, bytes of a flow
        self.rate: dict[int, float] = {}
        self.late: list[tuple[float, int]] = []  # flows that wait for their latency
        self.start, self.end = [0.0] * len(tasks), [0.0] * len(tasks)
        self.stale = False

    def run(self) -> EpochTimeline:
        for i, count in enumerate(self.waiting):
            if count == 0:
                self._ready(i)
        done = 0
        while self.left or self.late:
            if self.stale:
                self._share()
            done += self._advance()
        if done != len(self.tasks):
            stuck = next(t.name for t, n in zip(self.tasks, self.waiting, strict=True) if n > 0)
            raise ValueError(f"{len(self.tasks) - done} tasks wait for each other, {stuck} among them")
        return EpochTimeline(self.tasks, tuple(map(TaskSpan, self.start, self.end)))

    def _ready(self, i: int) -> None:
        task = self.tasks[i]
        if task.kind == "flow" and task.latency > 0:
            heapq.heappush(self.late, (self.now + task.latency, i))
        else:
            self._queue(i)

    def _queue(self, i: int) -> None:
        task = self.tasks[i]
        heapq.heappush(self.queues[task.stream], (task.priority, i))
        self._start_next(task.stream)

    def _start_next(self, stream: Hashable) -> None:
        queue = self.queues[stream]
        if stream in self.occupied or not queue:
            return
        _, i = heapq.heappop(queue)
        self.occupied.add(stream)
        task = self.tasks[i]
        self.start[i] = self.now - task.latency
        self.left[i] = task.seconds if task.kind == "compute" else task.nbytes
        self.stale = True

    def _share(self) -> None:
        """Set the rates of all active tasks: fair shares of links, and slower compute during flows."""
        self.stale = False
        flows = sorted(i for i in self.left if self.tasks[i].kind == "flow")
        shares = fair_rates([self.tasks[i].demand for i in flows], self.capacity)
        self.rate = dict(zip(flows, shares, strict=True))
        touched = {d for i in flows for d in self.tasks[i].devices}
        for i in self.left:
            if self.tasks[i].kind == "compute":
                self.rate[i] = 1.0 / self.slowdown if self.tasks[i].devices[0] in touched else 1.0

    def _advance(self) -> int:
        """Advance to the next event; return the number of tasks that ended."""
        finish = {i: self._seconds_left(i) for i in self.left}
        step = min(finish.values(), default=float("inf"))
        if self.late and self.late[0][0] - self.now < step:
            step = self.late[0][0] - self.now
        self.now += step
        for i in self.left:
            if self.rate[i] != float("inf"):
                self.left[i] -= self.rate[i] * step
        while self.late and self.late[0][0] <= self.now:
            self._queue(heapq.heappop(self.late)[1])
        ended = sorted(i for i, seconds in finish.items() if seconds <= step + _END * max(self.now, 1e-9))
        for i in ended:
            self._finish(i)
        return len(ended)

    def _seconds_left(self, i: int) -> float:
        left = max(self.left[i], 0.0)
        return 0.0 if left == 0 or self.rate[i] == float("inf") else left / self.rate[i]

    def _finish(self, i: int) -> None:
        task = self.tasks[i]
        del self.left[i]
        self.end[i] = self.now
        self.stale = True
        self.occupied.discard(task.stream)
        self._start_next(task.stream)
        for follower in self.followers[i]:
            self.waiting[follower] -= 1
            if self.waiting[follower] == 0:
                self._ready(follower)


Demand = Mapping[int, float]


def fair_rates(flows: Sequence[Demand], capacity: Sequence[float]) -> list[float]:
    """Return the max-min fair rate of each flow over shared links, by progressive filling.

    All rates grow at the same pace until a link is full. Then its flows are fixed, and the others continue to grow. A
    flow that passes a link `demand` times (a ring collective) takes that multiple. flows[i]: link -> demand. A flow
    without links has an infinite rate.
    """
    rates = [0.0 if flow else float("inf") for flow in flows]
    growing = {i for i, flow in enumerate(flows) if flow}
    left = {link: capacity[link] for flow in flows for link in flow}
    while growing:
        load: dict[int, float] = {}
        for i in growing:
            for link, demand in flows[i].items():
                load[link] = load.get(link, 0.0) + demand
        step = min(left[link] / demand for link, demand in load.items())
        if step == float("inf"):
            for i in growing:
                rates[i] = step
            break
        full = {link for link, demand in load.items() if left[link] / demand <= step * (1 + 1e-12)}
        for link, demand in load.items():
            left[link] = max(0.0, left[link] - step * demand)
        for i in growing:
            rates[i] += step
        growing = {i for i in growing if not any(link in full for link in flows[i])}
    return rates
