"""CoFree-GNN: computing on the copies and edges of a vertex cut, and no messages."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from gnnpar.parallel.priced import Problem
from gnnpar.placement import Topology
from gnnpar.pricing.machine import Machine
from gnnpar.pricing.price import Memory, Price, Traffic, ring_bytes
from gnnpar.pricing.statistics import PartStats
from gnnpar.pricing.steps import FlatCandidate, Step
from gnnpar.pricing.work import Work

if TYPE_CHECKING:
    from gnnpar.parallel.cofree.strategy import CoFree


@dataclass(frozen=True, kw_only=True)
class VertexCutCandidate(FlatCandidate):
    """`own`: parts of nodes, which a rank holds beside its copies, to evaluate them. `edges`: of each part, with those
    that masks leave out; `masks`: that are kept beside them."""

    family: str = "cofree"
    own: PartStats
    edges: tuple[float, ...]
    masks: int

    @property
    def step(self) -> Step:
        return Step("halo")

    @property
    def label(self) -> str:
        return self.family

    def memory(self, work: Work) -> tuple[Memory, ...]:
        masked = super().memory(work)
        whole = super().memory(replace(work, parts=replace(work.parts, inner=self.edges)))
        held = (
            replace(m, structure=w.structure + self.masks * m.structure) for m, w in zip(masked, whole, strict=True)
        )
        return tuple(self._with_own(work, p, each) for p, each in enumerate(held))

    def _with_own(self, work: Work, p: int, held: Memory) -> Memory:
        nodes, halo = self.own.nodes[p], sum(self.own.halo[p])
        blocks = 4.0 * self.own.edges(p) + 12.0 * nodes + 8.0 * (halo + self.own.sent(p))  # for no gradient
        features = nodes * (4.0 * work.ir.in_dim + 20.0)
        return replace(held, structure=held.structure + blocks, features=held.features + features)


def cost(strategy: CoFree, problem: Problem, machine: Machine) -> Price:
    ranks, left = problem.ranks, 1 - strategy.drop_edge
    found = strategy.plan(problem.workload, Topology(ranks)).statistics
    nodes, edges = tuple(map(float, found["copies"])), tuple(map(float, found["copied_edges"]))
    none = ((0.0,) * ranks,) * ranks
    live = VertexCutCandidate(
        parts=ranks,
        held=problem.kept != "no",
        own=problem.work_of(ranks).parts,
        edges=edges,
        masks=strategy.masks if strategy.drop_edge else 0,
    )
    work = replace(problem.work(live), parts=PartStats(nodes, tuple(e * left for e in edges), none, none))
    traffic = Traffic(reduce=ring_bytes(ranks, problem.params + 1, problem.summed))
    return replace(live.price(work, machine), traffic=traffic)
