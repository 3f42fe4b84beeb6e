"""What an epoch of CAGNET in 1.5 dimensions takes. Units: seconds, bytes; a number is 4 bytes.

A layer: rows of parts go down columns while others are folded, then partial sums go to the owners of their rows, which
nothing hides. Backward gradients of results go to the group first, and those of rows from the column to their owners.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from gnnpar.parallel.cagnet.grid import Grid
from gnnpar.pricing.ir import Fold
from gnnpar.pricing.machine import Machine
from gnnpar.pricing.memory import rank_memory
from gnnpar.pricing.price import Memory, Phases
from gnnpar.pricing.tasks import Task, TaskGraph
from gnnpar.pricing.work import DIRECTIONS, Direction, Work, wire_bytes

Flow = tuple[int, int, float]
"""Sender, receiver, bytes."""


@dataclass(frozen=True)
class Seconds:
    """Of one layer in one direction on one rank. `stages`: the fold of each part that it reads; `code`: rows and sums
    made ready to be sent and taken in."""

    before: float
    stages: tuple[float, ...]
    after: float
    code: float


@dataclass(frozen=True)
class GridWork:
    """Work of P parts on a grid of P / c groups of c ranks. `bits`: of rows and of partial sums on the wire;
    `prefetch`: parts under way while one is folded."""

    work: Work
    grid: Grid
    bits: int
    prefetch: int

    @property
    def nodes(self) -> tuple[float, ...]:
        return self.work.parts.nodes

    def group_rows(self, rank: int) -> float:
        return sum(self.nodes[p] for p in self.grid.group(rank))

    def read(self, rank: int) -> list[int]:
        """Return the part of each stage."""
        return [self.grid.source(self.grid.column(rank), stage) for stage in range(self.grid.stages)]

    def edges(self, rank: int, part: int) -> float:
        """In-edges of the rows of a rank's group from a part."""
        parts = self.work.parts
        return sum(parts.inner[p] if p == part else parts.cut[p][part] for p in self.grid.group(rank))

    def folds(self, layer: int, direction: Direction) -> list[Fold]:
        if layer == 0 and self.work.held == "result":
            return []
        return [f for f in self.work.ir.folds(layer) if direction == "forward" or f.learned]

    def seconds(self, rank: int, layer: int, direction: Direction) -> Seconds:
        rates, backward = self.work.rates[rank], direction == "backward"
        before = after = 0.0
        for group in self.work.ir.layer(layer):
            dense = rates.dense_seconds(group, self.nodes[rank], backward=backward)
            if (group.phase in ("begin", "transform")) != backward:
                before += dense
            else:
                after += dense
        folds, rows = self.folds(layer, direction), self.group_rows(rank)
        stages: list[float] = []
        for part in self.read(rank):
            edges, sources = self.edges(rank, part), self.nodes[part]
            touched = min(sources if backward else edges, rows)
            table = rows if backward else sources
            stages.append(sum(rates.fold_seconds(f, edges, touched, table=table, backward=backward) for f in folds))
        readers = sum(p != rank for p in self.grid.readers(rank))
        moved = readers * self.nodes[rank] + sum(self.nodes[q] for q in self.read(rank) if q != rank)
        summed = rows + (self.grid.copies - 2) * self.nodes[rank]  # to the others, and from each of them
        numbers = sum(moved * f.width + summed * f.out for f in folds)
        return Seconds(before, tuple(stages), after, rates.code_seconds(self.bits, numbers))

    def row_flows(self, stage: int, layer: int, direction: Direction) -> list[Flow]:
        """Of a stage: a part a column to its readers; backward the other way."""
        row = sum(wire_bytes(f.src, self.bits) for f in self.folds(layer, direction))
        pairs = [
            (part, reader, self.nodes[part] * row)
            for column in range(self.grid.copies)
            for part in [self.grid.source(column, stage)]
            for reader in self.grid.readers(part)
            if reader != part and row
        ]
        return pairs if direction == "forward" else [(b, a, nbytes) for a, b, nbytes in pairs]

    def sum_flows(self, layer: int, direction: Direction) -> list[Flow]:
        """Partial sums to the owners of their rows; backward gradients of these rows to the group."""
        row = sum(wire_bytes((f.out,), self.bits) for f in self.folds(layer, direction))
        pairs = [(a, b) for a in range(self.grid.ranks) for b in self.grid.group(a) if a != b and row]
        return [(a, b, self.nodes[b if direction == "forward" else a] * row) for a, b in pairs]

    def phases(self, machine: Machine, layer: int, direction: Direction, *, lost: float, visit: float) -> Phases:
        """Return the phases: the first stage's rows pass before any fold, backward the last one's after all of them."""
        sides = [self.seconds(rank, layer, direction) for rank in range(self.grid.ranks)]
        fold = max(sum(s.stages) for s in sides)
        stages, at_once = range(self.grid.stages), 1 + self.prefetch
        turns = [stages[first : first + at_once] for first in range(0, self.grid.stages, at_once)]
        rows = sum(
            machine.exchange([flow for stage in turn for flow in self.row_flows(stage, layer, direction)])
            for turn in turns
        )
        hidden = min(rows, fold) * (1 - 1 / self.grid.stages) if self.prefetch else 0.0
        sums = machine.exchange(self.sum_flows(layer, direction))
        return Phases(
            compute=max(s.before + sum(s.stages) + s.after for s in sides) + visit,
            encode=max(s.code for s in sides),
            wire=rows - hidden * (1 - lost) + sums,
        )

    def memory(self) -> tuple[Memory, ...]:
        """Structure: in-edges of the group's rows from the parts that a rank reads, by destination and by source.
        Moving: sums of the group's rows, beside what passes down the column or, after that, to and from the group."""
        ir, layers = self.work.ir, range(self.work.ir.num_layers)
        folds = [f for i in layers for f in ir.folds(i)]
        width, out = max([f.width for f in folds], default=0), max([f.out for f in folds], default=0)
        found: list[Memory] = []
        for rank in range(self.grid.ranks):
            rows, read, own = self.group_rows(rank), self.read(rank), self.nodes[rank]
            column = ((self.grid.stages - 1) * own + (1 + self.prefetch) * max(self.nodes)) * width
            group = (rows - own + self.grid.copies * own) * out
            moving = rows * out + max(column, group)
            memory = rank_memory(self.work, layers, rank, columns=own, moving=moving)
            blocks = 0.0
            for part in read:
                edges = self.edges(rank, part)
                blocks += 8.0 * edges + 4.0 * (min(edges, rows) + self.nodes[part])
            ids = 8.0 * sum(self.nodes[q] for q in {*read, *self.grid.group(rank)})
            found.append(replace(memory, structure=blocks + ids))
        return tuple(found)

    def tasks(self, machine: Machine, engine: str) -> list[Task]:
        graph, layers = TaskGraph(machine), range(self.work.ir.num_layers)
        ranks = range(self.grid.ranks)
        last: list[list[int]] = [[] for _ in ranks]
        for direction in DIRECTIONS:
            for layer in layers if direction == "forward" else reversed(layers):
                last = self._layer_tasks(graph, layer, direction, last, self.work.visit_seconds(engine))
            if direction == "forward":
                last = [[graph.compute("loss", p, self.work.loss_seconds[p], last[p])] for p in ranks]
        graph.end(self.work, engine, ranks, layers, [i for each in last for i in each])
        return graph.made

    def _layer_tasks(
        self, graph: TaskGraph, layer: int, direction: Direction, last: list[list[int]], visit: float
    ) -> list[list[int]]:
        """One layer on every rank. Returns what the next one waits for."""
        ranks, tag = range(self.grid.ranks), f"{direction[0].upper()}{layer}"
        sides = [self.seconds(rank, layer, direction) for rank in ranks]
        ready = [graph.compute(f"{tag} before", p, s.before + s.code + visit, last[p]) for p, s in enumerate(sides)]
        done = [[each] for each in ready]

        def send(flows: list[Flow], name: str, waits: list[list[int]]) -> None:
            """Every receiver waits for what it gets; `waits`: of each sender."""
            sent = [(b, graph.flow(f"{tag} {name} {a}>{b}", a, b, nbytes, waits[a])) for a, b, nbytes in flows]
            for b, flow in sent:
                done[b].append(flow)

        if direction == "backward":
            send(self.sum_flows(layer, direction), "sums", [list(each) for each in done])
        for stage in range(self.grid.stages):
            if direction == "forward":
                send(self.row_flows(stage, layer, direction), f"rows {stage}", [[each] for each in ready])
            done = [[graph.compute(f"{tag} fold {stage}", p, sides[p].stages[stage], done[p])] for p in ranks]
            if direction == "backward":
                send(self.row_flows(stage, layer, direction), f"rows {stage}", [list(each) for each in done])
        if direction == "forward":
            send(self.sum_flows(layer, direction), "sums", [list(each) for each in done])
        return [[graph.compute(f"{tag} after", p, sides[p].after, done[p])] for p in ranks]
