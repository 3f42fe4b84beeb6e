"""The cost of a schedule: when every action runs, and which gradients exist.

`simulate`: from seconds of computations and a model of the links. A rank computes one action at a time, in order, and
waits for its inputs only: there are no barriers (GNNPipe's own simulator is lock step, the sum over slots of the
slowest stage). A message starts when it is sent and its receive is posted. A rank sends one message at a time; messages
share its ports: one in and one out (full duplex), or one for both (half). Each action is a task of the event simulator
that also serves prices (pricing/simulate.py).

`expected`: gradient coverage, the share of edges whose gradient a schedule computes (GNNPipe, arXiv 2308.10087). An
edge from chunk j to chunk i reads j's rows fresh when j is at an earlier slot, and historical ones else; historical
rows are constants. The gradient of a fresh edge exists when chunk i went backward before chunk j did. Inside a chunk an
edge is always fresh and always kept. Last in first out keeps every fresh edge, 1F1B keeps none across chunks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Literal

from gnnpar.parallel.pipeline.schedule import Action, Kind, Schedule, inputs, lower, message_of
from gnnpar.pricing.simulate import simulate as run_tasks
from gnnpar.pricing.tasks import SimulatedTask

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
    """Return the timeline of a schedule. `seconds`: of computations; `nbytes`: of sends."""
    lowered = schedule if schedule.lowered else lower(schedule)
    number = {action: i for i, action in enumerate(chain(*lowered.actions))}
    received = {message_of(lowered, action)[2]: action for action in number if action.kind.startswith("send")}
    tasks: list[SimulatedTask] = []
    for rank, mine in enumerate(lowered.actions):
        computed: tuple[int, ...] = ()
        for action in mine:
            after = (*computed, *(number[each] for each in inputs(lowered, action)))
            given = action.kind, action.stage, action.slot
            if action.computes:
                computed = (number[action],)
                task = SimulatedTask(str(action), "compute", ("compute", rank), (rank,), after, seconds=seconds(*given))
            elif action in received:  # it is posted without waiting
                task = SimulatedTask(str(action), "compute", action, (rank,), after)
            else:
                _, target, receive = message_of(lowered, action)
                ports = (rank, target) if link.duplex == "half" else (rank, lowered.stages + target)
                task = SimulatedTask(
                    str(action),
                    "flow",
                    ("out", rank),
                    (rank, target),
                    (*after, number[receive]),
                    nbytes=nbytes(*given),
                    latency=link.latency_seconds,
                    demand=dict.fromkeys(ports, 1.0),
                )
            tasks.append(task)
    times = run_tasks(tasks, [link.bytes_per_second] * (2 * lowered.stages)).spans
    spans = [
        ActionSpan(times[i].start, times[number[received.get(action, action)]].end, tasks[i].devices[0], action)
        for action, i in number.items()
    ]
    return Timeline(lowered.stages, tuple(sorted(spans)))


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


Counts = Sequence[Sequence[float]]  # [K, K]: edges into chunk i (row) from chunk j (column)


@dataclass(frozen=True, kw_only=True)
class Coverage:
    """Shares of all edges, mean over virtual stages. own + fresh + stale = 1; kept <= own + fresh."""

    own: float  # inside a chunk
    fresh: float  # across chunks, reading this epoch's rows
    stale: float  # across chunks, reading historical rows
    kept: float  # with a gradient

    @property
    def kept_of_fresh(self) -> float:
        """Return the share of fresh edges across chunks that have a gradient; 1 where there are no such edges."""
        return (self.kept - self.own) / self.fresh if self.fresh else 1.0


def kept(schedule: Schedule, stage: int) -> list[list[bool]]:
    """Return [K, K] by slot: does a virtual stage compute the gradient of edges into slot i (row) from slot j?"""
    mine = [a for a in schedule.actions[schedule.rank_of(stage)] if a.computes and a.stage == stage]
    at = {(action.kind, action.slot): position for position, action in enumerate(mine)}
    slots = range(schedule.slots)
    forward, backward = ([at[kind, slot] for slot in slots] for kind in ("forward", "backward"))
    return [[i == j or (forward[j] < forward[i] and backward[i] < backward[j]) for j in slots] for i in slots]


def expected(schedule: Schedule, edges: Counts) -> Coverage:
    """Return the mean over all orders of chunks: every ordered pair of chunks is at each ordered pair of slots equally
    often."""
    slots = range(schedule.slots)
    if len(edges) != schedule.slots or any(len(row) != schedule.slots for row in edges):
        raise ValueError(f"edges are [{len(edges)}, {len(edges[0])}], but the schedule has {schedule.slots} slots")
    total = sum(float(n) for row in edges for n in row) or 1.0
    own = sum(float(edges[i][i]) for i in slots) / total
    crossing = sum(float(edges[i][j]) for i in slots for j in slots if i != j) / total
    pairs = schedule.slots * (schedule.slots - 1) * schedule.num_stages or 1
    survive = sum(sum(map(sum, kept(schedule, s))) - schedule.slots for s in range(schedule.num_stages)) / pairs
    return Coverage(own=own, fresh=crossing / 2, stale=crossing / 2, kept=own + crossing * survive)
