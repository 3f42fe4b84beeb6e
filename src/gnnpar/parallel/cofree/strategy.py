"""CoFree-GNN: Y_p[V_p, F] = A_p[V_p, V_p] X[V_p, F] on the edges of part p alone; losses of copies are weighted.

Cao, Deng, Wu, Huang, Subbian, Leskovec, Communication-Free Distributed GNN Training with Vertex Cut, 2023
(arXiv 2308.03209). What it computes, what it sends, and where it differs from the paper: docs/strategies/cofree.md.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated

from annotated_types import Ge, Le, Lt

from gnnpar.codecs.codec import Exactness
from gnnpar.folds.edge_data import IN_BLOCKS
from gnnpar.parallel.base import ByStep, Prices
from gnnpar.parallel.cofree.engine import Reweight, VertexCutEngine
from gnnpar.parallel.cofree.oracle import union_of
from gnnpar.parallel.cofree.view import Degrees, PartGraph
from gnnpar.parallel.context import BuildContext
from gnnpar.parallel.edges import EdgeOrder
from gnnpar.parallel.engine import Engine, PassGraph
from gnnpar.parallel.halo_graph import HaloGraph
from gnnpar.parallel.needs import check_first_layer
from gnnpar.parallel.strategy import Capabilities, LayerFacts, Workload
from gnnpar.parallel.whole import WholeGraph
from gnnpar.partition.shard import cut_nodes, whole_of
from gnnpar.placement import Plan, Topology

if TYPE_CHECKING:
    from gnnpar.parallel.declared import Declaration


@dataclass(frozen=True, kw_only=True)
class CoFree(Prices, ByStep):
    """Parameters of CoFree-GNN. `reweight`: weight of a copy's loss: its share of the node's degree, 1 / copies, or 1
    (none).

    `degrees`: of the part's edges, as the paper's models see them, or of the whole graph. `drop_edge`: probability that
    an edge is missing in one of `masks` masks, of which an epoch draws one. `partition=ne`, `hdrf`, `dbh` and
    `random_edges` place edges; with parts of nodes an edge goes with its end that has fewer neighbours. Evaluation is
    exact.
    """

    prices = "gnnpar.parallel.cofree.cost"
    reweight: Reweight = "degree"
    degrees: Degrees = "part"
    drop_edge: Annotated[float, Ge(0), Lt(1)] = 0.0
    masks: Annotated[int, Ge(1), Le(1000)] = 10

    def __post_init__(self) -> None:
        if not 0 <= self.drop_edge < 1:
            raise ValueError(
                f"strategy.drop_edge={self.drop_edge} is no probability below 1: give a number from 0 (no edge is "
                "missing) to 0.99"
            )

    @property
    def capabilities(self) -> Capabilities:
        whole = self.drop_edge == 0
        return Capabilities(vertex_cut=True, edge_data=IN_BLOCKS, cached_first_layer=whole, captured=whole)

    @property
    def exactness(self) -> frozenset[Exactness]:
        return frozenset[Exactness]({"sampled"})

    def exact_limit(self) -> CoFree:
        return _OneRank(reweight=self.reweight, degrees=self.degrees)

    def plan(self, workload: Workload, topology: Topology) -> Plan:
        return workload.with_vertex_cut(workload.flat_plan(topology))

    def declared(self) -> Declaration:
        from gnnpar.parallel.declared import Declaration, Step

        return Declaration(family="cofree", step=Step("halo"))

    def describe(self, plan: Plan) -> Sequence[LayerFacts]:
        how = f"nothing is sent; losses weighted by {self.reweight}, degrees of the {self.degrees}"
        how += f", {self.drop_edge:g} of the edges missing, {self.masks} masks" if self.drop_edge else ""
        return (LayerFacts(mode="own edges", how=how, settings=dict(vars(self))),) * plan.num_layers

    def oracle_engine(self, plan: Plan, context: BuildContext) -> Engine | None:
        """Return an engine with all parts on one device, as a graph without edges between them."""
        edges = plan.placement.edge_part_of
        if edges is None or self.drop_edge:
            return None
        whole, edge_ids = context.shard, context.model.needs_edge_ids
        copies = union_of(cut_nodes(whole_of(whole), plan.part_of, edges, plan.num_parts, edge_ids=edge_ids))
        view = PartGraph(copies.shard, self.degrees, 0.0, 1, part=0, seed=context.seed)
        exact = WholeGraph(whole, context.start)
        return VertexCutEngine(context, copies=copies, view=view, reweight=self.reweight, exact=exact)

    def build(self, context: BuildContext) -> Engine:
        check_first_layer(self, context.first_layer)
        shard, comm, copies = context.shard, context.comm, context.shard.copies
        assert copies is not None, "the plan has no vertex cut"
        exact: PassGraph = WholeGraph(shard, context.start)
        if comm.size > 1:
            edges = EdgeOrder(shard, "edges")
            exact = HaloGraph(shard, context.start, exchange=context.exact_exchange(), edges=edges)
        cache, seed = context.new_cache(), context.seed
        view = PartGraph(copies.shard, self.degrees, self.drop_edge, self.masks, part=comm.rank, seed=seed, cache=cache)
        return VertexCutEngine(
            replace(context, shard=replace(shard, copies=None)),
            copies=copies,
            view=view,
            reweight=self.reweight,
            exact=exact,
            parts={"cache": cache},
        )


@dataclass(frozen=True, kw_only=True)
class _OneRank(CoFree):
    """The exact limit: on one rank no node is cut. On several ranks there is none, since missing messages stay
    missing."""

    @property
    def capabilities(self) -> Capabilities:
        return replace(super().capabilities, max_ranks=1)

    @property
    def exactness(self) -> frozenset[Exactness]:
        return frozenset[Exactness]({"exact"})
