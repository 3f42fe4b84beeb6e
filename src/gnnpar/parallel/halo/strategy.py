"""Graph parallelism: Y[N_P, F] = A[N_P, N] . halo(X[N_P, F]), one halo exchange per aggregation and direction.

The papers' vanilla is overlap=none; overlap=edges also hides the wire behind every inner edge. With codec=drop it is
the negative control: nothing is communicated in training.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from gnnpar.codecs.codec import is_constant
from gnnpar.parallel.context import BuildContext
from gnnpar.parallel.declared import Declaration, DeclaredCandidate, Problem, Proposes, overlapped_folds
from gnnpar.parallel.edges import Overlap
from gnnpar.parallel.engine import Engine, FlatEngine
from gnnpar.parallel.factors import FactorEngine
from gnnpar.parallel.halo_graph import halo_engine
from gnnpar.parallel.row_bytes import Halo, RowBytes, refuse_nothing
from gnnpar.parallel.strategy import HALO, Capabilities, CodedStrategy, LayerFacts, name_of
from gnnpar.placement import Plan
from gnnpar.pricing.candidate import Candidate, Knobs, Scope, Values
from gnnpar.pricing.ir import ModelIR
from gnnpar.pricing.price import Traffic, ring_bytes
from gnnpar.pricing.steps import Step
from gnnpar.pricing.work import Work

QUANTIZED = (8, 4, 2)


@dataclass(frozen=True, kw_only=True)
class GraphParallel(CodedStrategy, Proposes):
    """Parameters of graph parallelism. `codec`: of halo rows and their gradients on the wire, in training; evaluation
    is exact.

    `halo`: the messages of cut edges (`gnnpar.parallel.cover`). `reduce`: gradients of weights by their sum over ranks,
    or of dense ones by their factors if these are fewer bytes (`gnnpar.parallel.factors`).
    """

    overlap: Overlap = "edges"
    halo: Halo = "rows"
    reduce: Literal["sum", "factors"] = "sum"

    def __post_init__(self) -> None:
        refuse_nothing(self.codec, self.halo)

    @property
    def capabilities(self) -> Capabilities:
        summed = self.reduce == "sum"
        return replace(HALO, captured=is_constant(self.codec) and summed, learned_features=summed)

    def declared(self) -> Declaration:
        """Declare a halo exchange per layer and direction, concurrent with the fold of inner edges."""
        notes = ()
        if self.overlap == "central_marginal":
            notes += ("overlap=central_marginal is priced as edges, which hides at least as much",)
        if self.reduce == "factors":
            notes += ("the time of reduce=factors is that of the sum of gradients, and its bytes are at most those",)
        return Declaration(
            family="graph_parallel",
            quantized="adaqp",
            step=Step("halo", overlap=overlapped_folds(self.overlap)),
            options={"overlap": self.overlap, "halo": self.halo},
            notes=notes,
            halo=self.halo,
            sent=self._sent,
        )

    def _sent(self, traffic: Traffic, work: Work, rows: RowBytes, problem: Problem) -> Traffic:
        """Add a count of rows of each matrix, which reduce=factors sums over ranks."""
        if self.reduce == "sum":
            return traffic
        matrices = sum(p.dim() == 2 for p in problem.model.parameters())
        counts = ring_bytes(problem.ranks, problem.ranks * matrices, 8)
        return replace(traffic, reduce=traffic.reduce + counts, bound="most")

    def knobs(self, ir: ModelIR) -> Knobs:
        return {"bits": (32, 16, *QUANTIZED), "overlap": ("edges", "none")}

    def proposals(self, scope: Scope, ranks: int) -> Iterable[Values]:
        kinds = {fold.split[:1] for fold in scope.ir.every_fold}  # of partial rows: one cover splits all folds
        covers = [{"halo": "cover"}, {"halo": "cover", "bits": 16}] if len(kinds) == 1 and () not in kinds else []
        return [{}, {"overlap": "none"}, {"bits": 16}, *covers] if ranks > 1 else []

    def candidates(self, scope: Scope, ranks: int) -> Iterable[Candidate]:
        """Return candidates with default options, also for a configured strategy. Their `bits` include AdaQP's."""
        plain = DeclaredCandidate(parts=ranks, strategy=GraphParallel())
        return [plain.with_knobs(each) for each in self.proposals(scope, ranks)]

    def describe(self, plan: Plan) -> Sequence[LayerFacts]:
        how = f"{name_of(self.codec)}, overlap {self.overlap}"
        how += "" if self.halo == "rows" else f", halo {self.halo}"
        how += "" if self.reduce == "sum" else ", gradients of weights by factors"
        return (LayerFacts(mode="halo", how=how),) * plan.num_layers

    def build(self, context: BuildContext) -> Engine:
        return halo_engine(
            context,
            self,
            overlap=self.overlap,
            halo=self.halo,
            features_exact="quantized" in self.exactness,
            engine=FlatEngine if self.reduce == "sum" else FactorEngine,
        )
