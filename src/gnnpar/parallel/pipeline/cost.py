"""Price of an epoch of a pipeline: all chunks forward, then all backward, through stages of one part or several.

Source: GNNPipe (arXiv 2308.10087), its time of a pipelined epoch. With t_s a stage's time for a chunk, the exchange
among its parts included, and c_s that of its boundary, a direction takes sum t + sum c + (chunks - 1) max(t, boundary).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise, product, starmap
from typing import TYPE_CHECKING, Self

import numpy as np

from gnnpar.files import JsonDict
from gnnpar.parallel.declared import Problem, priced
from gnnpar.parallel.needs import check_first_layer
from gnnpar.parallel.pipeline.placing import Line, even_cuts, place_layers
from gnnpar.parallel.row_bytes import SENDS_NOTHING, RowBytes
from gnnpar.placement import Quality
from gnnpar.pricing.candidate import Candidate, Knobs, Scope, Values, codec_fields, quality_of
from gnnpar.pricing.ir import Fold, ModelIR
from gnnpar.pricing.machine import Machine
from gnnpar.pricing.price import Memory, Phases, Price, Traffic, ring_bytes
from gnnpar.pricing.steps import Step
from gnnpar.pricing.tasks import SimulatedTask, TaskGraph
from gnnpar.pricing.work import DIRECTIONS, NUMBER, Direction, Work, rank_memory, widest_fold, wire_bytes

if TYPE_CHECKING:
    from gnnpar.parallel.pipeline.strategy import GNNPipe

FACTORS = (0, 1, 2, 4, 8)  # chunks of a part over stages; 0: one chunk
_NODES = 8  # that a chunk has at least


@dataclass(frozen=True, kw_only=True)
class PipelineCandidate(Candidate):
    """`family`: hybrid where stages have more than one part. `chunks`: of one part. `bits`: of rows between stages.
    `cuts`: stage -> its first layer."""

    family: str = "gnnpipe"
    chunks: int = 1
    bits: int = 32
    cuts: tuple[int, ...] = (0,)

    def __post_init__(self) -> None:
        object.__setattr__(self, "family", "gnnpipe" if self.parts == 1 else "hybrid")

    @property
    def label(self) -> str:
        grid = f"{self.stages} stages" if self.parts == 1 else f"{self.stages} x {self.parts}"
        words = [f"{self.family} {grid}", f"{self.chunks} chunks" if self.chunks > 1 else "1 chunk"]
        words += [f"{self.bits} bit"] if self.bits != 32 else []
        return ", ".join(words)

    @property
    def quality(self) -> frozenset[Quality]:
        return quality_of(self.bits, stale=self.chunks > 1)

    @property
    def engine(self) -> str:
        return "chunks" if self.chunks > 1 else "stages"

    @property
    def fields(self) -> JsonDict:
        chunks: int | str = self.chunks * self.parts if self.chunks > 1 else "one"
        return {"stages": self.stages, "parts": self.parts, "chunks": chunks, "boundary": codec_fields(self.bits)}

    def knobs(self, ir: ModelIR) -> Knobs:
        return {"chunks": FACTORS}

    def with_knobs(self, knobs: Values) -> Self:
        return replace(self, chunks=max(1, knobs.get("chunks", 0) * self.stages), cuts=tuple(range(self.stages)))

    def makes_sense(self, nodes: int) -> bool:
        return self.chunks == 1 or self.chunks * self.parts * _NODES <= nodes

    def layers_of(self, num_layers: int) -> tuple[range, ...]:
        return tuple(starmap(range, pairwise((*self.cuts, num_layers))))

    def placed(self, work: Work, machine: Machine) -> Self:
        """With the best cuts, exactly, for the devices that its stages run on."""
        if self.stages == 1:
            return self
        layers = work.ir.num_layers
        evenly = replace(self, cuts=even_cuts(layers, self.stages))
        _, cuts = place_layers(_line(evenly, *self.in_engine(work, machine)), chunks=self.chunks)
        if cuts == evenly.cuts:
            return evenly
        return min((evenly, replace(self, cuts=cuts)), key=lambda c: c.phases(*c.in_engine(work, machine)).seconds)

    def phases(self, work: Work, machine: Machine) -> Phases:
        if self.stages == self.chunks == 1:  # nothing waits and nothing is stale: layer after layer
            return Step("halo").epoch(work, machine, self.engine, self.bits)
        total = Phases()
        spans = self.layers_of(work.ir.num_layers)
        for direction in DIRECTIONS:
            stages = [stage_seconds(self, work, machine, s, span, direction) for s, span in enumerate(spans)]
            messages = [boundary_seconds(self, work, machine, s) for s in range(self.stages - 1)]
            seconds = chain(
                [t.seconds for t in stages], [c for c, _ in messages], [b for _, b in messages], self.chunks
            )
            seconds += sum(order_seconds(self, machine.stage(work, s)) for s in range(self.stages))
            slowest = max(stages, key=lambda t: t.seconds)
            share = slowest.times(self.chunks)
            total += replace(share, bubble=seconds - share.seconds)
        ends = [machine.end(machine.stage(work, s), self.engine, span, s) for s, span in enumerate(spans)]
        return total + max(ends, key=lambda end: end.seconds)

    def memory(self, work: Work) -> tuple[Memory, ...]:
        parts, ranks = work.parts, list[Memory]()
        for layers in self.layers_of(work.ir.num_layers):
            folds = [f for i in layers for f in work.ir.folds(i)]
            for p in range(self.parts):
                n, e, halo = parts.nodes[p], parts.edges(p), sum(parts.halo[p])
                moving = (halo + parts.sent(p)) * widest_fold(work, layers) / self.chunks
                columns = self._columns(n, e, halo)
                made = rank_memory(work, layers, p, columns=columns, moving=moving, chunks=self.chunks)
                ranks.append(self._with_tables(made, folds, n, e, halo))
        return tuple(ranks)

    def _columns(self, n: float, e: float, halo: float) -> float:
        """Return the source rows kept for gradients by all chunks: each gathers the sources of its own edges."""
        rows = n + halo
        if self.stages == self.chunks == 1:
            return rows
        return self.chunks * rows * (1.0 - math.exp(-e / self.chunks / max(1.0, rows)))

    def _with_tables(self, memory: Memory, folds: Sequence[Fold], n: float, e: float, halo: float) -> Memory:
        """Add the tables: sources (this epoch's and, of chunks, the history's) and gradients, if any. An edge has
        its ends in 64 bits; the order of an epoch is cut out of copies of both, sorted by source for the gradients.
        Folds that are not linear have edges of their own, by chunk: 12 bytes each, and two ids a column."""
        if self.stages == self.chunks == 1:
            return memory
        halves = 2 if self.chunks > 1 else 1
        numbers = sum(halves * (n + halo) * f.width + n * f.learned * (f.out if f.linear else f.width) for f in folds)
        learned = any(f.learned and f.linear for f in folds)
        structure = (24.0 if learned else 16.0) * e + 8.0 * (n + halo)
        if not all(f.linear for f in folds):
            structure += 12.0 * e + 16.0 * self._columns(n, e, halo)
        order = (64.0 if learned else 8.0) * e
        structure, transient = memory.structure + structure, memory.transient + order
        return replace(memory, structure=structure, history=NUMBER * numbers, transient=transient)

    def tasks(self, work: Work, machine: Machine) -> list[SimulatedTask]:
        """Return tasks: a stage runs its chunks in order, then backward in reverse; messages of one boundary follow
        each other. The exchange among parts is time that all of them wait."""
        graph, spans = TaskGraph(machine), self.layers_of(work.ir.num_layers)
        ended: dict[tuple[Direction, int, int, int], int] = {}  # (direction, stage, chunk, part) -> its last task
        for direction in DIRECTIONS:
            costs = [stage_seconds(self, work, machine, s, span, direction) for s, span in enumerate(spans)]
            forward, stages, chunks = direction == "forward", list(range(self.stages)), list(range(self.chunks))
            if not forward:
                stages, chunks = stages[::-1], chunks[::-1]
            for k, s, p in product(chunks, stages, range(self.parts)):
                tag, before = f"{direction[0].upper()}{k}@{s}", s - 1 if forward else s + 1
                rank, source = s * self.parts + p, before * self.parts + p
                waits: list[int] = []
                if 0 <= before < self.stages:
                    nbytes, posted = boundary_bytes(self, work, min(s, before)), machine.rates[rank].message
                    after = [ended[direction, before, k, p]]
                    waits.append(graph.flow(f"{tag} rows", source, rank, nbytes, after, posted=posted))
                if not forward:
                    waits.append(ended["forward", s, self.chunks - 1, p])
                    if s == self.stages - 1 and k == self.chunks - 1:
                        waits = [graph.compute("loss", rank, work.loss_seconds[p], waits)]
                if k == chunks[0] and (columns := order_seconds(self, machine.stage(work, s))):
                    waits = [graph.compute("order", rank, columns, waits)]
                order = k if forward else 2 * self.chunks - 1 - k
                seconds = costs[s].compute + costs[s].encode + costs[s].wire
                ended[direction, s, k, p] = graph.compute(tag, rank, seconds, waits, priority=order)
        for s, span in enumerate(spans):
            ranks = range(s * self.parts, (s + 1) * self.parts)
            last = [ended["backward", s, 0, p] for p in range(self.parts)]
            graph.end(machine.stage(work, s), self.engine, ranks, span, last)
        return graph.made


def chain(stages: Sequence[float], latencies: Sequence[float], rates: Sequence[float], chunks: int) -> float:
    """Return the seconds of `chunks` passing stages in order. latencies: of a whole message; rates: of its bytes
    alone."""
    return sum(stages) + sum(latencies) + (chunks - 1) * max([*stages, *rates])


def stage_seconds(
    candidate: PipelineCandidate, work: Work, machine: Machine, s: int, layers: range, direction: Direction
) -> Phases:
    """Return the seconds of one chunk on one stage. A chunk also writes its sources to the table of later chunks."""
    here = machine.stage(work, s)
    share = 1.0 / candidate.chunks
    total, overhead = Phases(), here.overhead_seconds(candidate.engine)
    for layer, count in work.layer_kinds(layers):
        pieces = here.pieces(layer, direction, share=share)
        flows = [(a, b, nbytes * share) for a, b, nbytes in here.flows(layer, direction)]
        wire = machine.exchange(flows, first=s * candidate.parts)
        numbers = max(table_numbers(candidate, here, p, layer, direction) for p in range(candidate.parts))
        table = max(r.gather_seconds(numbers) for r in here.rates)
        each = Phases(
            compute=max(p.compute for p in pieces) + overhead,
            encode=max(p.pack + p.unpack for p in pieces) + table,
            wire=wire,
        )
        total += each.times(count)
    return total


def table_numbers(candidate: PipelineCandidate, work: Work, p: int, layer: int, direction: Direction) -> float:
    """Return the number of elements that a chunk writes to its tables and takes out of them.

    A sum writes its rows, and adds up gradients of this epoch and of the last. Other folds gather every column they
    read, again in backward, and add the gradients of all columns.
    """
    n, edges = work.parts.nodes[p], work.parts.edges(p) / candidate.chunks
    total = 0.0
    for fold in work.ir.folds(layer):
        rows = n / candidate.chunks
        if not fold.linear:
            rows += n * (1.0 - math.exp(-edges / n)) * (1.0 if direction == "forward" else 4.0)
        elif direction == "backward" and candidate.chunks > 1:
            rows *= 3.0
        total += rows * (fold.out if fold.linear and direction == "backward" else fold.width)
    return total


def order_seconds(candidate: PipelineCandidate, work: Work) -> float:
    """Return half the seconds of ordering a stage's chunks: the columns of sums, before its first chunk in each
    direction."""
    if candidate.chunks == 1 or not any(f.linear for g in work.ir.groups for f in g.folds):
        return 0.0
    return max(r.scale * r.order * work.parts.edges(p) / 2 for p, r in enumerate(work.rates))


def boundary_bytes(candidate: PipelineCandidate, work: Work, s: int) -> float:
    """Return the bytes of one chunk of the largest part over the cut behind stage s."""
    cut = work.ir.cuts[candidate.layers_of(work.ir.num_layers)[s].stop - 1]
    rows = max(work.parts.nodes) / candidate.chunks
    return rows * sum(wire_bytes((width,), candidate.bits) for width in cut)


def boundary_seconds(candidate: PipelineCandidate, work: Work, machine: Machine, s: int) -> tuple[float, float]:
    """Return the seconds (in all, of the bytes alone) of a chunk's message from stage s to the next, all parts at
    once."""
    nbytes = boundary_bytes(candidate, work, s)
    parts, first = candidate.parts, s * candidate.parts
    whole = machine.exchange([(p, p + parts, nbytes) for p in range(parts)], first=first)
    fixed = machine.exchange([(p, p + parts, 0.0) for p in range(parts)], first=first)
    return whole, whole - fixed


def _line(candidate: PipelineCandidate, work: Work, machine: Machine) -> Line:
    """Return the seconds of each layer on each stage, and of each message between stages, forward and backward."""
    ir, num_stages = work.ir, candidate.stages
    layers = np.zeros((num_stages, ir.num_layers))
    whole, alone = np.zeros((num_stages - 1, ir.num_layers)), np.zeros((num_stages - 1, ir.num_layers))
    for s in range(num_stages):
        seconds = {
            kind: sum(stage_seconds(candidate, work, machine, s, range(kind, kind + 1), d).seconds for d in DIRECTIONS)
            for kind, _ in ir.layer_kinds(range(ir.num_layers))
        }
        layers[s] = [seconds[kind] for kind in ir.twins]
    widths = {ir.cuts[layer - 1]: layer for layer in range(1, ir.num_layers)}
    for s in range(num_stages - 1):
        pair = machine.choose(range(s * candidate.parts, (s + 2) * candidate.parts))  # stage s and the next one
        trial = replace(candidate, stages=2)
        of_cut = {w: boundary_seconds(replace(trial, cuts=(0, i)), work, pair, 0) for w, i in widths.items()}
        for layer in range(1, ir.num_layers):
            whole[s, layer], alone[s, layer] = (2 * seconds for seconds in of_cut[ir.cuts[layer - 1]])
    return Line(layers, whole, alone)


def candidates(scope: Scope, ranks: int, *, hybrid: bool) -> Iterator[PipelineCandidate]:
    """Yield pipelines with at most as many stages as layers, and at least 8 nodes a chunk; with several parts a stage
    (`hybrid`), or one."""
    if ranks == 1 or scope.cached:  # chunks read sources of other epochs: nothing of layer 0 can be kept
        return
    for stages in range(2, min(ranks, scope.ir.num_layers) + 1):
        parts, rest = divmod(ranks, stages)
        if rest or (parts > 1) != hybrid:
            continue
        for factor in (0, 4, 1, 2, 8):  # chunks=auto makes 4 chunks per stage
            made = PipelineCandidate(parts=parts, stages=stages, chunks=max(1, factor * stages))
            if made.makes_sense(scope.nodes):
                yield replace(made, cuts=even_cuts(scope.ir.num_layers, stages))


def price_of(strategy: GNNPipe, problem: Problem, machine: Machine) -> Price:
    """Return the price of a configured pipeline."""
    check_first_layer(strategy, problem.first_layer)
    grid = strategy.mesh(problem.ranks).ranks
    stages, parts, chunks = len(grid), len(grid[0]), strategy.chunks_per_part(problem.ranks)
    work = problem.work_of(parts)
    boundary, rows = (RowBytes(codec, problem.number) for codec in (strategy.boundary, strategy.codec))
    for codec in (boundary, rows):
        if not codec.known:
            return Price(unpriced=codec.unknown)

    def seconds() -> list[float]:
        return [sum(work.piece(i, 0, d).compute for d in DIRECTIONS) for i in range(work.ir.num_layers)]

    groups = strategy.cut_into(stages * strategy.virtual, work.ir.num_layers, seconds)
    crossed = [problem.model.activation_widths(g.start) for g in groups[1:]] if stages > 1 else []
    forward, backward = rows.exchanges(work)
    bounds = [boundary.bound, *([rows.bound] if parts > 1 else [])]
    traffic = Traffic(
        forward=forward,
        backward=backward,
        stage=sum(sum(work.parts.nodes) * (boundary.row(w) + boundary.row(w, gradient=True)) for w in crossed),
        # every rank also sums two numbers, loss and norm
        reduce=ring_bytes(parts, problem.params, problem.summed) + ring_bytes(problem.ranks, 2, problem.summed),
        bound="most" if "most" in bounds else "mean" if "mean" in bounds else "exact",
    )
    if not boundary.sends:
        return Price(traffic=traffic, unpriced=SENDS_NOTHING)
    bits, notes = boundary.bits()
    if strategy.virtual > 1:
        groups = strategy.cut_into(stages, work.ir.num_layers, seconds)
        notes += (f"virtual={strategy.virtual} is priced as 1: bytes are right, the bubble is smaller",)
    if strategy.cut == "balanced":
        notes += ("cut=balanced is made by predicted layer times here, by measured ones in a run",)
    if strategy.remat != "none":
        notes += (f"remat={strategy.remat} is priced as none: it needs less memory and more time",)
    if parts > 1 and strategy.codec.exactness - {"exact"}:
        notes += ("time is that of halo rows as they are: the price of a pipeline knows no codec between parts",)
    if strategy.refresh_exact and chunks > 1:
        notes += (f"an exact pass every {strategy.refresh} epochs (refresh_exact) is in neither time nor bytes",)
    if stages == chunks == 1:
        notes += ("one stage and one chunk are priced as graph_parallel",)
    cuts = tuple(g.start for g in groups)
    candidate = PipelineCandidate(parts=parts, stages=stages, chunks=chunks, bits=bits, cuts=cuts)
    return priced(candidate, problem, machine, traffic, notes)
