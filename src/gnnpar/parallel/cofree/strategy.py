"""CoFree-GNN: Y_p[V_p, F] = A_p[V_p, V_p] X[V_p, F] on the edges of part p alone; losses of copies are weighted.

Cao, Deng, Wu, Huang, Subbian, Leskovec, Communication-Free Distributed GNN Training with Vertex Cut, 2023 (arXiv
2308.03209). Specification, bytes and deviations from the paper: docs/strategies/cofree.md.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Annotated

from annotated_types import Ge, Le, Lt

from gnnpar.codecs.codec import Exactness
from gnnpar.folds.edge_data import IN_BLOCKS
from gnnpar.parallel.cofree.engine import Degrees, PartGraph, Reweight, VertexCutEngine, union_of
from gnnpar.parallel.context import BuildContext
from gnnpar.parallel.declared import Declaration, DeclaredCandidate, Declares
from gnnpar.parallel.engine import Engine
from gnnpar.parallel.halo_graph import exact_view
from gnnpar.parallel.needs import check_first_layer
from gnnpar.parallel.priced import Problem
from gnnpar.parallel.strategy import Capabilities, Workload
from gnnpar.parallel.whole import WholeGraph
from gnnpar.partition.shard import cut_nodes, whole_of
from gnnpar.placement import Plan, Topology
from gnnpar.pricing.machine import Machine
from gnnpar.pricing.memory import held_to_evaluate
from gnnpar.pricing.price import Price, Traffic, ring_bytes
from gnnpar.pricing.statistics import PartStats
from gnnpar.pricing.steps import Step


@dataclass(frozen=True, kw_only=True)
class CoFree(Declares):
    """Parameters of CoFree-GNN. `reweight`: weight of a copy's loss: its share of the node's degree, 1 / copies, or 1
    (none).

    `degrees`: of the part's edges, as the paper's models see them, or of the whole graph. `drop_edge`: probability that
    a mask drops an edge; an epoch draws one of `masks` masks. `partition=ne`, `hdrf`, `dbh` and `random_edges` place
    edges; with parts of nodes an edge is placed with its end of fewer neighbours. Evaluation is exact.
    """

    reweight: Reweight = "degree"
    degrees: Degrees = "part"
    drop_edge: Annotated[float, Ge(0), Lt(1)] = 0.0
    masks: Annotated[int, Ge(1), Le(1000)] = 10
    mode = "own edges"

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
        return Declaration(family="cofree", step=Step("halo"))

    def cost(self, problem: Problem, machine: Machine) -> Price:
        """Return the price of computing on the copies and edges of a vertex cut; no messages."""
        ranks, left = problem.ranks, 1 - self.drop_edge
        found = self.plan(problem.workload, Topology(ranks)).statistics
        nodes, edges = tuple(map(float, found["copies"])), tuple(map(float, found["copied_edges"]))
        none, own = ((0.0,) * ranks,) * ranks, problem.work_of(ranks)
        masked, whole = (
            replace(own, parts=PartStats(nodes, tuple(e * share for e in edges), none, none)) for share in (left, 1.0)
        )
        live = DeclaredCandidate(strategy=self, parts=ranks, held=problem.kept != "no")
        traffic = Traffic(reduce=ring_bytes(ranks, problem.params + 1, problem.summed))
        price = replace(live.price(replace(masked, held=live.keeps(problem.kept)), machine), traffic=traffic)
        structure = [m.structure for m in live.memory(whole)]
        masks = self.masks if self.drop_edge else 0
        held = [replace(m, structure=s + masks * m.structure) for m, s in zip(price.memory, structure, strict=True)]
        return replace(price, memory=tuple(each + held_to_evaluate(own, p) for p, each in enumerate(held)))

    @property
    def how(self) -> str:
        how = f"nothing is sent; losses weighted by {self.reweight}, degrees of the {self.degrees}"
        return how + (f", {self.drop_edge:g} of the edges missing, {self.masks} masks" if self.drop_edge else "")

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
        copies, part, cache = context.shard.copies, context.comm.rank, context.new_cache()
        assert copies is not None, "the plan has no vertex cut"
        view = PartGraph(copies.shard, self.degrees, self.drop_edge, self.masks, part, context.seed, cache)
        own, exact = replace(context, shard=replace(context.shard, copies=None)), exact_view(context)
        return VertexCutEngine(own, copies=copies, view=view, reweight=self.reweight, exact=exact)


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
