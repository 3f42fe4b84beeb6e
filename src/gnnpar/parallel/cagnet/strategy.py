"""CAGNET in 1 and 1.5 dimensions: Y[N_P, F] = sum_q A[N_P, N_q] X[N_q, F], part q's rows broadcast in turn, exact.

Tripathy, Yelick, Buluc, Reducing Communication in Graph Neural Network Training, SC 2020 (arXiv 2005.03300).
Specification, bytes and deviations from the paper and the public code: docs/strategies/cagnet.md.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from math import isqrt
from typing import Annotated

from annotated_types import Ge

from gnnpar.codecs.adaptive.codec import Adaptive
from gnnpar.codecs.codec import Identity, is_constant
from gnnpar.codecs.delta import refuse_delta
from gnnpar.comm import CodedExchange
from gnnpar.folds.edge_data import ALL_KINDS, IN_BLOCKS
from gnnpar.parallel.base import HALO, CodedStrategy
from gnnpar.parallel.broadcast import Grid, broadcast_engine
from gnnpar.parallel.cagnet.grid import ReplicatedGraph, pieces_of, refuse_fold, without_edges
from gnnpar.parallel.context import BuildContext
from gnnpar.parallel.declared import Declaration, Proposes
from gnnpar.parallel.edges import EdgeOrder
from gnnpar.parallel.engine import Engine, FlatEngine
from gnnpar.parallel.priced import Problem
from gnnpar.parallel.row_bytes import RowBytes
from gnnpar.parallel.shape_trace import shape_trace
from gnnpar.parallel.strategy import Capabilities, name_of
from gnnpar.pricing.candidate import Scope, Values
from gnnpar.pricing.price import Traffic
from gnnpar.pricing.regrouped import Regrouped
from gnnpar.pricing.steps import Step
from gnnpar.pricing.work import Work


@dataclass(frozen=True, kw_only=True)
class Cagnet(CodedStrategy, Proposes):
    """Parameters of CAGNET. `prefetch`: parts in flight while one is folded. `codec`: of rows and their gradients.

    `replication`: c of 1.5 dimensions; c^2 divides the number of ranks. Groups of c ranks share the in-edges of their
    rows and add partial sums. Evaluation is exact and broadcasts too.
    """

    replication: Annotated[int, Ge(1)] = 1
    prefetch: Annotated[int, Ge(0)] = 1
    mode = "broadcast"

    @property
    def capabilities(self) -> Capabilities:
        """Return the capabilities. Groups that share in-edges do not hold all rows of their edges."""
        edge_data = ALL_KINDS if self.replication == 1 else IN_BLOCKS
        constant = is_constant(self.codec)
        return replace(HALO, edge_data=edge_data, whole_neighborhoods=False, row_order=False, captured=constant)

    def __post_init__(self) -> None:
        refuse_delta(self.codec, "cagnet", "sends whole parts, and every rank would hold all rows of the graph")
        if isinstance(self.codec, Adaptive):
            raise ValueError(
                "codec=adaptive weighs halo rows by the edges that read them, and strategy=cagnet sends all rows, read "
                "or not: use codec=uniform, random, bf16, drop or identity"
            )

    def check(self, num_ranks: int, num_layers: int, epochs: int) -> None:
        super().check(num_ranks, num_layers, epochs)
        self.check_ranks(num_ranks)

    def check_ranks(self, num_ranks: int) -> None:
        if num_ranks % (square := self.replication**2):
            raise ValueError(
                f"strategy.replication={self.replication} on {num_ranks} ranks: its square, {square}, does not divide "
                f"{num_ranks}; set strategy.replication=1, or another number of ranks"
            )

    def declared(self) -> Declaration:
        """Declare whole parts to all ranks, one after the other; in 1.5 dimensions to the ranks of a grid's column."""
        step, words = Step("parts", prefetch=self.prefetch), []
        if self.replication > 1:
            step = Step("grid", prefetch=self.prefetch, groups=self._groups)
            words = [f"replication {self.replication}"]
        options = {"prefetch": self.prefetch, "replication": self.replication}
        return Declaration(family="cagnet", step=step, words=words, options=options, sent=self._sent)

    def _groups(self, ranks: int) -> Regrouped:
        self.check_ranks(ranks)
        grid = Grid(ranks, self.replication)
        read = (tuple((grid.source(grid.column(r), s),) for s in range(grid.stages)) for r in range(ranks))
        return Regrouped(tuple(map(grid.group, range(ranks))), tuple(read))

    def _sent(self, traffic: Traffic, work: Work, rows: RowBytes, problem: Problem) -> Traffic:
        """Raise ValueError for a fold that is not a sum, if replication > 1. Return the bytes unchanged."""
        for layer in range(problem.ir.num_layers if self.replication > 1 else 0):
            for fold in problem.ir.folds(layer):
                refuse_fold(fold.kind, layer, self.replication, linear=fold.linear)
        return traffic

    def proposals(self, scope: Scope, ranks: int) -> Iterable[Values]:
        """Return replications, each with 32 and 16 bits; above 1 only if all folds are sums."""
        sums = all(f.linear for f in scope.ir.every_fold)
        grids = [c for c in range(1, (isqrt(ranks) if sums else 1) + 1) if ranks > 1 and ranks % c**2 == 0]
        return [{"replication": copies, "bits": bits} for copies in grids for bits in (32, 16)]

    @property
    def how(self) -> str:
        how = f"{name_of(self.codec)}, {self.prefetch} parts ahead"
        return how + (f", in-edges of {self.replication} parts shared" if self.replication > 1 else "")

    def build(self, context: BuildContext) -> Engine:
        if self.replication == 1:
            return broadcast_engine(context, self, prefetch=self.prefetch)
        context = context.normalised_for(self.exactness)
        shard, model, comm = context.shard, context.model, context.comm
        for use in shape_trace(model, replace(shard, x=shard.x.new_zeros(1, model.in_dim), learned=None)):
            refuse_fold(type(use.agg).__name__, use.layer, self.replication, linear=use.agg.linear)
        pieces = pieces_of(shard, comm, self.replication)
        context = replace(context, shard=without_edges(shard))
        lists = pieces.row_lists()
        codecs = [self.codec.build(each, comm, context.seed) for each in lists]
        rows, home = (CodedExchange(comm, codec) for codec in codecs)
        exact_rows, exact_home = (CodedExchange(comm, Identity().build(each, comm, context.seed)) for each in lists)
        view = ReplicatedGraph(
            context.shard,
            context.start,
            cache=context.new_cache(),
            pieces=pieces,
            exchange=rows,
            edges=EdgeOrder(context.shard, "none"),
            home=home,
            grid=pieces.grid,
            prefetch=self.prefetch,
            once=None if "exact" in self.exactness else exact_rows,
            home_once=None if "exact" in self.exactness else exact_home,
        )
        exact = replace(view, exchange=exact_rows, home=exact_home, cache=context.new_cache())
        parts = {"cache": view.cache}
        return FlatEngine(context, view=view, exact=exact, codecs=codecs, structure=[pieces], parts=parts)
