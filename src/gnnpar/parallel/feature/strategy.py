"""Feature parallelism: Y[N_P, F] = home(A[N, N] . columns(X[N_P, F])), two all-to-alls an aggregation and direction.

Every rank holds the structure of the whole graph and folds all of it on 1/P of the columns, or of the heads, so work is
balanced and bytes do not depend on the cut. The aggregation of NeutronTP (Ai et al., VLDB 2024, arXiv 2412.20379), and
of the first layer of P3 (Gandhi, Iyer, OSDI 2021). What it sends and where it differs: docs/strategies/feature.md.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from gnnpar.codecs.adaptive.codec import Adaptive
from gnnpar.codecs.codec import Codec, Identity, is_constant
from gnnpar.codecs.delta import refuse_delta
from gnnpar.comm import CodedExchange
from gnnpar.folds.edge_data import IN_BLOCKS
from gnnpar.parallel.base import Proposed
from gnnpar.parallel.context import BuildContext
from gnnpar.parallel.engine import Engine, FlatEngine
from gnnpar.parallel.feature.slices import slices_of
from gnnpar.parallel.feature.view import FeatureGraph, row_lists, structure_of
from gnnpar.parallel.normalised import normalised_for
from gnnpar.parallel.sketch import sketch
from gnnpar.parallel.strategy import Capabilities, LayerFacts, name_of
from gnnpar.placement import Plan

if TYPE_CHECKING:
    from gnnpar.parallel.declared import Declaration


@dataclass(frozen=True, kw_only=True)
class FeatureParallel(Proposed):
    """`codec`: of rows by columns, of results on their way home, and of the gradients of both, in training."""

    @property
    def capabilities(self) -> Capabilities:
        return Capabilities(
            from_shards=True,
            edge_data=IN_BLOCKS,
            whole_neighborhoods=False,
            moments=True,
            pair_loss=True,
            captured=is_constant(self.codec),
            learned_features=True,
        )

    def __post_init__(self) -> None:
        refuse_delta(self.codec, "feature", "sends columns of all rows and would hold all of them a second time")
        if isinstance(self.codec, Adaptive):
            raise ValueError(
                "codec=adaptive weighs halo rows by the edges that read them, and strategy=feature sends no halo rows: "
                "use codec=uniform, random, bf16, drop or identity"
            )

    def declared(self) -> Declaration:
        from gnnpar.parallel.declared import Declaration, Step
        from gnnpar.parallel.feature.cost import sent
        from gnnpar.pricing.regrouped import Regrouped

        return Declaration(family="feature", step=Step("columns", groups=Regrouped.by_columns), sent=sent)

    def describe(self, plan: Plan) -> Sequence[LayerFacts]:
        how = f"{name_of(self.codec)}, two all-to-alls"
        return (LayerFacts(mode="columns", how=how, settings={"codec": self.codec}),) * plan.num_layers

    def build(self, context: BuildContext) -> Engine:
        context = normalised_for(context, self.exactness)
        shard, model, comm = context.shard, context.model, context.comm
        if comm.size > 1:
            for use in sketch(model, replace(shard, x=shard.x.new_zeros(1, model.in_dim), learned=None)):
                slices_of(use.agg, use.src, 0, comm.size, use.layer)
        structure = structure_of(shard, comm, edge_ids=model.needs_edge_ids)
        lists = row_lists(structure, comm.rank)

        def graph(codecs: Sequence[Codec]) -> FeatureGraph:
            columns, home = (CodedExchange(comm, codec) for codec in codecs)
            cache = context.new_cache()
            return FeatureGraph(shard, context.start, cache=cache, structure=structure, columns=columns, home=home)

        codecs, exactly = ([c.build(each, comm, context.seed) for each in lists] for c in (self.codec, Identity()))
        view = graph(codecs)
        return FlatEngine(
            context,
            view=view,
            exact=graph(exactly),
            codecs=codecs,
            structure=[structure] if comm.size > 1 else [],
            parts={"cache": view.cache},
        )
