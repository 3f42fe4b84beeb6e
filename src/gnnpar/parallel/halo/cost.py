"""Graph parallelism: a halo exchange a layer and direction, beside the fold of inner edges.

Time knows the bits of rows; bytes know the codec.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

from gnnpar.codecs.codec import BFloat16, Identity
from gnnpar.files import JsonDict
from gnnpar.parallel.priced import Problem
from gnnpar.parallel.row_bytes import RowBytes, coded_price
from gnnpar.pricing.candidate import Knobs, Scope
from gnnpar.pricing.ir import ModelIR
from gnnpar.pricing.machine import Machine
from gnnpar.pricing.price import Price, Traffic, ring_bytes
from gnnpar.pricing.steps import CodedCandidate, Step
from gnnpar.pricing.work import Work

if TYPE_CHECKING:
    from gnnpar.parallel.halo.strategy import GraphParallel

QUANTIZED = (8, 4, 2)


@dataclass(frozen=True, kw_only=True)
class HaloCandidate(CodedCandidate):
    """`family`: adaqp below 16 bits, whose YAML has a quantizing codec. `halo`: rows, or the least cover."""

    options = ("overlap",)
    family: str = "graph_parallel"
    overlap: Literal["none", "edges"] = "edges"
    halo: Literal["rows", "cover"] = "rows"

    def __post_init__(self) -> None:
        object.__setattr__(self, "family", "adaqp" if self.bits < 16 else "graph_parallel")

    @property
    def step(self) -> Step:
        return Step("halo", overlap="inner" if self.overlap == "edges" else "none")

    @property
    def label(self) -> str:
        return super().label + (", cover" if self.halo == "cover" else "")

    @property
    def fields(self) -> JsonDict:
        return super().fields | ({} if self.halo == "rows" else {"halo": self.halo})

    def seen(self, work: Work) -> Work:
        return RowBytes(BFloat16() if self.bits == 16 else Identity(), halo=self.halo).covered(work)

    def knobs(self, ir: ModelIR) -> Knobs:
        return {"bits": (32, 16, *QUANTIZED), "overlap": ("edges", "none")}


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
    rows, notes = RowBytes(strategy.codec, problem.number, strategy.halo), ()
    live = HaloCandidate(overlap="none" if strategy.overlap == "none" else "edges")
    if strategy.overlap == "central_marginal":
        notes += ("overlap=central_marginal is priced as edges, which hides at least as much",)
    if strategy.reduce == "factors":
        notes += ("the time of reduce=factors is that of the sum of gradients, and its bytes are at most those",)

    def traffic(sent: Traffic, work: Work) -> Traffic:
        if strategy.reduce == "sum":
            return sent
        matrices = sum(p.dim() == 2 for p in problem.model.parameters())  # a count of rows of each is summed over ranks
        return replace(sent, reduce=sent.reduce + ring_bytes(problem.ranks, problem.ranks * matrices, 8), bound="most")

    return coded_price(rows, live, problem, machine, traffic, notes)
