"""One device, the whole graph: Y[N, F] = A[N, N] X[N, F]. The oracle of every exact strategy."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from gnnpar.codecs.codec import Exactness
from gnnpar.parallel.blocks import WholeGraph
from gnnpar.parallel.context import BuildContext
from gnnpar.parallel.declared import Declaration, Proposes
from gnnpar.parallel.engine import Engine, FlatEngine
from gnnpar.parallel.strategy import HALO, LayerFacts
from gnnpar.placement import Plan
from gnnpar.pricing.candidate import Knobs, Scope, Values
from gnnpar.pricing.ir import ModelIR
from gnnpar.pricing.steps import Step


@dataclass(frozen=True, kw_only=True)
class Single(Proposes):
    """One device. No parameters."""

    exactness = frozenset[Exactness]({"exact"})
    capabilities = replace(HALO, max_ranks=1, captured=True)

    def check(self, num_ranks: int, num_layers: int, epochs: int) -> None:
        if num_ranks != 1:
            raise ValueError(
                f"strategy=single runs on 1 rank, got {num_ranks}: set world_size=1 or strategy=graph_parallel."
            )

    def declared(self) -> Declaration:
        """Declare only computation."""
        return Declaration(family="single", step=Step("local"))

    def knobs(self, ir: ModelIR) -> Knobs:
        return {}

    def proposals(self, scope: Scope, ranks: int) -> Iterable[Values]:
        return [{}] if ranks == 1 else []

    def describe(self, plan: Plan) -> Sequence[LayerFacts]:
        return (LayerFacts(mode="whole"),) * plan.num_layers

    def build(self, context: BuildContext) -> Engine:
        context = context.normalised_for(self.exactness)
        cache = context.new_cache()
        view = WholeGraph(context.shard, context.start, cache=cache)
        return FlatEngine(context, view=view, exact=view, parts={"cache": cache})
