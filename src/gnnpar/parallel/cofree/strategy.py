"""CoFree-GNN: Y_p[V_p, F] = A_p[V_p, V_p] X[V_p, F] on the edges of part p alone; losses of copies are weighted.

Cao, Deng, Wu, Huang, Subbian, Leskovec, Communication-Free Distributed GNN Training with Vertex Cut, 2023 (arXiv
2308.03209). Specification, bytes and deviations from the paper: docs/strategies/cofree.md.

A part of the vertex cut is trained as if it were the whole graph. Every copy has a weight in the loss; gradients are
summed over ranks once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import Annotated, Literal

import torch
from annotated_types import Ge, Le, Lt
from torch import Tensor

from gnnpar.codecs.codec import Exactness
from gnnpar.data.raw import MASKS
from gnnpar.files import require_memory
from gnnpar.folds.block import Block
from gnnpar.folds.edge_data import IN_BLOCKS, EdgeData
from gnnpar.graph import Graph
from gnnpar.parallel.blocks import WholeGraph
from gnnpar.parallel.context import BuildContext
from gnnpar.parallel.declared import Declaration, DeclaredCandidate, Declares, Problem
from gnnpar.parallel.engine import Engine, FlatEngine, PassGraph
from gnnpar.parallel.halo_graph import exact_view
from gnnpar.parallel.local import Pass
from gnnpar.parallel.needs import check_first_layer
from gnnpar.parallel.strategy import Capabilities, Workload
from gnnpar.parallel.view import FeatureCache
from gnnpar.partition.shard import Mirrors, Shard, cut_nodes, degrees_by_type, whole_of
from gnnpar.placement import Plan, Topology
from gnnpar.pricing.machine import Machine
from gnnpar.pricing.price import Price, Traffic, ring_bytes
from gnnpar.pricing.statistics import PartStats
from gnnpar.pricing.steps import Step
from gnnpar.pricing.work import held_to_evaluate
from gnnpar_kernels import fold_key, keep_mask

Degrees = Literal["part", "graph"]
_CHOICE, _MASK = 0xC0F, 0xC10  # uses of a key


@dataclass(eq=False)
class PartGraph:
    """Training passes of a part, each under one of `masks` masks, which drop an edge with probability `drop_edge`.

    `shard`: the part, with the in-degrees of the whole graph. All masks are made here, none during training.
    """

    shard: Shard
    degrees: Degrees
    drop_edge: float
    masks: int
    part: int
    seed: int
    cache: FeatureCache | None = None
    _masked_shards: list[Shard] = field(init=False)

    def __post_init__(self) -> None:
        if self.drop_edge:
            each = self.shard.inner.nbytes + self.shard.in_degree.nbytes
            require_memory(self.masks * each, f"{self.masks} masks of a part", "lower strategy.masks")
        self._masked_shards = [self._masked(self.seed, number) for number in range(self.masks if self.drop_edge else 1)]

    def during(self, run: Pass) -> Graph:
        number = fold_key(run.seed, run.epoch, self.part, _CHOICE) % len(self._masked_shards)
        return WholeGraph(self._masked_shards[number], Pass(run.seed), cache=self.cache).during(run)

    @property
    def nbytes(self) -> int:
        """Return the bytes of structure in addition to that of `shard`."""
        degrees = sum(s.in_degree.nbytes for s in self._masked_shards) if self.degrees == "part" else 0
        return degrees + sum(s.inner.nbytes for s in self._masked_shards if s.inner is not self.shard.inner)

    def _masked(self, seed: int, number: int) -> Shard:
        shard = self.shard
        if self.drop_edge:
            shard = replace(shard, inner=dropped(shard.inner, shard.node_ids, self.drop_edge, seed, number))
        if self.degrees == "part":
            inner, weights = shard.inner, shard.inner.weights
            in_degree = inner.indptr.diff().to(shard.in_degree.dtype)
            in_weight = None
            if weights is not None:
                in_weight = torch.zeros_like(in_degree).index_add_(0, inner.edge_dst, weights.to(in_degree.dtype))
            type_degree = None
            if shard.type_degree is not None:
                type_degree = degrees_by_type([inner], shard.edge_sizes.types).to(in_degree.dtype)
            shard = replace(shard, in_degree=in_degree, in_weight=in_weight, type_degree=type_degree)
        return shard


def dropped(block: Block, ids: Tensor, p: float, seed: int, number: int) -> Block:
    """Return the block under a mask, which keeps or drops both directions of an edge together, and keeps loops. Shapes:
    ids [num_src]."""
    dst, src = block.edge_dst, block.indices.long()
    low, high = torch.minimum(ids[dst], ids[src]), torch.maximum(ids[dst], ids[src])
    keep = keep_mask(low * (1 << 31) + high, 1, p=p, key=fold_key(seed, number, _MASK))[:, 0] | (low == high)
    return block.restrict(keep, compress=False)


def union_of(parts: Sequence[Mirrors]) -> Mirrors:
    """Return nodes and edges of all parts, one part after the other, as one graph: the oracle on one device."""
    shards = [part.shard for part in parts]
    firsts = [0, *accumulate(s.num_inner for s in shards)]
    rows = ("node_ids", "x", "y", *MASKS, "in_degree", "in_weight", "type_degree")
    held = {name: [vars(s)[name] for s in shards] for name in rows if vars(shards[0])[name] is not None}
    block = Block.from_edges(
        torch.cat([s.inner.edge_dst + first for s, first in zip(shards, firsts, strict=False)]),
        torch.cat([s.inner.indices.long() + first for s, first in zip(shards, firsts, strict=False)]),
        num_dst=firsts[-1],
        num_src=firsts[-1],
        src_ids=torch.arange(firsts[-1]),
        edges=EdgeData.cat([s.inner.edges for s in shards]),
    )
    shard = replace(shards[0], **{name: torch.cat(parts) for name, parts in held.items()}, inner=block)
    return Mirrors(shard, torch.cat([p.share for p in parts]), torch.cat([p.number for p in parts]))


Reweight = Literal["degree", "copies", "none"]


class VertexCutEngine(FlatEngine):
    """Train on `copies`, evaluate the rank's own nodes on `exact`. `reweight`: the weight of a copy's loss."""

    def __init__(
        self, context: BuildContext, *, copies: Mirrors, view: PartGraph, reweight: Reweight, exact: PassGraph
    ) -> None:
        structure, parts = (copies.shard.inner, view), {"cache": view.cache}
        super().__init__(context, view=view, exact=exact, structure=structure, parts=parts)
        self._copies, self._task = copies, context.task
        self._rows = copies.shard.rows_of_split["train"]
        self._labels = copies.shard.y[self._rows]
        self._weights = weights_of(copies, self._rows, reweight)
        total = self._weights.sum().reshape(1)
        self._total = float(context.shard.num_train if reweight != "none" else context.comm.all_reduce(total))

    def live_bytes(self) -> dict[str, int]:
        held = super().live_bytes()
        held["features"] += self._copies.shard.features_nbytes + self._weights.nbytes
        return held

    def _differentiate(self, view: PassGraph, run: Pass) -> Tensor:
        """Return the gradients and the sum of this part's weighted losses; for a probe, of the losses of own nodes."""
        if run.probe:
            return super()._differentiate(view, run)
        if not len(self._rows):
            return self.bucket_of(None)
        logits = self._model(view.during(run), self._copies.shard.x)
        loss = self._task.loss_sum(logits[self._rows], self._labels, self._weights)
        return self.bucket_of(loss / self._total)


def weights_of(copies: Mirrors, rows: Tensor, reweight: Reweight) -> Tensor:
    """Return the weights of copies in the loss. Shapes: rows [t] -> [t]."""
    share = copies.share[rows]
    if reweight == "degree":
        return share
    return torch.ones_like(share) if reweight == "none" else 1 / copies.number[rows].to(share.dtype)


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
