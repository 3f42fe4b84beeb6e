"""CoFree-GNN: Y_p[V_p, F] = A_p[V_p, V_p] X[V_p, F] on the edges of part p alone; losses of copies are weighted.

Cao, Deng, Wu, Huang, Subbian, Leskovec, Communication-Free Distributed GNN Training with Vertex Cut, 2023
(arXiv 2308.03209). What it computes, what it sends, and where it differs from the paper: docs/strategies/cofree.md.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated

from annotated_types import Ge, Le, Lt

from gnnpar.codecs.codec import Exactness, Identity
from gnnpar.comm import CodedExchange, Communicator
from gnnpar.data.tasks import Task
from gnnpar.folds.edge_data import IN_BLOCKS
from gnnpar.models.gnn import GNN
from gnnpar.parallel.cofree.engine import Reweight, VertexCutEngine
from gnnpar.parallel.cofree.oracle import union_of
from gnnpar.parallel.cofree.view import Degrees, PartGraph
from gnnpar.parallel.engine import Engine, PassGraph, Stateful
from gnnpar.parallel.halo_graph import EdgeOrder, HaloGraph
from gnnpar.parallel.local import Pass
from gnnpar.parallel.strategy import Capabilities, FirstLayer, LayerFacts, Workload, check_first_layer
from gnnpar.parallel.view import FeatureCache
from gnnpar.parallel.whole import WholeGraph
from gnnpar.partition.shard import Shard, cut_nodes, whole_of
from gnnpar.placement import Plan, Topology

if TYPE_CHECKING:
    from gnnpar.parallel.priced import Problem
    from gnnpar.pricing.machine import Machine
    from gnnpar.pricing.price import Price


@dataclass(frozen=True, kw_only=True)
class CoFree:
    """`reweight`: the loss of a copy of a node counts its share of the node's degree, 1 / copies, or 1 (none).

    `degrees`: of the part's edges, as the paper's models see them, or of the whole graph. `drop_edge`: probability that
    an edge is missing in one of `masks` masks, of which an epoch draws one. `partition=ne`, `hdrf`, `dbh` and
    `random_edges` place edges; from parts of nodes an edge goes with its end that has fewer neighbours. Evaluation is
    exact.
    """

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

    def check(self, num_ranks: int, num_layers: int, epochs: int) -> None:
        """Anything runs."""

    def cost(self, problem: Problem, machine: Machine) -> Price:
        from gnnpar.parallel.cofree.cost import cost

        return cost(self, problem, machine)

    def plan(self, workload: Workload, topology: Topology) -> Plan:
        return workload.with_vertex_cut(workload.flat_plan(topology))

    def describe(self, plan: Plan) -> Sequence[LayerFacts]:
        how = f"nothing is sent; losses weighted by {self.reweight}, degrees of the {self.degrees}"
        how += f", {self.drop_edge:g} of the edges missing, {self.masks} masks" if self.drop_edge else ""
        return (LayerFacts(mode="own edges", how=how, settings=dict(vars(self))),) * plan.num_layers

    def oracle_engine(
        self, plan: Plan, whole: Shard, model: GNN, task: Task, comm: Communicator, *, seed: int
    ) -> Engine | None:
        """All parts beside each other on one device, as a graph without edges between them."""
        edges = plan.placement.edge_part_of
        if edges is None or self.drop_edge:
            return None
        parts = cut_nodes(whole_of(whole), plan.part_of, edges, plan.num_parts, edge_ids=model.needs_edge_ids)
        return VertexCutEngine(
            copies=(copies := union_of(parts)),
            view=PartGraph(copies.shard, self.degrees, 0.0, 1, part=0, seed=seed),
            reweight=self.reweight,
            exact=WholeGraph(whole, Pass(seed)),
            shard=whole,
            model=model,
            task=task,
            comm=comm,
            seed=seed,
            parts={},
        )

    def build(
        self,
        plan: Plan,
        shard: Shard,
        model: GNN,
        task: Task,
        comm: Communicator,
        *,
        seed: int,
        first_layer: FirstLayer = "live",
    ) -> Engine:
        check_first_layer(self, first_layer)
        copies = shard.copies
        assert copies is not None, "the plan has no vertex cut"
        cache = FeatureCache.of(first_layer)
        exact: PassGraph = WholeGraph(shard, Pass(seed))
        if comm.size > 1:
            exchange = CodedExchange(comm, Identity().build(shard.row_lists, comm, seed))
            exact = HaloGraph(shard, Pass(seed), exchange=exchange, edges=EdgeOrder(shard, "edges"))
        parts: dict[str, Stateful] = {} if cache is None else {"cache": cache}
        return VertexCutEngine(
            copies=copies,
            view=PartGraph(
                copies.shard, self.degrees, self.drop_edge, self.masks, part=comm.rank, seed=seed, cache=cache
            ),
            reweight=self.reweight,
            exact=exact,
            shard=replace(shard, copies=None),
            model=model,
            task=task,
            comm=comm,
            seed=seed,
            parts=parts,
        )


@dataclass(frozen=True, kw_only=True)
class _OneRank(CoFree):
    """The exact limit: on one rank no node is cut. On more there is none, as messages that are missing stay missing."""

    @property
    def capabilities(self) -> Capabilities:
        return replace(super().capabilities, max_ranks=1)

    @property
    def exactness(self) -> frozenset[Exactness]:
        return frozenset[Exactness]({"exact"})
