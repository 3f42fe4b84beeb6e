"""Gradient coverage: the share of edges whose gradient a schedule computes (GNNPipe, arXiv 2308.10087).

An edge from chunk j to chunk i reads j's rows fresh when j is at an earlier slot, and historical ones else; historical
rows are constants. The gradient of a fresh edge exists when chunk i went backward before chunk j did. Inside a chunk an
edge is always fresh and always kept. Last in first out keeps every fresh edge, 1F1B keeps none across chunks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

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
        """Return the share of fresh edges across chunks that have a gradient; 1 where there are no such edges."""
        return (self.kept - self.own) / self.fresh if self.fresh else 1.0


def kept(schedule: Schedule, stage: int) -> list[list[bool]]:
    """Return [K, K] by slot: does a virtual stage compute the gradient of edges into slot i (row) from slot j?"""
    mine = [a for a in schedule.actions[schedule.rank_of(stage)] if a.computes and a.stage == stage]
    at = {(action.kind, action.slot): position for position, action in enumerate(mine)}
    slots = range(schedule.slots)
    forward, backward = ([at[kind, slot] for slot in slots] for kind in ("forward", "backward"))
    return [[i == j or (forward[j] < forward[i] and backward[i] < backward[j]) for j in slots] for i in slots]


def expected(schedule: Schedule, edges: Counts) -> Coverage:
    """Return the mean over all orders of chunks: every ordered pair of chunks is at each ordered pair of slots equally
    often."""
    slots = range(schedule.slots)
    if len(edges) != schedule.slots or any(len(row) != schedule.slots for row in edges):
        raise ValueError(f"edges are [{len(edges)}, {len(edges[0])}], but the schedule has {schedule.slots} slots")
    total = sum(float(n) for row in edges for n in row) or 1.0
    own = sum(float(edges[i][i]) for i in slots) / total
    crossing = sum(float(edges[i][j]) for i in slots for j in slots if i != j) / total
    pairs = schedule.slots * (schedule.slots - 1) * schedule.num_stages or 1
    survive = sum(sum(map(sum, kept(schedule, s))) - schedule.slots for s in range(schedule.num_stages)) / pairs
    return Coverage(own=own, fresh=crossing / 2, stale=crossing / 2, kept=own + crossing * survive)
