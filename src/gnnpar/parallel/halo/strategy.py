"""Graph parallelism: Y[N_P, F] = A[N_P, N] . halo(X[N_P, F]), one halo exchange per aggregation and direction.

The papers' vanilla is overlap=none; overlap=edges also hides the wire behind every inner edge. With codec=drop it is
the negative control: nothing is communicated in training.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from gnnpar.codecs.codec import is_constant
from gnnpar.folds.edge_data import ALL_KINDS
from gnnpar.parallel.base import CodedStrategy, Enumerates
from gnnpar.parallel.context import BuildContext
from gnnpar.parallel.cover.weights import Halo, refuse_nothing
from gnnpar.parallel.edges import Overlap
from gnnpar.parallel.engine import Engine, FlatEngine
from gnnpar.parallel.factors import FactorEngine
from gnnpar.parallel.halo_engine import halo_engine
from gnnpar.parallel.strategy import Capabilities, LayerFacts, name_of
from gnnpar.placement import Plan


@dataclass(frozen=True, kw_only=True)
class GraphParallel(CodedStrategy, Enumerates):
    """Parameters of graph parallelism. `codec`: of halo rows and their gradients on the wire, in training; evaluation
    is exact.

    `halo`: the messages of cut edges (`gnnpar.parallel.cover`). `reduce`: gradients of weights by their sum over ranks,
    or of dense ones by their factors if these are fewer bytes (`gnnpar.parallel.factors`).
    """

    prices = "gnnpar.parallel.halo.cost"
    overlap: Overlap = "edges"
    halo: Halo = "rows"
    reduce: Literal["sum", "factors"] = "sum"

    def __post_init__(self) -> None:
        refuse_nothing(self.codec, self.halo)

    @property
    def capabilities(self) -> Capabilities:
        return Capabilities(
            from_shards=True,
            edge_data=ALL_KINDS,
            moments=True,
            pair_loss=True,
            row_order=True,
            captured=is_constant(self.codec) and self.reduce == "sum",
            learned_features=self.reduce == "sum",
        )

    def describe(self, plan: Plan) -> Sequence[LayerFacts]:
        how = f"{name_of(self.codec)}, overlap {self.overlap}"
        how += "" if self.halo == "rows" else f", halo {self.halo}"
        how += "" if self.reduce == "sum" else ", gradients of weights by factors"
        settings = {"codec": self.codec, "overlap": self.overlap, "halo": self.halo, "reduce": self.reduce}
        return (LayerFacts(mode="halo", how=how, settings=settings),) * plan.num_layers

    def build(self, context: BuildContext) -> Engine:
        return halo_engine(
            context,
            overlap=self.overlap,
            codec=self.codec,
            exactness=self.exactness,
            halo=self.halo,
            features_exact="quantized" in self.exactness,
            engine=FlatEngine if self.reduce == "sum" else FactorEngine,
        )
