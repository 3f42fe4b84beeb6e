"""What an epoch of PipeGCN takes: computing, beside which all messages of an epoch pass, and what is longer of both.

Units: seconds, bytes. Of what is hidden, computing pays the share `lost` of the machine. Memory: messages that wait to
be taken, of `staleness` epochs and both directions, and running means.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from gnnpar.files import JsonDict
from gnnpar.parallel.priced import Problem
from gnnpar.parallel.row_bytes import RowBytes, coded_price
from gnnpar.pricing.candidate import Scope, codec_fields, quality_of
from gnnpar.pricing.flat import ExchangeCandidate, layer_by_layer
from gnnpar.pricing.machine import Machine
from gnnpar.pricing.price import Memory, Phases, Price
from gnnpar.pricing.quality import Quality
from gnnpar.pricing.tasks import TaskGraph
from gnnpar.pricing.work import Direction, Piece, Work

if TYPE_CHECKING:
    from gnnpar.parallel.pipegcn.strategy import PipeGCN


@dataclass(frozen=True, kw_only=True)
class LateCandidate(ExchangeCandidate):
    """`staleness`: at least one epoch. `means`: of how many directions running means are kept."""

    family: str = "pipegcn"
    staleness: int = 1
    means: int = 0

    @property
    def label(self) -> str:
        words = [f"pipegcn, {self.staleness} epochs late" if self.staleness > 1 else "pipegcn"]
        words += [f"{self.bits} bit"] if self.bits != 32 else []
        words += ["first layer held"] if self.held else []
        return ", ".join(words)

    @property
    def quality(self) -> frozenset[Quality]:
        return quality_of(self.bits, stale=True)

    @property
    def fields(self) -> JsonDict:
        return {"codec": codec_fields(self.bits), "staleness": self.staleness}

    @property
    def ordered(self) -> bool:
        """Every pair of ranks exchanges at once."""
        return False

    def layer_phases(
        self, work: Work, machine: Machine, layer: int, direction: Direction, *, lost: float, visit: float
    ) -> Phases:
        """`wire`: all of a layer's, as if nothing hid it; `phases` knows what does."""
        pieces = work.pieces(layer, direction, bits=self.bits)
        wire = machine.exchange(work.flows(layer, direction, self.bits), idle=0.0)
        return Phases(
            compute=max(p.compute for p in pieces) + visit, encode=max(p.pack + p.unpack for p in pieces), wire=wire
        )

    def phases(self, work: Work, machine: Machine) -> Phases:
        lost, visit = machine.lost(range(self.parts)), work.visit_seconds(self.engine)
        alone = layer_by_layer(
            work,
            machine,
            self.engine,
            lambda layer, direction: self.layer_phases(work, machine, layer, direction, lost=lost, visit=visit),
        )
        hidden = min(alone.wire, alone.compute)
        return replace(alone, wire=alone.wire - hidden * (1 - lost))

    def memory(self, work: Work) -> tuple[Memory, ...]:
        forward, backward = (
            sum(work.exchanged_width(i, d) for i in range(work.ir.num_layers)) for d in ("forward", "backward")
        )
        more: list[float] = []
        for p, rows in enumerate(work.parts.halo):
            numbers = forward * sum(rows) + backward * work.parts.sent(p)
            more.append(4.0 * numbers * (self.staleness + self.means / 2))
        return tuple(replace(m, halo=m.halo + n) for m, n in zip(super().memory(work), more, strict=True))

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
        """Add the folds of rows that arrived in an earlier epoch; return their numbers."""
        for q, n in nbytes.items():
            graph.flow(f"{tag} {q}>{p}", q, p, n, [ready[q]], idle=idle)
        folded = [graph.compute(f"{tag} inner", p, piece.inner, [ready[p]])]
        for q in nbytes:
            seconds = piece.halo[q] + graph.machine.rates[p].message
            folded.append(graph.compute(f"{tag} halo {q}", p, seconds, [folded[-1]]))
        return folded


def candidates(scope: Scope, ranks: int) -> Iterator[LateCandidate]:
    if ranks > 1:
        yield LateCandidate(parts=ranks)
        yield LateCandidate(parts=ranks, bits=16)


def cost(strategy: PipeGCN, problem: Problem, machine: Machine) -> Price:
    rows = RowBytes(strategy.codec, problem.number, strategy.halo, linear=strategy.staleness > 0)
    held, parts = problem.kept != "no", problem.ranks
    if strategy.staleness == 0:
        live = Exact(parts=parts, held=held, overlap="none" if strategy.overlap == "none" else "edges")
    else:
        means = strategy.smooth_features + strategy.smooth_gradients
        live = LateCandidate(parts=parts, held=held, staleness=strategy.staleness, means=means)
    return coded_price(
        rows, live, problem, machine, lambda: rows.halo_traffic(problem.work(live), params=problem.params)
    )


@dataclass(frozen=True, kw_only=True)
class Exact(ExchangeCandidate):
    """staleness=0."""

    family: str = "pipegcn"

    @property
    def label(self) -> str:
        return "pipegcn, not late"
