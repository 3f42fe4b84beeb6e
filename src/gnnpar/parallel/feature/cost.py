"""What feature parallelism takes: folds of all edges on 1/P of the columns, between two all-to-alls.

Units: seconds, bytes; a number is 4 bytes. No message hides behind a fold. Bytes follow the shapes of the model's
folds; time divides their widths evenly over ranks.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from math import ceil, prod
from typing import TYPE_CHECKING

import torch

from gnnpar.data.dataset import Dataset
from gnnpar.files import JsonDict
from gnnpar.parallel.feature.slices import slices_of
from gnnpar.parallel.priced import Problem
from gnnpar.parallel.row_bytes import RowBytes, coded_price
from gnnpar.parallel.sketch import Use, sketch
from gnnpar.partition.shard import cut
from gnnpar.pricing.candidate import Candidate, Knobs, Scope, codec_fields, quality_of
from gnnpar.pricing.flat import exchanged_folds, layer_by_layer, ring_bytes
from gnnpar.pricing.ir import Fold, ModelIR
from gnnpar.pricing.machine import Machine
from gnnpar.pricing.memory import rank_memory
from gnnpar.pricing.price import Memory, Phases, Price, Traffic
from gnnpar.pricing.quality import Quality
from gnnpar.pricing.tasks import Task, TaskGraph
from gnnpar.pricing.work import DIRECTIONS, Direction, Held, Work, wire_bytes

if TYPE_CHECKING:
    from gnnpar.parallel.feature.strategy import FeatureParallel


@dataclass(frozen=True, kw_only=True)
class FeatureCandidate(Candidate):
    """`bits`: of a number on the wire."""

    family: str = "feature"
    bits: int = 32

    @property
    def label(self) -> str:
        words = ["feature"] + ([f"{self.bits} bit"] if self.bits != 32 else [])
        return ", ".join(words + (["first layer held"] if self.held else []))

    @property
    def quality(self) -> frozenset[Quality]:
        return quality_of(self.bits)

    @property
    def engine(self) -> str:
        return "feature"

    @property
    def fields(self) -> JsonDict:
        return {"codec": codec_fields(self.bits)}

    def knobs(self, ir: ModelIR) -> Knobs:
        return {"bits": (32, 16)}

    @property
    def may_hold(self) -> bool:
        return self.parts > 1

    @property
    def ordered(self) -> bool:
        """Every pair of ranks exchanges at once."""
        return False

    def keeps(self, held: Held) -> Held:
        return "result" if held == "result" else "no"

    def phases(self, work: Work, machine: Machine) -> Phases:
        visit = work.visit_seconds(self.engine)

        def layer(i: int, direction: Direction) -> Phases:
            sides = [self._seconds(work, p, i, direction) for p in range(self.parts)]
            compute, encode = (max(times) for times in zip(*((sum(s[:3]), s[3]) for s in sides), strict=True))
            wire = sum(machine.exchange(flows) for flows in self._flows(work, i, direction))
            return Phases(compute=compute + visit, encode=encode, wire=wire)

        return layer_by_layer(work, machine, self.engine, layer)

    def memory(self, work: Work) -> tuple[Memory, ...]:
        """Each rank has the structure of the whole graph beside that of its part."""
        ir, layers = work.ir, range(work.ir.num_layers)
        nodes, edges = sum(work.parts.nodes), sum(work.parts.edges(p) for p in range(self.parts))
        folds = [f for i in layers for f in ir.folds(i)]
        whole = 16.0 * edges + 16.0 * nodes  # by destination and by source, of 32 bits; destinations of edges of 64
        tables = nodes * max([sum(f.src) + sum(f.dst) + f.out for f in folds], default=0) / self.parts
        kept = nodes * sum(sum(f.src) + sum(f.dst) + f.out for f in folds if f.needs_src) / self.parts
        found: list[Memory] = []
        for p in range(self.parts):
            own = rank_memory(work, layers, p, columns=work.parts.nodes[p], moving=tables + 2 * nodes / self.parts)
            more = 0.0 if self.parts == 1 else whole
            found.append(replace(own, structure=own.structure + more, saved=own.saved + 4.0 * kept))
        return tuple(found)

    def tasks(self, work: Work, machine: Machine) -> list[Task]:
        graph, ranks, layers = TaskGraph(machine), range(self.parts), range(work.ir.num_layers)
        last: list[list[int]] = [[] for _ in ranks]
        for direction in DIRECTIONS:
            for i in layers if direction == "forward" else reversed(layers):
                tag = f"{direction[0].upper()}{i}"
                sides = [self._seconds(work, p, i, direction) for p in ranks]
                out, back = self._flows(work, i, direction)
                for name, k, flows in (("before", 0, out), ("fold", 1, back), ("after", 2, ())):
                    extra = [s[3] / 2 if flows else 0.0 for s in sides]
                    done = [graph.compute(f"{tag} {name}", p, sides[p][k] + extra[p], last[p]) for p in ranks]
                    last = [[done[p]] for p in ranks]
                    for q, p, nbytes in flows:
                        last[p].append(graph.flow(f"{tag} {name} {q}>{p}", q, p, nbytes, [done[q]]))
            if direction == "forward":
                last = [[graph.compute("loss", p, work.loss_seconds[p], last[p])] for p in ranks]
        graph.end(work, self.engine, ranks, layers, [i for each in last for i in each])
        return graph.made

    def _folds(self, work: Work, layer: int, direction: Direction) -> list[Fold]:
        if layer == 0 and work.held == "result":
            return []
        return [f for f in work.ir.folds(layer) if direction == "forward" or f.learned]

    def _seconds(self, work: Work, p: int, layer: int, direction: Direction) -> tuple[float, float, float, float]:
        """(dense work before the folds, the folds, dense work after them, packing) of a rank."""
        rates, backward = work.rates[p], direction == "backward"
        before = after = 0.0
        for group in work.ir.layer(layer):
            seconds = rates.dense_seconds(group, work.parts.nodes[p], backward=backward)
            if (group.phase in ("begin", "transform")) != backward:
                before += seconds
            else:
                after += seconds
        nodes, edges = sum(work.parts.nodes), sum(work.parts.edges(q) for q in range(self.parts))
        folds = self._folds(work, layer, direction)
        fold = sum(
            rates.fold_seconds(_share(f, self.parts), edges, nodes, table=nodes, backward=backward) for f in folds
        )
        numbers = 2 * nodes * sum(sum(f.src) + sum(f.dst) + f.out for f in folds) / self.parts
        return before, fold, after, rates.code_seconds(self.bits, numbers) if self.parts > 1 else 0.0

    def _flows(
        self, work: Work, layer: int, direction: Direction
    ) -> tuple[list[tuple[int, int, float]], list[tuple[int, int, float]]]:
        """(sender, receiver, bytes) of both all-to-alls in their order."""
        shares = [_share(f, self.parts) for f in self._folds(work, layer, direction)]
        row = sum(wire_bytes((*f.src, *f.dst), self.bits) for f in shares)
        result = sum(wire_bytes((f.out,), self.bits) for f in shares)
        pairs = [(a, b) for a in range(self.parts) for b in range(self.parts) if a != b and row]
        nodes = work.parts.nodes
        if direction == "forward":
            return [(a, b, nodes[a] * row) for a, b in pairs], [(a, b, nodes[b] * result) for a, b in pairs]
        return [(a, b, nodes[a] * result) for a, b in pairs], [(a, b, nodes[b] * row) for a, b in pairs]


def _share(fold: Fold, parts: int) -> Fold:
    """Return a rank's share of a fold."""
    src, dst = (tuple(ceil(w / parts) for w in widths) for widths in (fold.src, fold.dst))
    return replace(fold, src=src, dst=dst, out=ceil(fold.out / parts))


def candidates(scope: Scope, ranks: int) -> Iterator[FeatureCandidate]:
    if ranks > 1:
        yield FeatureCandidate(parts=ranks)
        yield FeatureCandidate(parts=ranks, bits=16)


def cost(strategy: FeatureParallel, problem: Problem, machine: Machine) -> Price:
    rows = RowBytes(strategy.codec, problem.number)
    live = FeatureCandidate(parts=problem.ranks, held=problem.kept == "result")
    return coded_price(
        rows,
        live,
        problem,
        machine,
        lambda: traffic_of(rows, uses_of(problem), problem.work(live), problem.params),
    )


def uses_of(problem: Problem) -> list[Use]:
    """Return the model's folds with the shapes of their operands."""
    none = torch.zeros(0, dtype=torch.long)
    mask, y = torch.zeros(1, dtype=torch.bool), problem.workload.dataset.y[:1]
    one = Dataset.of(
        "one",
        x=torch.zeros(1, problem.ir.in_dim),
        y=torch.zeros_like(y) if len(y) else y,
        edge_index=torch.stack([none, none]),
        masks=(mask, mask, mask),
        num_classes=problem.workload.dataset.num_classes,
        task=problem.workload.dataset.task,
    )
    return sketch(problem.model, cut(one, torch.zeros(1, dtype=torch.long), 1, edge_ids=True)[0])


def traffic_of(rows: RowBytes, uses: Sequence[Use], work: Work, params: int) -> Traffic:
    """To the byte: a rank that works in a fold receives the rows of all other nodes, and sends home their results."""
    ranks, sent = work.parts.parts, {True: 0.0, False: 0.0}
    learned = [f.learned for i in range(work.ir.num_layers) for f in work.ir.folds(i)]
    exchanged = len(exchanged_folds(work))
    for use, has_gradient in list(zip(uses, learned, strict=True))[len(learned) - exchanged :]:
        if ranks == 1:
            continue
        slices = slices_of(use.agg, use.src, len(use.dst), ranks, use.layer)
        home = replace(slices, whole=frozenset())
        for q in filter(slices.works, range(ranks)):
            others = sum(work.parts.nodes) - work.parts.nodes[q]
            source = [prod(each.shape) for each in slices.like((*use.src, *use.dst), q)]
            result = [prod(each.shape) for each in home.like(use.out, q)]
            for back in (False, True):
                if has_gradient or not back:
                    sent[back] += others * (rows.row(source, gradient=back) + rows.row(result, gradient=back))
    total = ring_bytes(ranks, params + 1 + work.ir.summed_moments, rows.summed)
    return Traffic(forward=sent[False], backward=sent[True], reduce=total, bound=rows.bound)
