"""Memory and bytes of CoFree-GNN: computing on the copies and edges of a vertex cut, and no messages."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from gnnpar.parallel.declared import DeclaredCandidate
from gnnpar.parallel.priced import Problem
from gnnpar.placement import Topology
from gnnpar.pricing.machine import Machine
from gnnpar.pricing.price import Memory, Price, Traffic, ring_bytes
from gnnpar.pricing.statistics import PartStats
from gnnpar.pricing.work import Work

if TYPE_CHECKING:
    from gnnpar.parallel.cofree.strategy import CoFree


def cost(strategy: CoFree, problem: Problem, machine: Machine) -> Price:
    ranks, left = problem.ranks, 1 - strategy.drop_edge
    found = strategy.plan(problem.workload, Topology(ranks)).statistics
    nodes, edges = tuple(map(float, found["copies"])), tuple(map(float, found["copied_edges"]))
    none, own = ((0.0,) * ranks,) * ranks, problem.work_of(ranks)
    masked, whole = (
        replace(own, parts=PartStats(nodes, tuple(e * share for e in edges), none, none)) for share in (left, 1.0)
    )
    live = DeclaredCandidate(strategy=strategy, parts=ranks, held=problem.kept != "no")
    traffic = Traffic(reduce=ring_bytes(ranks, problem.params + 1, problem.summed))
    price = replace(live.price(replace(masked, held=live.keeps(problem.kept)), machine), traffic=traffic)
    structure = [m.structure for m in live.memory(whole)]
    masks = strategy.masks if strategy.drop_edge else 0
    held = [replace(m, structure=s + masks * m.structure) for m, s in zip(price.memory, structure, strict=True)]
    return replace(price, memory=tuple(_with_own(own, p, each) for p, each in enumerate(held)))


def _with_own(work: Work, p: int, held: Memory) -> Memory:
    """Add the part of nodes that a rank holds beside its copies, to evaluate them."""
    nodes, halo = work.parts.nodes[p], sum(work.parts.halo[p])
    blocks = 4.0 * work.parts.edges(p) + 12.0 * nodes + 8.0 * (halo + work.parts.sent(p))  # for no gradient
    features = nodes * (4.0 * work.ir.in_dim + 20.0)
    return replace(held, structure=held.structure + blocks, features=held.features + features)
