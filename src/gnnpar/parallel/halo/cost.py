"""What graph parallelism takes for an epoch: a layer waits for its halo, or folds its inner edges meanwhile.

An exchange costs the most loaded link; where messages and computing overlap, a share of the
shorter is lost. Time knows the bits of rows; bytes know the codec.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

from gnnpar.codecs.codec import BFloat16, Identity
from gnnpar.files import JsonDict
from gnnpar.parallel.priced import Problem
from gnnpar.parallel.row_bytes import RowBytes, coded_price
from gnnpar.pricing.candidate import Knobs, Scope, codec_fields
from gnnpar.pricing.flat import ExchangeCandidate, ring_bytes
from gnnpar.pricing.ir import ModelIR
from gnnpar.pricing.machine import Machine
from gnnpar.pricing.price import Memory, Phases, Price, Traffic
from gnnpar.pricing.tasks import Task
from gnnpar.pricing.work import Work

if TYPE_CHECKING:
    from gnnpar.parallel.halo.strategy import GraphParallel

QUANTIZED = (8, 4, 2)


@dataclass(frozen=True, kw_only=True)
class HaloCandidate(ExchangeCandidate):
    """`family`: adaqp below 16 bits, whose YAML has a quantizing codec. `halo`: rows, or the least cover."""

    family: str = "graph_parallel"
    halo: Literal["rows", "cover"] = "rows"

    def __post_init__(self) -> None:
        object.__setattr__(self, "family", "adaqp" if self.bits < 16 else "graph_parallel")

    @property
    def label(self) -> str:
        words = [self.family]
        words += ["no overlap"] if self.overlap == "none" else []
        words += [f"{self.bits} bit"] if self.bits != 32 else []
        words += ["first layer held"] if self.held else []
        words += ["cover"] if self.halo == "cover" else []
        return ", ".join(words)

    @property
    def fields(self) -> JsonDict:
        halo: JsonDict = {} if self.halo == "rows" else {"halo": self.halo}
        return {"codec": codec_fields(self.bits), "overlap": self.overlap, **halo}

    def _covered(self, work: Work) -> Work:
        codec = BFloat16() if self.bits == 16 else Identity()
        return RowBytes(codec, halo=self.halo).covered(work)

    def phases(self, work: Work, machine: Machine) -> Phases:
        return super().phases(self._covered(work), machine)

    def memory(self, work: Work) -> tuple[Memory, ...]:
        return super().memory(self._covered(work))

    def tasks(self, work: Work, machine: Machine) -> list[Task]:
        return super().tasks(self._covered(work), machine)

    def knobs(self, ir: ModelIR) -> Knobs:
        return {"bits": (32, 16, *QUANTIZED), "overlap": ("edges", "none")}

    @property
    def ordered(self) -> bool:
        """Every pair of ranks exchanges at once."""
        return False


def candidates(scope: Scope, ranks: int) -> Iterator[HaloCandidate]:
    """Rows as they are, and rounded."""
    if ranks > 1:
        for overlap in ("edges", "none"):
            yield HaloCandidate(parts=ranks, overlap=overlap)
        yield HaloCandidate(parts=ranks, bits=16)
        if scope.ir.splits:
            yield HaloCandidate(parts=ranks, halo="cover")
            yield HaloCandidate(parts=ranks, bits=16, halo="cover")


def quantized_candidates(scope: Scope, ranks: int) -> Iterator[HaloCandidate]:
    if ranks > 1:
        for bits in QUANTIZED:
            yield HaloCandidate(parts=ranks, bits=bits)


def cost(strategy: GraphParallel, problem: Problem, machine: Machine) -> Price:
    rows = RowBytes(strategy.codec, problem.number, strategy.halo)
    overlap = "none" if strategy.overlap == "none" else "edges"
    live = HaloCandidate(parts=problem.ranks, held=problem.kept != "no", overlap=overlap)
    as_edges = ("overlap=central_marginal is priced as edges, which hides at least as much",)
    notes = as_edges if strategy.overlap == "central_marginal" else ()

    def traffic() -> Traffic:
        sent = rows.halo_traffic(problem.work(live), params=problem.params)
        if strategy.reduce == "sum":
            return sent
        matrices = sum(p.dim() == 2 for p in problem.model.parameters())  # a count of rows of each is summed over ranks
        return replace(sent, reduce=sent.reduce + ring_bytes(problem.ranks, problem.ranks * matrices, 8), bound="most")

    if strategy.reduce == "factors":
        notes += ("the time of reduce=factors is that of the sum of gradients, and its bytes are at most those",)
    return coded_price(rows, live, problem, machine, traffic, notes)
