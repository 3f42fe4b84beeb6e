"""Tasks of one epoch for the event simulator: computing on a rank's stream, flows over the links of a route.

A rank is one stream; every ordered pair of ranks is a stream of messages.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from gnnpar.pricing.machine import Machine
from gnnpar.pricing.work import Work


@dataclass(frozen=True)
class SimulatedTask:
    """One piece of work. compute: `seconds` on the stream. flow: `nbytes` over `demand` after `latency`.

    `devices`: occupied devices (compute: one; flow: its ends). `after`: numbers of tasks that must end first.
    """

    name: str
    kind: Literal["compute", "flow"]
    stream: Hashable
    devices: tuple[int, ...]
    after: tuple[int, ...] = ()
    seconds: float = 0.0
    nbytes: float = 0.0
    latency: float = 0.0
    demand: Mapping[int, float] = field(default_factory=dict)
    priority: int = 0


@dataclass
class TaskGraph:
    """A task graph under construction; each method returns the number of the task that it adds."""

    machine: Machine
    made: list[SimulatedTask] = field(default_factory=list)

    def _add(self, task: SimulatedTask) -> int:
        self.made.append(task)
        return len(self.made) - 1

    def compute(self, name: str, rank: int, seconds: float, after: Sequence[int], *, priority: int = 0) -> int:
        task = SimulatedTask(
            name, "compute", ("compute", rank), (rank,), tuple(after), seconds=seconds, priority=priority
        )
        return self._add(task)

    def flow(
        self,
        name: str,
        source: int,
        target: int,
        nbytes: float,
        after: Sequence[int],
        *,
        posted: float = 0.0,
        idle: float = 0.0,
    ) -> int:
        """Add a flow; return its number. `posted`: seconds to post it; `idle`: seconds since the route's last use."""
        fabric = self.machine.fabric
        latency = fabric.latency(source, target) + posted
        nbytes = max(0.0, nbytes - fabric.burst(source, target, idle))
        demand = dict.fromkeys(fabric.routes[source][target], 1.0)
        on, ends = ("flow", source, target), (source, target)
        waits = tuple(after)
        return self._add(SimulatedTask(name, "flow", on, ends, waits, nbytes=nbytes, latency=latency, demand=demand))

    def reduce(self, ranks: Sequence[int], nbytes: float, after: Sequence[int], *, more: float = 0.0) -> int:
        """Add a ring sum and return its number: every ring edge carries 2 (n - 1)/n of the bytes. `more`: seconds of
        smaller sums before."""
        size, demand = len(ranks), {}
        for a, b in zip(ranks, [*ranks[1:], ranks[0]], strict=True):
            for link in self.machine.fabric.routes[a][b]:
                demand[link] = demand.get(link, 0.0) + 2 * (size - 1) / size
        latency, waits = self.machine.reduce(ranks, 0.0) + more, tuple(after)
        on, ends = ("reduce", *ranks), tuple(ranks)
        return self._add(
            SimulatedTask("reduce", "flow", on, ends, waits, nbytes=nbytes, latency=latency, demand=demand)
        )

    def end(self, work: Work, engine: str, ranks: Sequence[int], layers: range, after: list[int]) -> None:
        """Add the sums of these layers' gradients over ranks, and the optimizer's step of each."""
        params = sum(work.ir.params_of[i] for i in layers)
        waits = list(after)
        if len(ranks) > 1:
            waits = [self.reduce(list(ranks), 4.0 * params, after, more=self.machine.moments(work, ranks))]
        for p, rank in enumerate(ranks):
            self.compute("step", rank, work.step_seconds(p, params, engine), waits)
