"""Candidates with all layers on every rank, one after the other: what they share, and what an exchange of halos sends.

Ranks wait for each other at every exchange, so a layer costs the slowest rank of each piece.
Formulas of bytes: SAR (arXiv 2111.06483).
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from gnnpar.pricing.candidate import Candidate, Knobs, quality_of
from gnnpar.pricing.ir import Fold, ModelIR
from gnnpar.pricing.machine import Machine
from gnnpar.pricing.memory import rank_memory, widest_fold
from gnnpar.pricing.price import Memory, Phases
from gnnpar.pricing.quality import Quality
from gnnpar.pricing.tasks import Task, TaskGraph
from gnnpar.pricing.work import DIRECTIONS, Direction, Held, Piece, Work


@dataclass(frozen=True, kw_only=True)
class FlatCandidate(Candidate):
    """An epoch is the sum over layers and directions of `layer_phases`, and its end."""

    @property
    def wire_bits(self) -> int:
        """Of a number on the wire."""
        return 32

    @abstractmethod
    def layer_phases(
        self, work: Work, machine: Machine, layer: int, direction: Direction, *, lost: float, visit: float
    ) -> Phases:
        """One layer in one direction. `lost`: share of hidden communication that computing pays for; `visit`: seconds
        that the engine takes for it besides."""

    @abstractmethod
    def fold_tasks(
        self,
        graph: TaskGraph,
        p: int,
        tag: str,
        piece: Piece,
        nbytes: Mapping[int, float],
        ready: Sequence[int],
        idle: float,
    ) -> list[int]:
        """Rank p folds its inner edges and each peer's rows. nbytes: peer -> what it sends, in the order of the folds;
        ready[q]: the task after which q may send. Returns the tasks of the folds in their order."""

    def copies(self, work: Work, layer: int, direction: Direction) -> float:
        """How many times the bytes of a plain exchange travel."""
        return 1.0

    @property
    def overlaps(self) -> bool:
        """Do messages pass beside the fold of inner edges?"""
        return True

    def keeps(self, held: Held) -> Held:
        return held

    def phases(self, work: Work, machine: Machine) -> Phases:
        lost, visit = machine.lost(range(self.parts)), work.visit_seconds(self.engine)
        return layer_by_layer(
            work,
            machine,
            self.engine,
            lambda layer, direction: self.layer_phases(work, machine, layer, direction, lost=lost, visit=visit),
        )

    def memory(self, work: Work) -> tuple[Memory, ...]:
        return tuple(self._of_rank(work, p) for p in range(self.parts))

    def _of_rank(self, work: Work, p: int) -> Memory:
        layers, parts = range(work.ir.num_layers), work.parts
        halo = sum(parts.halo[p])
        moving = (halo + parts.sent(p)) * widest_fold(work, layers)
        return rank_memory(work, layers, p, columns=parts.nodes[p] + halo, moving=moving)

    def tasks(self, work: Work, machine: Machine) -> list[Task]:
        graph, ranks, layers = TaskGraph(machine), range(self.parts), range(work.ir.num_layers)
        last: list[list[int]] = [[] for _ in ranks]
        for direction in DIRECTIONS:
            for layer in layers if direction == "forward" else reversed(layers):
                last = self._layer_tasks(graph, work, layer, direction, last)
            if direction == "forward":
                last = [[graph.compute("loss", p, work.loss_seconds[p], last[p])] for p in ranks]
        graph.end(work, self.engine, ranks, layers, [i for each in last for i in each])
        return graph.made

    def _layer_tasks(
        self, graph: TaskGraph, work: Work, layer: int, direction: Direction, last: list[list[int]]
    ) -> list[list[int]]:
        """One layer on every rank: dense work, exchange, folds, dense work. Returns what the next one waits for."""
        ranks, tag = range(self.parts), f"{direction[0].upper()}{layer}"
        pieces = work.pieces(layer, direction, bits=self.wire_bits)
        first = [p.before if direction == "forward" else p.after for p in pieces]
        second = [p.after if direction == "forward" else p.before for p in pieces]
        name, other = ("before", "after") if direction == "forward" else ("after", "before")
        times = self.copies(work, layer, direction)
        more = max(1.0, times)
        flows = work.flows(layer, direction, self.wire_bits)
        posts = [work.rates[p].message * sum(a == p for a, _, _ in flows) for p in ranks]
        posts = [seconds + work.visit_seconds(self.engine) for seconds in posts]
        idle = pause(pieces, overlaps=self.overlaps)
        ready = [graph.compute(f"{tag} {name}", p, first[p] + more * pieces[p].pack + posts[p], last[p]) for p in ranks]
        arriving: dict[int, dict[int, float]] = {p: {} for p in ranks}
        for source, target, nbytes in flows:
            arriving[target][source] = nbytes * times
        done: list[list[int]] = []
        for p in ranks:
            sources = sorted(arriving[p], key=lambda q: (p - q) % self.parts)
            nbytes_of = {q: arriving[p][q] for q in sources}
            folded = self.fold_tasks(graph, p, tag, pieces[p], nbytes_of, ready, idle)
            # a peer that sends nothing in this direction may still have a block to fold
            rest = sum(seconds for q, seconds in enumerate(pieces[p].halo) if q not in sources)
            done.append([graph.compute(f"{tag} halo", p, rest, [folded[-1]])] if rest else [folded[-1]])
        return [[graph.compute(f"{tag} {other}", p, second[p] + more * pieces[p].unpack, done[p])] for p in ranks]


@dataclass(frozen=True, kw_only=True)
class ExchangeCandidate(FlatCandidate):
    """One halo exchange a fold and direction. `bits`: of rows on the wire; `overlap`: what is folded meanwhile."""

    bits: int = 32
    overlap: Literal["none", "edges"] = "edges"

    @property
    def engine(self) -> str:
        return "rounded" if self.bits == 16 else "adaqp" if self.bits < 16 else "graph_parallel"

    @property
    def quality(self) -> frozenset[Quality]:
        return quality_of(self.bits)

    def knobs(self, ir: ModelIR) -> Knobs:
        return {"bits": (32, 16)}

    @property
    def may_hold(self) -> bool:
        return self.parts > 1

    @property
    def wire_bits(self) -> int:
        return self.bits

    @property
    def overlaps(self) -> bool:
        return self.overlap == "edges"

    def layer_phases(
        self, work: Work, machine: Machine, layer: int, direction: Direction, *, lost: float, visit: float
    ) -> Phases:
        return exchanged_layer(
            work, machine, layer, direction, bits=self.bits, overlaps=self.overlaps, lost=lost, visit=visit
        )

    def fold_tasks(
        self,
        graph: TaskGraph,
        p: int,
        tag: str,
        piece: Piece,
        nbytes: Mapping[int, float],
        ready: Sequence[int],
        idle: float,
    ) -> list[int]:
        flows = {q: graph.flow(f"{tag} {q}>{p}", q, p, n, [ready[q]], idle=idle) for q, n in nbytes.items()}
        waits = [ready[p]] if self.overlaps else [ready[p], *flows.values()]
        folded = [graph.compute(f"{tag} inner", p, piece.inner, waits)]
        for q, flow in flows.items():
            seconds = piece.halo[q] + graph.machine.rates[p].message
            folded.append(graph.compute(f"{tag} halo {q}", p, seconds, [folded[-1], flow]))
        return folded


def layer_by_layer(
    work: Work, machine: Machine, engine: str, layer_phases: Callable[[int, Direction], Phases]
) -> Phases:
    """All layers in both directions, each kind priced once, and the end of the epoch."""
    total, layers = Phases(), range(work.ir.num_layers)
    for layer, count in work.alike(layers):
        for direction in DIRECTIONS:
            total += layer_phases(layer, direction).times(count)
    return total + machine.end(work, engine, layers)


def exchanged_layer(
    work: Work,
    machine: Machine,
    layer: int,
    direction: Direction,
    *,
    bits: int = 32,
    overlaps: bool = True,
    lost: float,
    visit: float,
) -> Phases:
    """One halo exchange: max(exchange, inner) + the rest, or without overlap the exchange and all of it.

    `lost`: share of hidden communication that computing pays for; `visit`: seconds of the engine besides.
    """
    pieces = work.pieces(layer, direction, bits=bits)
    wire = machine.exchange(work.flows(layer, direction, bits), idle=pause(pieces, overlaps=overlaps))
    inner = max(p.inner for p in pieces)
    rest = max(p.compute - p.inner for p in pieces) + visit
    hidden = min(wire, inner) if overlaps else 0.0
    shown = wire - hidden * (1 - lost)
    return Phases(compute=inner + rest, encode=max(p.pack + p.unpack for p in pieces), wire=shown)


def pause(pieces: Sequence[Piece], *, overlaps: bool) -> float:
    """Seconds in which nothing is sent, between two exchanges: the work beside what messages pass beside."""
    return min(p.compute + p.pack + p.unpack - float(overlaps) * p.inner for p in pieces)


def halo_copies(work: Work) -> float:
    """Halo rows of all parts."""
    return sum(map(sum, work.parts.halo))


def exchanged_folds(work: Work) -> list[Fold]:
    """Folds whose rows are exchanged: not those of a layer 0 that is held."""
    first = 0 if work.held == "no" else 1
    return [f for i in range(first, work.ir.num_layers) for f in work.ir.folds(i)]


def summed_nbytes(number: int) -> int:
    """Bytes of a number that ranks add up, where one of a row has `number`: 16 bits are added up in fp32."""
    return max(number, 4)


def ring_bytes(ranks: int, numbers: int, number: int) -> int:
    """Of a ring sum of so many numbers of `number` bytes, all ranks."""
    return 2 * (ranks - 1) * numbers * number
