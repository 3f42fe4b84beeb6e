"""Candidates in which whole parts travel to all ranks, one part after the other: what CAGNET and SANCUS share.

A broadcast is a message of its part's owner to every other rank; `prefetch` + 1 parts are under way at a time, and the
next ones pass beside the fold of one. Backward the same with gradients, towards the owner.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from gnnpar.pricing.flat import ExchangeCandidate
from gnnpar.pricing.machine import Machine
from gnnpar.pricing.memory import rank_memory, widest_fold
from gnnpar.pricing.price import Memory, Phases
from gnnpar.pricing.statistics import PartStats
from gnnpar.pricing.tasks import Task
from gnnpar.pricing.work import Direction, Held, Work


@dataclass(frozen=True, kw_only=True)
class BroadcastCandidate(ExchangeCandidate):
    """`prefetch`: parts under way while one is folded."""

    prefetch: int = 1

    @property
    def engine(self) -> str:
        return "cagnet"

    def keeps(self, held: Held) -> Held:
        return "result" if held == "result" else "no"

    @property
    def may_hold(self) -> bool:
        return self.parts > 1

    @property
    def ordered(self) -> bool:
        """Every pair of ranks exchanges all rows."""
        return False

    @property
    def whole_halo(self) -> bool:
        return False

    def share(self, direction: Direction) -> float:
        """Of broadcasts that take place in an epoch."""
        return 1.0

    def copies(self, work: Work, layer: int, direction: Direction) -> float:
        return self.share(direction)

    def phases(self, work: Work, machine: Machine) -> Phases:
        return super().phases(whole_parts(work), machine)

    def tasks(self, work: Work, machine: Machine) -> list[Task]:
        return super().tasks(whole_parts(work), machine)

    def layer_phases(
        self, work: Work, machine: Machine, layer: int, direction: Direction, *, lost: float, visit: float
    ) -> Phases:
        pieces = work.pieces(layer, direction, bits=self.bits)
        flows, owner = work.flows(layer, direction, self.bits), 0 if direction == "forward" else 1
        at_once = 1 + self.prefetch
        turns = [range(first, first + at_once) for first in range(0, self.parts, at_once)]
        wire = sum(machine.exchange([flow for flow in flows if flow[owner] in turn]) for turn in turns)
        share = self.share(direction)
        fold = max(p.inner + sum(p.halo) for p in pieces)
        compute = max(p.compute for p in pieces) + visit
        hidden = min(wire * share, fold) if self.prefetch else 0.0
        encode = max(p.pack + p.unpack for p in pieces) * share
        return Phases(compute=compute, encode=encode, wire=wire * share - hidden * (1 - lost))

    def memory(self, work: Work) -> tuple[Memory, ...]:
        """Return memory: a rank's own rows wait in one buffer per reader, and come back as gradients of all of them."""
        layers, nodes = range(work.ir.num_layers), work.parts.nodes
        whole, width = whole_parts(work), widest_fold(work, range(work.ir.num_layers))
        under_way = (1 + self.prefetch) * max(nodes)
        return tuple(
            rank_memory(whole, layers, p, columns=sum(nodes), moving=((self.parts - 1) * nodes[p] + under_way) * width)
            for p in range(self.parts)
        )


def whole_parts(work: Work) -> Work:
    """Return the work of parts that read all rows of each other."""
    parts = work.parts
    every = tuple(tuple(0.0 if p == q else n for q, n in enumerate(parts.nodes)) for p in range(parts.parts))
    return replace(work, parts=PartStats(parts.nodes, parts.inner, parts.cut, every))
