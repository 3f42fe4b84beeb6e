"""Gradient coverage: the share of edges whose gradient a schedule computes (GNNPipe, arXiv 2308.10087).

An edge from chunk j to chunk i reads j's rows fresh when j is at an earlier slot, and historical ones else; historical
rows are constants. The gradient of a fresh edge exists when chunk i went backward before chunk j did. Inside a chunk an
edge is always fresh and always kept. Last in first out keeps every fresh edge, 1F1B keeps none across chunks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import factorial

from gnnpar.parallel.pipeline.schedule.action import Schedule

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
        """The share of fresh cross-chunk edges whose gradient is computed; 1 where there are none."""
        return (self.kept - self.own) / self.fresh if self.fresh else 1.0


def kept(schedule: Schedule, stage: int) -> list[list[bool]]:
    """[K, K] by slot: does the gradient of edges into slot i (row) from slot j (column) exist at a virtual stage?"""
    mine = [a for a in schedule.actions[schedule.rank_of(stage)] if a.computes and a.stage == stage]
    at = {(action.kind, action.slot): position for position, action in enumerate(mine)}
    slots = range(schedule.slots)
    forward, backward = ([at[kind, slot] for slot in slots] for kind in ("forward", "backward"))
    return [[i == j or (forward[j] < forward[i] and backward[i] < backward[j]) for j in slots] for i in slots]


def coverage(schedule: Schedule, edges: Counts, order: Sequence[int]) -> Coverage:
    """Of one epoch: `edges` [K, K] by chunk, `order[slot]` the chunk at a slot."""
    _square(schedule, edges)
    if sorted(order) != list(range(schedule.slots)):
        raise ValueError(f"order={list(order)} is no order of {schedule.slots} chunks")
    cells = [(i, j, float(edges[order[i]][order[j]])) for i in range(len(order)) for j in range(len(order))]
    total = sum(n for _, _, n in cells) or 1.0
    matrices = [kept(schedule, stage) for stage in range(schedule.num_stages)]
    return Coverage(
        own=sum(n for i, j, n in cells if i == j) / total,
        fresh=sum(n for i, j, n in cells if j < i) / total,
        stale=sum(n for i, j, n in cells if j > i) / total,
        kept=sum(n for matrix in matrices for i, j, n in cells if matrix[i][j]) / total / len(matrices),
    )


def expected(schedule: Schedule, edges: Counts) -> Coverage:
    """Over uniformly random orders, exactly: every ordered pair of chunks is at every ordered pair of slots equally."""
    _square(schedule, edges)
    slots = range(schedule.slots)
    total = sum(float(n) for row in edges for n in row) or 1.0
    own = sum(float(edges[i][i]) for i in slots) / total
    crossing = sum(float(edges[i][j]) for i in slots for j in slots if i != j) / total
    pairs = schedule.slots * (schedule.slots - 1) * schedule.num_stages or 1
    survive = sum(sum(map(sum, kept(schedule, s))) - schedule.slots for s in range(schedule.num_stages)) / pairs
    return Coverage(own=own, fresh=crossing / 2, stale=crossing / 2, kept=own + crossing * survive)


def expected_weight(hops: int, factor: float = 2.0) -> float:
    """Mean weight of a gradient path through `hops` edges between distinct chunks: factor^m / (m + 1)! (spec 3.3).

    It survives where the chunks' slots are monotone; with factor 2 one hop is unbiased and more are not.
    """
    return factor**hops / factorial(hops + 1)


def _square(schedule: Schedule, edges: Counts) -> None:
    if len(edges) != schedule.slots or any(len(row) != schedule.slots for row in edges):
        raise ValueError(f"edges are [{len(edges)}, {len(edges[0])}], but the schedule has {schedule.slots} slots")
