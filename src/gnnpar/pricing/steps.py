"""Price a method from one `Step`, its messages and folds: seconds, memory and simulated tasks of an epoch.

Units: seconds, bytes; an element has 4 bytes. Ranks wait for each other at every exchange, so each piece of a layer
costs as much as on the slowest rank, and an exchange as much as on its most loaded link. Sources: SAR (arXiv
2111.06483), CAGNET (arXiv 2005.03300).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal

from gnnpar.pricing.machine import Machine
from gnnpar.pricing.price import Memory, Phases
from gnnpar.pricing.regrouped import Regrouped, turns
from gnnpar.pricing.statistics import PartStats
from gnnpar.pricing.tasks import SimulatedTask, TaskGraph
from gnnpar.pricing.work import (
    DIRECTIONS,
    NUMBER,
    Direction,
    Flow,
    LayerPass,
    LayerSeconds,
    Work,
    rank_memory,
    structure_bytes,
    widest_fold,
)

Kind = Literal["local", "halo", "parts", "rounds", "columns", "grid"]


@dataclass(frozen=True)
class Step:
    """Exchange of the rows that a fold reads, in every layer. Gradients return the same way.

    `kind`: rows are `local`; the `halo` is sent at once; whole `parts` are broadcast one after the other; the halo is
    sent in `rounds`, one peer after the other; ranks fold some `columns` of all rows, or rows of their group on a
    `grid`, and send results to the owners (`groups`: number of ranks -> assignment).
    `overlap`: messages overlap the fold of inner edges, the whole epoch, or nothing.
    `share`: of the halo rows and of the edges from them. `sends`: share of the epochs that send rows, and gradients.
    `kept`: messages of rows and of gradients that a rank keeps over epochs; `kept_own`: it also keeps its own rows.
    `prefetch`: parts or rounds in flight while one is folded. `again`: backward fetches the rows of a round again
    (pull) or sends rows of destinations where the fold supports it (push); None: it keeps the rows.
    """

    kind: Kind
    overlap: Literal["inner", "epoch", "none"] = "inner"
    share: float = 1.0
    sends: tuple[float, float] = (1.0, 1.0)
    kept: tuple[float, float] = (0.0, 0.0)
    kept_own: bool = False
    prefetch: int = 1
    again: Literal["push", "pull"] | None = None
    groups: Callable[[int], Regrouped] | None = None

    @property
    def stale(self) -> bool:
        """Return True if a fold reads rows of an earlier epoch, or some gradients are not sent."""
        return self.overlap == "epoch" or self.sends != (1.0, 1.0)

    @property
    def varies(self) -> bool:
        """Return True if epochs send different numbers of bytes."""
        return any(0 < share < 1 for share in (self.share, *self.sends))

    def with_halo(self, work: Work) -> Work:
        """Return the work with the sent rows as its halo."""
        parts = work.parts
        if self.kind == "parts":
            every = tuple(tuple(0.0 if p == q else n for q, n in enumerate(parts.nodes)) for p in range(parts.parts))
            return replace(work, parts=PartStats(parts.nodes, parts.inner, parts.cut, every))
        if self.share == 1:
            return work
        cut, halo = (tuple(tuple(n * self.share for n in row) for row in table) for table in (parts.cut, parts.halo))
        return replace(work, parts=PartStats(parts.nodes, parts.inner, cut, halo))

    def times(self, work: Work, layer: int, direction: Direction) -> float:
        """Return how often the bytes of one exchange are sent per epoch."""
        if self.kind != "rounds" or direction == "forward":
            return self.sends[direction == "backward"]
        folds, needed = work.ir.folds(layer), 0.0
        for fold in folds:
            if fold.linear or not fold.needs_src or self.again is None:
                needed += fold.width * fold.learned
            elif self.again == "push" and fold.pushed:
                needed += fold.pushed
            else:
                needed += fold.width * (1 + fold.learned)
        plain = sum(f.width for f in folds if f.learned)
        return needed / plain if plain else 0.0

    def regrouped(self, work: Work) -> Regrouped | None:
        return self.groups and self.groups(work.parts.parts)

    # Seconds in closed form

    def epoch(self, work: Work, machine: Machine, engine: str, bits: int = 32) -> Phases:
        """Return the seconds of all layers in both directions (each kind priced once) and of the epoch's end."""
        work, total, layers = self.with_halo(work), Phases(), range(work.ir.num_layers)
        lost, overhead = machine.lost(range(work.parts.parts)), Phases(compute=work.overhead_seconds(engine))
        for layer, count in work.layer_kinds(layers):
            for direction in DIRECTIONS:
                at = LayerPass(work, layer, direction, bits)
                total += (self._layer(at, machine, lost) + overhead).times(count)
        total += machine.end(work, engine, layers)
        if self.overlap == "epoch":
            return replace(total, wire=total.wire - min(total.wire, total.compute) * (1 - lost))
        return total

    def _layer(self, at: LayerPass, machine: Machine, lost: float) -> Phases:
        """Return the seconds of one layer. `lost`: share of hidden communication that slows computing."""
        if (groups := self.regrouped(at.work)) is not None:
            return groups.phases(at, machine, prefetch=self.prefetch, lost=lost)
        pieces, flows, times = at.pieces, at.flows, self.times(at.work, at.layer, at.direction)
        if self.kind == "rounds":
            return self._in_rounds(at, machine, times, lost)
        compute, encode = max(p.compute for p in pieces), max(p.pack + p.unpack for p in pieces) * times
        if self.overlap == "epoch":
            return Phases(compute=compute, encode=encode, wire=machine.exchange(flows) * times)
        if self.kind == "parts":
            owner, fold = int(not at.forward), max(p.inner + sum(p.halo) for p in pieces)
            at_once = [[f for f in flows if f[owner] in turn] for turn in turns(len(pieces), self.prefetch)]
            wire = sum(map(machine.exchange, at_once)) * times
            hidden = min(wire, fold) if self.prefetch else 0.0
            return Phases(compute=compute, encode=encode, wire=wire - hidden * (1 - lost))
        wire, inner = machine.exchange(flows, idle=self._pause(pieces)), max(p.inner for p in pieces)
        hidden = min(wire, inner) if self.overlap == "inner" else 0.0
        rest = max(p.compute - p.inner for p in pieces)
        return Phases(compute=inner + rest, encode=encode, wire=(wire - hidden * (1 - lost)) * times)

    def _in_rounds(self, at: LayerPass, machine: Machine, times: float, lost: float) -> Phases:
        """Return the seconds in rounds: in round d a rank reads from the rank d places before it."""
        pieces, parts = at.pieces, len(at.pieces)
        distances = range(1, parts)
        apart: dict[int, list[Flow]] = {d: [] for d in distances}
        for source, target, nbytes in at.flows:
            reader, owner = (target, source) if at.forward else (source, target)
            apart[(reader - owner) % parts].append((source, target, nbytes * times))
        idle = self._pause(pieces)
        rounds = [machine.exchange(apart[d], idle=idle if d == 1 else 0.0) for d in distances]
        folds = [max(p.halo[(i - d) % parts] for i, p in enumerate(pieces)) for d in distances]
        inner = max(p.inner for p in pieces)
        compute = inner + sum(folds)
        wire = in_rounds(rounds, folds, inner, prefetch=self.prefetch, lost=lost) - compute
        encode = max(p.pack + p.unpack for p in pieces) * max(1.0, times)
        return Phases(compute=compute + max(p.before + p.after for p in pieces), encode=encode, wire=wire)

    def _pause(self, pieces: Sequence[LayerSeconds]) -> float:
        """Return the seconds between two exchanges in which nothing is sent."""
        return min(p.compute + p.pack + p.unpack - (self.overlap == "inner") * p.inner for p in pieces)

    # Memory

    def memory(self, work: Work) -> tuple[Memory, ...]:
        """Return the peak bytes of each rank."""
        if (groups := self.regrouped(work)) is not None:
            return groups.memory(work, prefetch=self.prefetch)
        seen, ranks = self.with_halo(work), range(work.parts.parts)
        return tuple(self._with_share(work, p, self._of_rank(seen, p)) for p in ranks)

    def _of_rank(self, work: Work, p: int) -> Memory:
        parts, layers = work.parts, range(work.ir.num_layers)
        n, halo, sent = parts.nodes[p], sum(parts.halo[p]), parts.sent(p)
        columns, moving, at_once = n + halo, halo + sent, (1 + self.prefetch) * max(parts.nodes)
        if self.kind == "parts":  # a send buffer per reader; gradients of all rows return
            moving = sent + at_once
        elif self.kind == "rounds":  # a round has at most the rows of the largest part
            columns, moving = n if self.again else columns, 2 * min(halo, at_once)
        memory = rank_memory(work, layers, p, columns=columns, moving=moving * widest_fold(work, layers))
        rows, gradients = (
            times * sum(work.exchanged_width(i, d) for i in layers)
            for d, times in zip(DIRECTIONS, self.kept, strict=True)
        )
        return replace(memory, halo=memory.halo + NUMBER * (rows * (halo + n * self.kept_own) + gradients * sent))

    def _with_share(self, work: Work, p: int, memory: Memory) -> Memory:
        """Add the blocks of all halo rows, held in addition to the share's, and the cached features of layer 0."""
        if self.share == 1:
            return memory
        parts, halo = work.parts, sum(work.parts.halo[p])
        features = NUMBER * work.ir.in_dim * (1 - self.share) * halo * (work.held == "rows")
        structure = memory.structure + structure_bytes(0.0, sum(parts.cut[p]), halo)
        return replace(memory, structure=structure, halo=memory.halo + features)

    # Tasks of the simulator

    def tasks(self, work: Work, machine: Machine, engine: str, bits: int = 32) -> list[SimulatedTask]:
        """Return the tasks of an epoch for the event simulator."""
        work, graph, layers = self.with_halo(work), TaskGraph(machine), range(work.ir.num_layers)
        ranks, overhead = range(work.parts.parts), work.overhead_seconds(engine)
        groups, last = self.regrouped(work), [list[int]() for _ in ranks]
        layer_tasks = partial(self._layer_tasks if groups is None else groups.tasks, graph, overhead)
        for direction in DIRECTIONS:
            for layer in layers if direction == "forward" else reversed(layers):
                last = layer_tasks(LayerPass(work, layer, direction, bits), last)
            if direction == "forward":
                last = [[graph.compute("loss", p, work.loss_seconds[p], last[p])] for p in ranks]
        graph.end(work, engine, ranks, layers, [i for each in last for i in each])
        return graph.made

    def _layer_tasks(self, graph: TaskGraph, overhead: float, at: LayerPass, last: list[list[int]]) -> list[list[int]]:
        """Add one layer on every rank: dense work, exchange, folds, dense work. Return the tasks that the next layer
        waits for."""
        parts, tag, times = len(at.pieces), at.name, self.times(at.work, at.layer, at.direction)
        name, other = ("before", "after") if at.forward else ("after", "before")
        more, ready = max(1.0, times), list[int]()
        for p, piece in enumerate(at.pieces):
            posts = at.work.rates[p].message * sum(a == p for a, _, _ in at.flows) + overhead
            dense = piece.before if at.forward else piece.after
            ready.append(graph.compute(f"{tag} {name}", p, dense + more * piece.pack + posts, last[p]))
        arriving: dict[int, dict[int, float]] = {p: {} for p in range(parts)}
        for source, target, nbytes in at.flows:
            arriving[target][source] = nbytes * times
        ended: list[list[int]] = []
        for p, piece in enumerate(at.pieces):
            sources = sorted(arriving[p], key=lambda q: (p - q) % parts)
            done = self._fold_tasks(graph, at, p, {q: arriving[p][q] for q in sources}, ready)
            # a peer that sends nothing in this direction may still have a block to fold
            if rest := sum(seconds for q, seconds in enumerate(piece.halo) if q not in sources):
                done = graph.compute(f"{tag} halo", p, rest, [done])
            dense = piece.after if at.forward else piece.before
            ended.append([graph.compute(f"{tag} {other}", p, dense + more * piece.unpack, [done])])
        return ended

    def _fold_tasks(
        self, graph: TaskGraph, at: LayerPass, p: int, nbytes: Mapping[int, float], ready: Sequence[int]
    ) -> int:
        """Add the folds of rank p over its inner edges and each peer's rows. Return the last fold. A round is requested
        after the fold of an earlier one.

        nbytes: peer -> bytes that it sends, in folding order; ready[q]: the task after which q may send.
        """
        tag, piece, idle = at.name, at.pieces[p], self._pause(at.pieces)

        def flow(q: int, asks: Sequence[int], idle: float) -> int:
            return graph.flow(f"{tag} {q}>{p}", q, p, nbytes[q], [ready[q], *asks], idle=idle)

        in_rounds, late = self.kind == "rounds", self.overlap == "epoch"
        flows = {} if in_rounds else {q: flow(q, (), idle) for q in nbytes}
        waits = flows.values() if self.overlap == "none" else ()
        folded = [graph.compute(f"{tag} inner", p, piece.inner, [ready[p], *waits])]
        for r, q in enumerate(nbytes):
            if in_rounds:
                asked = _requested_after(r, self.prefetch)
                flows[q] = flow(q, () if asked is None else (folded[asked],), idle if r == 0 else 0.0)
            seconds = piece.halo[q] + graph.machine.rates[p].message
            arrived = [] if late else [flows[q]]  # late rows are folded in a later epoch
            folded.append(graph.compute(f"{tag} halo {q}", p, seconds, [folded[-1], *arrived]))
        return folded[-1]


def _requested_after(r: int, prefetch: int) -> int | None:
    """Return the fold after which round r is requested; 0: the fold of inner edges, None: at once."""
    before = r - prefetch
    return None if before < 0 or (before == 0 and prefetch > 0) else before


def in_rounds(rounds: Sequence[float], folds: Sequence[float], inner: float, *, prefetch: int, lost: float) -> float:
    """Return the seconds until all rounds are folded. Round r is requested after the fold of r - prefetch - 1, the
    first rounds at once."""
    arrived, folded = 0.0, [inner]
    hidden = 0.0
    for r, seconds in enumerate(rounds):
        asked = _requested_after(r, prefetch)
        start = max(arrived, 0.0 if asked is None else folded[asked])
        arrived = start + seconds
        hidden += max(0.0, min(arrived, folded[-1]) - start)
        folded.append(max(folded[-1], arrived) + folds[r])
    return folded[-1] + lost * hidden
