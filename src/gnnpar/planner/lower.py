"""From a candidate to the tasks of one epoch, for the simulator. Source: specs/tag.md 8.5.

Flat strategies: a rank's stream runs before, fold, after of each layer; every ordered pair of ranks is a stream.
Pipelines: a stage runs its chunks in order, then backward in reverse; messages of one boundary follow each other.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from gnnpar.planner.candidate import Candidate, layers_of
from gnnpar.planner.closed import DIRECTIONS, boundary_bytes, in_engine, order_seconds, pause, stage_seconds, transfers
from gnnpar.planner.simulate import Task, Timeline, simulate
from gnnpar.pricing.machine import Machine
from gnnpar.pricing.work import Direction, Piece, Work


@dataclass
class _Tasks:
    setting: Machine
    made: list[Task] = field(default_factory=list)

    def compute(self, name: str, rank: int, seconds: float, after: Sequence[int], *, priority: int = 0) -> int:
        self.made.append(
            Task(
                name=name,
                kind="compute",
                stream=("compute", rank),
                devices=(rank,),
                after=tuple(after),
                seconds=seconds,
                priority=priority,
            )
        )
        return len(self.made) - 1

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
        fabric = self.setting.fabric
        latency = fabric.latency(source, target) + posted
        nbytes = max(0.0, nbytes - fabric.burst(source, target, idle))
        self.made.append(
            Task(
                name=name,
                kind="flow",
                stream=("flow", source, target),
                devices=(source, target),
                after=tuple(after),
                nbytes=nbytes,
                latency=latency,
                demand=dict.fromkeys(fabric.routes[source][target], 1.0),
                holds=nbytes,
            )
        )
        return len(self.made) - 1

    def reduce(self, ranks: Sequence[int], nbytes: float, after: Sequence[int]) -> int:
        """A ring sum: every ring edge carries 2 (n - 1)/n of the bytes."""
        size, demand = len(ranks), {}
        for a, b in zip(ranks, [*ranks[1:], ranks[0]], strict=True):
            for link in self.setting.fabric.routes[a][b]:
                demand[link] = demand.get(link, 0.0) + 2 * (size - 1) / size
        self.made.append(
            Task(
                name="reduce",
                kind="flow",
                stream=("reduce", *ranks),
                devices=tuple(ranks),
                after=tuple(after),
                nbytes=nbytes,
                latency=self.setting.reduce(ranks, 0.0),
                demand=demand,
            )
        )
        return len(self.made) - 1


def lowered(candidate: Candidate, work: Work, setting: Machine) -> list[Task]:
    """The tasks of an epoch."""
    work, setting = in_engine(candidate, work, setting)
    tasks = _Tasks(setting)
    if candidate.stages > 1 or candidate.chunks > 1:
        _pipeline(tasks, candidate, work)
    else:
        _flat(tasks, candidate, work)
    return tasks.made


def simulated(candidate: Candidate, work: Work, setting: Machine) -> Timeline:
    """An epoch, event by event."""
    lost = setting.lost(range(candidate.ranks))
    capacity = [link.rate for link in setting.fabric.links]
    return simulate(lowered(candidate, work, setting), capacity, slowdown=1.0 + lost)


def _flat(tasks: _Tasks, candidate: Candidate, work: Work) -> None:
    ranks = range(candidate.parts)
    last: list[list[int]] = [[] for _ in ranks]
    layers = range(work.ir.num_layers)
    for direction in DIRECTIONS:
        for layer in layers if direction == "forward" else reversed(layers):
            pieces = [work.piece(layer, p, direction, bits=candidate.bits) for p in ranks]
            last = _layer(tasks, candidate, work, layer, direction, pieces, last)
        if direction == "forward":
            last = [[tasks.compute("loss", p, work.loss_seconds[p], last[p])] for p in ranks]
    done = [i for each in last for i in each]
    _finish(tasks, candidate, work, range(candidate.parts), done, range(work.ir.num_layers))


def _layer(
    tasks: _Tasks,
    candidate: Candidate,
    work: Work,
    layer: int,
    direction: Direction,
    pieces: list[Piece],
    last: list[list[int]],
) -> list[list[int]]:
    """One layer on every rank: dense work, exchange, folds, dense work. Returns what the next one waits for."""
    ranks, tag = range(candidate.parts), f"{direction[0].upper()}{layer}"
    first, second = ("before", "after") if direction == "forward" else ("after", "before")
    times = transfers(candidate, work, layer, direction) if candidate.family == "sar" else 1.0
    more = max(1.0, times)
    flows = work.flows(layer, direction, candidate.bits)
    posts = [work.rates[p].message * sum(a == p for a, _, _ in flows) for p in ranks]
    posts = [seconds + work.visit_seconds(candidate.engine) for seconds in posts]
    idle = pause(pieces, candidate)
    ready = [
        tasks.compute(f"{tag} {first}", p, getattr(pieces[p], first) + more * pieces[p].pack + posts[p], last[p])
        for p in ranks
    ]
    arriving: dict[int, dict[int, float]] = {p: {} for p in ranks}
    for source, target, nbytes in flows:
        arriving[target][source] = nbytes * times
    done: list[list[int]] = []
    for p in ranks:
        sources = sorted(arriving[p], key=lambda q: (p - q) % candidate.parts)
        done.append(_folds(tasks, candidate, p, tag, pieces[p], sources, arriving[p], ready, idle))
    return [
        [tasks.compute(f"{tag} {second}", p, getattr(pieces[p], second) + more * pieces[p].unpack, done[p])]
        for p in ranks
    ]


def _folds(
    tasks: _Tasks,
    candidate: Candidate,
    p: int,
    tag: str,
    piece: Piece,
    sources: list[int],
    nbytes: dict[int, float],
    ready: list[int],
    idle: float,
) -> list[int]:
    """Inner edges and each peer's rows of rank p. SAR asks for a round once an earlier one is folded."""
    flows: dict[int, int] = {}
    if candidate.family != "sar":
        flows = {q: tasks.flow(f"{tag} {q}>{p}", q, p, nbytes[q], [ready[q]], idle=idle) for q in sources}
    early = candidate.family == "sar" or candidate.overlap == "edges"
    waits = [ready[p]] if early else [ready[p], *flows.values()]
    folded = [tasks.compute(f"{tag} inner", p, piece.inner, waits)]
    for r, q in enumerate(sources):
        if q not in flows:
            before = r - candidate.prefetch
            asks = [] if before < 0 or (before == 0 and candidate.prefetch > 0) else [folded[before]]
            rested = idle if r == 0 else 0.0
            flows[q] = tasks.flow(f"{tag} {q}>{p}", q, p, nbytes[q], [ready[q], *asks], idle=rested)
        taken = piece.halo[q] + tasks.setting.rates[p].message
        folded.append(tasks.compute(f"{tag} halo {q}", p, taken, [folded[-1], flows[q]]))
    # a peer that sends nothing in this direction may still have a block to fold
    rest = sum(seconds for q, seconds in enumerate(piece.halo) if q not in sources)
    return [tasks.compute(f"{tag} halo", p, rest, [folded[-1]])] if rest else [folded[-1]]


def _pipeline(tasks: _Tasks, candidate: Candidate, work: Work) -> None:
    spans = layers_of(candidate.cuts, work.ir.num_layers)
    stages, parts, chunks = range(candidate.stages), range(candidate.parts), range(candidate.chunks)
    ended: dict[tuple[Direction, int, int, int], int] = {}  # direction, stage, chunk, part -> its last task
    for direction in DIRECTIONS:
        forward = direction == "forward"
        costs = [stage_seconds(candidate, work, tasks.setting, s, span, direction) for s, span in enumerate(spans)]
        for k in chunks if forward else reversed(chunks):
            for s in stages if forward else reversed(stages):
                _chunk(
                    tasks, candidate, work, direction, s, k, costs[s].compute + costs[s].encode, costs[s].wire, ended
                )
    for s, span in enumerate(spans):
        mine = [ended["backward", s, 0, p] for p in parts]
        here = tasks.setting.stage(work, s)
        _finish(tasks, candidate, here, range(s * len(parts), (s + 1) * len(parts)), mine, span)


def _chunk(
    tasks: _Tasks,
    candidate: Candidate,
    work: Work,
    direction: Direction,
    s: int,
    k: int,
    seconds: float,
    exchange: float,
    ended: dict[tuple[Direction, int, int, int], int],
) -> None:
    """One chunk on one stage, on each of its parts. The exchange among parts is time that all of them wait."""
    parts, forward = candidate.parts, direction == "forward"
    before = s - 1 if forward else s + 1
    tag = f"{direction[0].upper()}{k}@{s}"
    for p in range(parts):
        rank, waits = s * parts + p, []
        if 0 <= before < candidate.stages:
            nbytes = boundary_bytes(candidate, work, min(s, before))
            source = before * parts + p
            posted = tasks.setting.rates[rank].message
            after = [ended[direction, before, k, p]]
            waits.append(tasks.flow(f"{tag} rows", source, rank, nbytes, after, posted=posted))
        if not forward:
            waits.append(ended["forward", s, candidate.chunks - 1, p])
            if s == candidate.stages - 1 and k == candidate.chunks - 1:
                waits = [tasks.compute("loss", rank, work.loss_seconds[p], waits)]
        order = k if forward else 2 * candidate.chunks - 1 - k
        first = k == (0 if forward else candidate.chunks - 1)
        if first and (columns := order_seconds(candidate, tasks.setting.stage(work, s))):
            waits = [tasks.compute("order", rank, columns, waits)]
        ended[direction, s, k, p] = tasks.compute(tag, rank, seconds + exchange, waits, priority=order)


def _finish(
    tasks: _Tasks, candidate: Candidate, work: Work, ranks: Sequence[int], after: list[int], layers: range
) -> None:
    params = sum(work.ir.params_of[i] for i in layers)
    waits = [tasks.reduce(list(ranks), 4.0 * params, after)] if len(ranks) > 1 else after
    for p, rank in enumerate(ranks):
        tasks.compute("step", rank, work.step_seconds(p, params, candidate.engine), waits)
