"""TAG: plan for the model, graph and machine at hand, then run what was chosen.

Zhang et al., Expediting Distributed DNN Training with Device Topology-Aware Graph Deployment, TPDS 2023 (arXiv
2302.06126), carried over to full-graph training (specs/tag.md, part B). plan() prices every candidate that `quality`
allows on the measured machine and returns the plan of the best; build() is the chosen strategy's own.

Deviations: candidates are enumerated and priced by closed forms, cuts come from exact dynamic programming. Searches
that also place ranks and size parts (TAG's tree and a guide network among them) are those of `gnnpar plan`. TAG is
lossless, and so is this by default: lossy classes have to be named.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from importlib import import_module
from typing import Any, Literal

from gnnpar.codecs.codec import BFloat16, Exactness, Identity
from gnnpar.codecs.uniform import Uniform
from gnnpar.comm import Communicator
from gnnpar.data.tasks import Task
from gnnpar.models.gnn import GNN
from gnnpar.parallel.engine import Engine
from gnnpar.parallel.strategy import Capabilities, FirstLayer, LayerFacts, Strategy, Workload
from gnnpar.partition.shard import Shard
from gnnpar.placement import Plan, Topology
from gnnpar.planner.candidate import Candidate, Family, layers_of
from gnnpar.planner.extract import record
from gnnpar.planner.planner import Priced, Request, candidate_of, search
from gnnpar.planner.recompute import how_held
from gnnpar.pricing.machine import Machine
from gnnpar.pricing.quantity import seconds_text
from gnnpar.pricing.rates import NOMINAL
from gnnpar.pricing.statistics import GraphStats, PartStats
from gnnpar.pricing.topology import one_host

_CLASSES: Mapping[Family, str] = {
    "single": "gnnpar.parallel.single.strategy.Single",
    "graph_parallel": "gnnpar.parallel.halo.strategy.GraphParallel",
    "adaqp": "gnnpar.parallel.halo.adaqp.AdaQP",
    "sar": "gnnpar.parallel.sequential.strategy.SAR",
    "gnnpipe": "gnnpar.parallel.pipeline.strategy.GNNPipe",
    "hybrid": "gnnpar.parallel.pipeline.hybrid.Hybrid",
}


def families(first_layer: FirstLayer) -> tuple[Family, ...]:
    """Those whose strategy is there and runs so."""
    there: tuple[Family, ...] = tuple(f for f in _CLASSES if f != "single")
    return there if first_layer == "live" else tuple(f for f in there if f not in ("gnnpipe", "hybrid"))


def strategy_of(candidate: Candidate) -> Strategy:
    """The strategy of a candidate, its codec in place of the data that names it."""
    module, _, name = _CLASSES[candidate.family].rpartition(".")
    found: Any = getattr(import_module(module), name)
    bits: Any = candidate.bits
    codec = Identity() if bits == 32 else BFloat16() if bits == 16 else Uniform(bits=bits)
    fields = {k: codec if k in ("codec", "boundary") else v for k, v in candidate.fields.items()}
    return found(**fields)


@dataclass(frozen=True, kw_only=True)
class TAG:
    """`quality`: classes of inexactness that may be chosen. `rates`: measured on this machine (once, then cached), or
    nominal ones of a server core. `replan`: compare predicted and measured after the warm-up and, where they differ by
    more than a fifth, plan again with what was measured and go on with a better plan."""

    quality: tuple[Literal["exact", "rounded", "quantized", "stale"], ...] = ("exact",)
    rates: Literal["measured", "nominal"] = "measured"
    replan: bool = False

    @property
    def exactness(self) -> frozenset[Exactness]:
        return frozenset(self.quality)

    @property
    def capabilities(self) -> Capabilities:
        """Those of whatever it may choose."""
        return Capabilities(chunks=True, replicated_weights=False, plans_again=self.replan)

    def exact_limit(self) -> TAG:
        return replace(self, quality=("exact",), rates="nominal")

    def check(self, num_ranks: int, num_layers: int, epochs: int) -> None:
        """There is always a candidate that runs."""

    def plan(self, workload: Workload, topology: Topology) -> Plan:
        priced = self.choose(workload, topology.num_ranks)
        best = priced[0]
        workload.say(f"tag: {best.candidate.label}, predicted {seconds_text(best.phases.seconds)} an epoch")
        chosen: Plan = strategy_of(best.candidate).plan(workload, topology)
        placement = chosen.placement
        if best.candidate.stages > 1:
            placement = replace(placement, layers_of=layers_of(best.candidate.cuts, workload.num_layers))
        return replace(
            chosen, placement=placement, quality=tuple(sorted({*self.quality, "exact"})), predicted=best.as_predicted()
        )

    def choose(self, workload: Workload, ranks: int) -> tuple[Priced, ...]:
        """Every candidate, the best first."""
        if workload.model is None:
            raise ValueError("strategy=tag reads the model; give it to the Workload")
        setting = self._setting(workload, ranks)
        dataset = workload.dataset

        def statistics(parts: int) -> PartStats:
            return PartStats.of(dataset.edge_index, workload.part_of(parts), parts)

        ir = record(workload.model, dataset.num_features)
        kept = how_held(ir, random=workload.model.config.input_dropout > 0)
        return search(
            Request(
                ir,
                GraphStats.of(dataset),
                statistics,
                setting,
                ranks,
                families(workload.first_layer),
                frozenset(self.quality),
                kept=kept if workload.first_layer == "cached" else "no",
            )
        )

    def _setting(self, workload: Workload, ranks: int) -> Machine:
        if self.rates == "measured" and workload.setting is not None:
            return workload.setting()
        return Machine(one_host(ranks, cores=ranks, memory_bytes=1e12, rate=1e9, latency=5e-5), (NOMINAL,) * ranks)

    def chosen(self, plan: Plan) -> Strategy:
        """The strategy that a plan of TAG runs."""
        assert plan.predicted is not None, "a plan of tag says what it chose"
        return strategy_of(candidate_of(plan.predicted["candidate"]))

    def describe(self, plan: Plan) -> Sequence[LayerFacts]:
        return self.chosen(plan).describe(plan)

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
        return self.chosen(plan).build(plan, shard, model, task, comm, seed=seed, first_layer=first_layer)
