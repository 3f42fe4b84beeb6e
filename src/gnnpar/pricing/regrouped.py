"""Folds on ranks that do not own the rows: rows are sent to the folding ranks, results back to the owners.

Feature parallelism (all edges on some columns) and CAGNET in 1.5 dimensions (edges of a group's rows from some parts).
Units: seconds, bytes; an element has 4 bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import ceil

from gnnpar.pricing.ir import Fold
from gnnpar.pricing.machine import Machine
from gnnpar.pricing.price import Memory, Phases
from gnnpar.pricing.tasks import TaskGraph
from gnnpar.pricing.work import NUMBER, Flow, LayerPass, Work, rank_memory, wire_bytes


@dataclass(frozen=True)
class Seconds:
    """Seconds of one layer in one direction on one rank. `stages`: the folds in order; `code`: encoding and decoding
    rows and results."""

    before: float
    stages: tuple[float, ...]
    after: float
    code: float


@dataclass(frozen=True)
class Regrouped:
    """Assignment of folds. `group[r]`: owners of the rows that rank r folds; `read[r][s]`: parts that it reads in stage
    s. `columns`: number of column shares, of which a rank folds one; 0: all columns."""

    group: tuple[Sequence[int], ...]
    read: tuple[Sequence[Sequence[int]], ...]
    columns: int = 0

    @classmethod
    def by_columns(cls, ranks: int) -> Regrouped:
        """Return the assignment in which every rank folds its columns of all rows in one stage."""
        return cls((range(ranks),) * ranks, ((range(ranks),),) * ranks, ranks)

    @property
    def stages(self) -> range:
        return range(len(self.read[0]))

    def moved(self, nodes: Sequence[float]) -> tuple[float, float]:
        """Return the numbers of sent (rows, results)."""
        rows = sum(nodes[q] for r, read in enumerate(self.read) for parts in read for q in parts if q != r)
        return rows, sum(nodes[b] for r, group in enumerate(self.group) for b in group if b != r)

    def folds(self, at: LayerPass) -> list[Fold]:
        """Return a rank's share of each fold."""
        share = max(1, self.columns)
        return [
            replace(
                f,
                src=tuple(ceil(w / share) for w in f.src),
                dst=tuple(ceil(w / share) for w in f.dst),
                out=ceil(f.out / share),
            )
            for f in _exchanged(at)
        ]

    def edges(self, work: Work, rank: int, parts: Sequence[int]) -> float:
        """Return the in-edges of a rank's group from these parts."""
        inner, cut = work.parts.inner, work.parts.cut
        return sum(inner[p] if p == q else cut[p][q] for p in self.group[rank] for q in parts)

    def seconds(self, at: LayerPass, rank: int) -> Seconds:
        work, backward = at.work, not at.forward
        rates, nodes = work.rates[rank], work.parts.nodes
        before, after = work.dense(at.layer, rank, nodes[rank], backward=backward)[:: -1 if backward else 1]
        folds, rows = self.folds(at), sum(nodes[p] for p in self.group[rank])
        stages: list[float] = []
        for parts in self.read[rank]:
            edges, sources = self.edges(work, rank, parts), sum(nodes[q] for q in parts)
            touched, table = min(sources if backward else edges, rows), rows if backward else sources
            stages.append(sum(rates.fold_seconds(f, edges, touched, table=table, backward=backward) for f in folds))
        return Seconds(before, tuple(stages), after, rates.code_seconds(at.bits, self._coded(at, rank)))

    def _coded(self, at: LayerPass, rank: int) -> float:
        """Return the elements of encoded rows and results."""
        nodes, folds, group = at.work.parts.nodes, _exchanged(at), self.group[rank]
        if len(nodes) == 1:
            return 0.0
        if self.columns:
            return 2 * sum(nodes) * sum(sum(f.src) + sum(f.dst) + f.out for f in folds) / self.columns
        readers = sum(rank in parts for r, read in enumerate(self.read) for parts in read if r != rank)
        moved = readers * nodes[rank] + sum(nodes[q] for parts in self.read[rank] for q in parts if q != rank)
        summed = sum(nodes[p] for p in group) + (len(group) - 2) * nodes[rank]  # sent to others, and received from each
        return sum(moved * f.width + summed * f.out for f in folds)

    def row_flows(self, at: LayerPass, stage: int) -> list[Flow]:
        """Return the messages of a stage: each part to its readers; backward in the other direction."""
        row = sum(wire_bytes((*f.src, *f.dst), at.bits) for f in self.folds(at))
        pairs = [(q, r) for r, read in enumerate(self.read) for q in read[stage] if q != r and row]
        nodes = at.work.parts.nodes
        return [(q, r, nodes[q] * row) if at.forward else (r, q, nodes[q] * row) for q, r in pairs]

    def home_flows(self, at: LayerPass) -> list[Flow]:
        """Return the messages of results to the owners of their rows; backward gradients go to the group."""
        row, nodes = sum(wire_bytes((f.out,), at.bits) for f in self.folds(at)), at.work.parts.nodes
        pairs = [(a, b) for a, group in enumerate(self.group) for b in group if a != b and row]
        return [(a, b, nodes[b if at.forward else a] * row) for a, b in pairs]

    def phases(self, at: LayerPass, machine: Machine, *, prefetch: int, lost: float) -> Phases:
        """Return the seconds of one layer. The first stage's rows arrive before any fold; in backward, the last stage's
        rows leave after all folds."""
        sides = [self.seconds(at, rank) for rank in range(at.work.parts.parts)]
        flows = [self.row_flows(at, stage) for stage in self.stages]
        at_once = [[flow for stage in turn for flow in flows[stage]] for turn in turns(len(flows), prefetch)]
        rows = sum(map(machine.exchange, at_once))
        beside = min(rows, max(sum(s.stages) for s in sides)) * (1 - 1 / len(flows))
        home = machine.exchange(self.home_flows(at))
        return Phases(
            compute=max(s.before + sum(s.stages) + s.after for s in sides),
            encode=max(s.code for s in sides),
            wire=rows - (beside * (1 - lost) if prefetch else 0.0) + home,
        )

    def memory(self, work: Work, *, prefetch: int) -> tuple[Memory, ...]:
        """Return the peak bytes of each rank."""
        ranks = range(work.parts.parts)
        return tuple(self._sliced(work, p) if self.columns else self._grouped(work, p, prefetch) for p in ranks)

    def _sliced(self, work: Work, rank: int) -> Memory:
        """Return the memory of a rank that folds columns: it also holds the structure of the whole graph."""
        parts, layers = work.parts, range(work.ir.num_layers)
        nodes, edges = sum(parts.nodes), self.edges(work, rank, range(self.columns))
        wide = [(sum(f.src) + sum(f.dst) + f.out, f.needs_src) for i in layers for f in work.ir.folds(i)]
        tables = nodes * (max([width for width, _ in wide], default=0) + 2) / self.columns
        kept = nodes * sum(width for width, reads in wide if reads) / self.columns
        own = rank_memory(work, layers, rank, columns=parts.nodes[rank], moving=tables)
        more = 16.0 * (edges + nodes) if self.columns > 1 else 0.0  # by destination and by source
        return replace(own, structure=own.structure + more, saved=own.saved + NUMBER * kept)

    def _grouped(self, work: Work, rank: int, prefetch: int) -> Memory:
        """Return the memory of a rank on a grid. Structure: in-edges of the group's rows from the parts that the rank
        reads, by destination and by source. Moving: sums of the group's rows, and either the column's messages or the
        group's.
        """
        nodes, layers, group, read = work.parts.nodes, range(work.ir.num_layers), self.group[rank], self.read[rank]
        folds = [f for i in layers for f in work.ir.folds(i)]
        width, out = max([f.width for f in folds], default=0), max([f.out for f in folds], default=0)
        rows, own = sum(nodes[p] for p in group), nodes[rank]
        column = ((len(read) - 1) * own + (1 + prefetch) * max(nodes)) * width
        moving = rows * out + max(column, (rows - own + len(group) * own) * out)
        memory, structure = rank_memory(work, layers, rank, columns=own, moving=moving), 0.0
        for parts in read:
            edges = self.edges(work, rank, parts)
            structure += 8.0 * edges + 4.0 * (min(edges, rows) + sum(nodes[q] for q in parts))
        ids = {*group, *(q for parts in read for q in parts)}
        return replace(memory, structure=structure + 8.0 * sum(nodes[q] for q in ids))

    def tasks(self, graph: TaskGraph, overhead: float, at: LayerPass, last: list[list[int]]) -> list[list[int]]:
        """Add the tasks of one layer on every rank. Return the tasks that the next layer waits for."""
        tag, sides = at.name, [self.seconds(at, p) for p in range(at.work.parts.parts)]
        ready = [graph.compute(f"{tag} before", p, s.before + s.code + overhead, last[p]) for p, s in enumerate(sides)]
        done = [[each] for each in ready]

        def send(flows: list[Flow], name: str, waits: list[list[int]]) -> None:
            """Add messages; every receiver waits for its own. waits[a]: tasks that sender a waits for."""
            sent = [(b, graph.flow(f"{tag} {name} {a}>{b}", a, b, nbytes, waits[a])) for a, b, nbytes in flows]
            for b, flow in sent:
                done[b].append(flow)

        if not at.forward:
            send(self.home_flows(at), "home", [list(each) for each in done])
        for stage in self.stages:
            rows = self.row_flows(at, stage)
            if at.forward:
                send(rows, f"rows {stage}", [[each] for each in ready])
            done = [[graph.compute(f"{tag} fold {stage}", p, s.stages[stage], done[p])] for p, s in enumerate(sides)]
            if not at.forward:
                send(rows, f"rows {stage}", [list(each) for each in done])
        if at.forward:
            send(self.home_flows(at), "home", [list(each) for each in done])
        return [[graph.compute(f"{tag} after", p, s.after, done[p])] for p, s in enumerate(sides)]


def _exchanged(at: LayerPass) -> list[Fold]:
    folds = [] if at.layer == 0 and at.work.held == "result" else at.work.ir.folds(at.layer)
    return [f for f in folds if at.forward or f.learned]


def turns(count: int, prefetch: int) -> list[range]:
    """Return the stages in flight at once."""
    return [range(first, min(count, first + 1 + prefetch)) for first in range(0, count, 1 + prefetch)]
