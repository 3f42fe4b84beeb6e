"""Feature parallelism: Y[N_P, F] = home(A[N, N] . columns(X[N_P, F])), two all-to-alls per aggregation and direction.

Every rank holds the structure of the whole graph and folds all of it on 1/P of the columns, or of the heads, so work is
balanced and bytes do not depend on the cut. The aggregation of NeutronTP (Ai et al., VLDB 2024, arXiv 2412.20379), and
of the first layer of P3 (Gandhi, Iyer, OSDI 2021). What it sends and where it differs: docs/strategies/feature.md.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import prod

import torch

from gnnpar.codecs.adaptive.codec import Adaptive
from gnnpar.codecs.codec import Codec, Identity, is_constant
from gnnpar.codecs.delta import refuse_delta
from gnnpar.comm import CodedExchange
from gnnpar.data.dataset import Dataset
from gnnpar.folds.edge_data import IN_BLOCKS
from gnnpar.parallel.context import BuildContext
from gnnpar.parallel.declared import Declaration, Problem, Proposes
from gnnpar.parallel.engine import Engine, FlatEngine
from gnnpar.parallel.feature.view import FeatureGraph, row_lists, slices_of, structure_of
from gnnpar.parallel.row_bytes import RowBytes
from gnnpar.parallel.shape_trace import Use, shape_trace
from gnnpar.parallel.strategy import HALO, Capabilities, CodedStrategy, LayerFacts, name_of
from gnnpar.partition.shard import cut
from gnnpar.placement import Plan
from gnnpar.pricing.price import Traffic
from gnnpar.pricing.regrouped import Regrouped
from gnnpar.pricing.steps import Step
from gnnpar.pricing.work import Work


@dataclass(frozen=True, kw_only=True)
class FeatureParallel(CodedStrategy, Proposes):
    """`codec`: of rows sent by columns, of results sent back, and of the gradients of both, in training."""

    @property
    def capabilities(self) -> Capabilities:
        constant = is_constant(self.codec)
        return replace(HALO, edge_data=IN_BLOCKS, whole_neighborhoods=False, row_order=False, captured=constant)

    def __post_init__(self) -> None:
        refuse_delta(self.codec, "feature", "sends columns of all rows and would hold all of them a second time")
        if isinstance(self.codec, Adaptive):
            raise ValueError(
                "codec=adaptive weighs halo rows by the edges that read them, and strategy=feature sends no halo rows: "
                "use codec=uniform, random, bf16, drop or identity"
            )

    def declared(self) -> Declaration:
        return Declaration(family="feature", step=Step("columns", groups=Regrouped.by_columns), sent=_sent)

    def describe(self, plan: Plan) -> Sequence[LayerFacts]:
        return (LayerFacts(mode="columns", how=f"{name_of(self.codec)}, two all-to-alls"),) * plan.num_layers

    def build(self, context: BuildContext) -> Engine:
        context = context.normalised_for(self.exactness)
        shard, model, comm = context.shard, context.model, context.comm
        if comm.size > 1:
            for use in shape_trace(model, replace(shard, x=shard.x.new_zeros(1, model.in_dim), learned=None)):
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


def _sent(traffic: Traffic, work: Work, rows: RowBytes, problem: Problem) -> Traffic:
    """Return exact bytes: a rank receives the rows of all other nodes, and sends back their results."""
    ranks, nbytes, uses = work.parts.parts, [0.0, 0.0], _uses_of(problem)
    learned = [f.learned for f in work.ir.every_fold]
    exchanged = len(work.exchanged_folds) if ranks > 1 else 0
    for use, has_gradient in list(zip(uses, learned, strict=True))[len(learned) - exchanged :]:
        slices = slices_of(use.agg, use.src, len(use.dst), ranks, use.layer)
        home = replace(slices, whole=frozenset())
        for q in filter(slices.works, range(ranks)):
            others = sum(work.parts.nodes) - work.parts.nodes[q]
            source = [prod(each.shape) for each in slices.like((*use.src, *use.dst), q)]
            result = [prod(each.shape) for each in home.like(use.out, q)]
            for back in (False, True)[: 1 + has_gradient]:
                nbytes[back] += others * (rows.row(source, gradient=back) + rows.row(result, gradient=back))
    return replace(traffic, forward=nbytes[0], backward=nbytes[1])


def _uses_of(problem: Problem) -> list[Use]:
    """Return the model's folds with the shapes of their operands."""
    none = torch.zeros(0, dtype=torch.long)
    mask, y = torch.zeros(1, dtype=torch.bool), problem.workload.dataset.y[:1]
    one = Dataset.of(
        "one",
        x=torch.zeros(1, problem.ir.in_dim),
        y=torch.zeros_like(y) if len(y) else y,
        edge_index=torch.stack([none, none]),
        masks=(mask, mask, mask),
        num_classes=problem.workload.dataset.num_classes,
        task=problem.workload.dataset.task,
    )
    return shape_trace(problem.model, cut(one, torch.zeros(1, dtype=torch.long), 1, edge_ids=True)[0])
