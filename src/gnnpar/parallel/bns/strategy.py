"""BNS-GCN: Y[N_P, F] = A[N_P, N_P] X[N_P, F] + A[N_P, S] X[S, F] / rate, S a sample of the halo drawn every epoch.

Wan, Li, Li, Kim, Lin, BNS-GCN: Efficient Full-Graph Training of Graph Convolutional Networks with Partition-Parallelism
and Random Boundary Node Sampling, MLSys 2022 (arXiv 2203.10983). Specification, bytes and deviations from the paper and
the public code: docs/strategies/bns.md.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Annotated

from annotated_types import Ge, Le

from gnnpar.codecs.adaptive.codec import Adaptive, with_edge_weights
from gnnpar.codecs.codec import Codec
from gnnpar.codecs.delta import refuse_delta
from gnnpar.comm import RowLists
from gnnpar.parallel.base import HALO, CodedStrategy
from gnnpar.parallel.bns.view import SampledHalo, SampledWhole
from gnnpar.parallel.context import BuildContext
from gnnpar.parallel.declared import Declaration, Declares, overlapped_folds
from gnnpar.parallel.edges import EdgeOrder, Overlap
from gnnpar.parallel.engine import Engine, FlatEngine, PassGraph
from gnnpar.parallel.halo_engine import halo_engine
from gnnpar.parallel.halo_graph import HaloGraph
from gnnpar.parallel.local import Pass
from gnnpar.parallel.strategy import name_of
from gnnpar.partition.shard import Shard
from gnnpar.placement import Plan
from gnnpar.pricing.steps import Step


@dataclass(frozen=True, kw_only=True)
class BoundarySampling(CodedStrategy, Declares):
    """Parameters of BNS-GCN. `rate`: probability that a boundary row is sent in an epoch; 1: graph parallelism, 0:
    nothing is sent.

    `codec`: of sent rows and their gradients. Evaluation reads all rows, exactly.
    """

    rate: Annotated[float, Ge(0), Le(1)] = 0.1
    overlap: Overlap = "edges"
    capabilities = HALO
    limit = {"rate": 1.0}
    beyond = "sampled"
    mode = "sampled halo"

    def __post_init__(self) -> None:
        if self.rate > 0 and 1 - self.rate == 1:
            raise ValueError(f"strategy.rate={self.rate} is too small to draw by: give 0, which sends nothing, or more")
        if self.rate < 1:
            refuse_delta(self.codec, "bns", "draws other rows in every epoch")
        if self.rate < 1 and isinstance(self.codec, Adaptive):
            raise ValueError(
                "codec=adaptive chooses bits of rows by what they sent before, but strategy=bns draws other rows every "
                "epoch: use codec=uniform, random, bf16, drop or identity, or strategy.rate=1"
            )

    def oracle(self, plan: Plan, whole: Shard, *, seed: int) -> PassGraph:
        return SampledWhole(whole, Pass(seed), part_of=plan.part_of, rate=self.rate)

    def declared(self) -> Declaration:
        """Declare expected values: the number of rows has standard deviation sqrt(rate (1 - rate) n)."""
        step = Step("halo", overlap=overlapped_folds(self.overlap), share=self.rate)
        notes = ("drawing and cutting the sample of an epoch is not in the time",) if self.rate < 1 else ()
        return Declaration(family="bns", step=step, words=[f"{self.rate:g} of the boundary rows"], notes=notes)

    @property
    def how(self) -> str:
        return f"{self.rate:g} of the boundary rows, {name_of(self.codec)}, overlap {self.overlap}"

    def build(self, context: BuildContext) -> Engine:
        if self.rate == 1:
            return halo_engine(context, self, overlap=self.overlap, features_exact="quantized" in self.exactness)
        config = with_edge_weights(self.codec, context.model)

        def codec_of(lists: RowLists) -> Codec:
            return config.build(lists, context.comm, context.seed)

        shard, run, exchange = context.shard, context.start, context.exact_exchange()
        edges, cache = EdgeOrder(shard, self.overlap), context.new_cache()
        full = HaloGraph(shard, run, exchange=exchange, edges=edges, cache=cache)
        exact = replace(full, cache=context.new_cache())
        view = SampledHalo(
            shard, run, exchange=exchange, edges=edges, cache=cache, rate=self.rate, codec_of=codec_of, full=full
        )
        parts = {"held": view.held, "cache": cache}
        return FlatEngine(context, view=view, exact=exact, structure=[view.drawn], parts=parts)
