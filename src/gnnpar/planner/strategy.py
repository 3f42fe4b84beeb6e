"""TAG: plan for the model, graph and machine at hand, then run what was chosen.

Zhang et al., Expediting Distributed DNN Training with Device Topology-Aware Graph Deployment, TPDS 2023 (arXiv
2302.06126), carried over to full-graph training. plan() prices every candidate that `quality`
allows on the measured machine and returns the plan of the best; build() is the chosen strategy's own.

Deviations: candidates are enumerated and priced by closed forms, cuts come from exact dynamic programming. Searches
that also place ranks and size parts (TAG's tree and a guide network among them) are those of `gnnpar plan`. TAG is
lossless, and so is this by default: lossy classes have to be named.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Literal

from gnnpar.codecs.codec import Exactness
from gnnpar.comm import Communicator
from gnnpar.data.tasks import Task
from gnnpar.models.gnn import GNN
from gnnpar.parallel.engine import Engine
from gnnpar.parallel.priced import Priced, Problem
from gnnpar.parallel.strategy import Capabilities, FirstLayer, LayerFacts, Strategy, Workload
from gnnpar.partition.shard import Shard
from gnnpar.placement import Plan, Topology
from gnnpar.planner.extract import record
from gnnpar.planner.planner import Evaluated, Request, search
from gnnpar.planner.recompute import how_held
from gnnpar.planner.registry import registry
from gnnpar.pricing.candidate import Candidate, Scope
from gnnpar.pricing.machine import Machine
from gnnpar.pricing.price import Price
from gnnpar.pricing.quality import Quality
from gnnpar.pricing.quantity import seconds_text
from gnnpar.pricing.rates import NOMINAL
from gnnpar.pricing.statistics import GraphStats, PartStats
from gnnpar.pricing.topology import one_host
from gnnpar.pricing.work import Held, Work


@dataclass(frozen=True, kw_only=True)
class TAG:
    """`quality`: classes of inexactness that may be chosen. `rates`: measured on this machine (once, then cached), or
    nominal ones of a server core. `replan`: compare predicted and measured after the warm-up and, where they differ by
    more than a fifth, plan again with what was measured and go on with a better plan."""

    quality: tuple[Quality, ...] = ("exact",)
    rates: Literal["measured", "nominal"] = "measured"
    replan: bool = False

    @property
    def exactness(self) -> frozenset[Exactness]:
        return frozenset(self.quality)

    @property
    def capabilities(self) -> Capabilities:
        """Those of whatever it may choose."""
        return Capabilities(
            chunks=True,
            no_pyg="prices the operations of layers",
            moments=True,
            replicated_weights=False,
            plans_again=self.replan,
        )

    def exact_limit(self) -> TAG:
        return replace(self, quality=("exact",), rates="nominal")

    def check(self, num_ranks: int, num_layers: int, epochs: int) -> None:
        """There is always a candidate that runs."""

    def plan(self, workload: Workload, topology: Topology) -> Plan:
        best = self.choose(workload, topology.num_ranks)[0]
        workload.say(f"tag: {best.candidate.label}, predicted {seconds_text(best.price.seconds)} an epoch")
        chosen: Plan = registry().strategy_of(best.candidate).plan(workload, topology)
        placement = chosen.placement
        if best.candidate.stages > 1:
            placement = replace(placement, layers_of=best.candidate.layers_of(workload.num_layers))
        return replace(
            chosen, placement=placement, quality=tuple(sorted({*self.quality, "exact"})), predicted=best.as_predicted()
        )

    def choose(self, workload: Workload, ranks: int) -> tuple[Evaluated, ...]:
        """Every candidate, the best first."""
        if workload.model is None:
            raise ValueError("strategy=tag reads the model; give it to the Workload")
        dataset, model = workload.dataset, workload.model
        machine, ir = self._machine(workload, ranks), record(model, workload.dataset.num_features)
        kept: Held = "no"
        if workload.first_layer == "cached":
            kept = how_held(ir, random=model.config.input_dropout > 0)

        @cache
        def statistics(parts: int) -> PartStats:
            return PartStats.of(dataset.edge_index, workload.part_of(parts), parts)

        def work_of(parts: int) -> Work:
            return Work(ir, GraphStats.of(dataset), statistics(parts), machine.rates[:parts])

        problem = Problem(
            workload=workload,
            model=model,
            ir=ir,
            ranks=ranks,
            work_of=work_of,
            first_layer=workload.first_layer,
            kept=kept,
        )
        return search(
            Request(
                ir,
                GraphStats.of(dataset),
                statistics,
                machine,
                ranks,
                frozenset(self.quality),
                kept=kept,
                registry=registry(),
                problem=problem,
            )
        )

    def candidates(self, scope: Scope, ranks: int) -> tuple[Candidate, ...]:
        """None of its own: it chooses among those of the others."""
        return ()

    def cost(self, problem: Problem, machine: Machine) -> Price:
        """Of the strategy that it chooses, as a run chooses it."""
        workload = replace(
            problem.workload, model=problem.model, setting=lambda: machine, first_layer=problem.first_layer
        )
        best = self.choose(workload, problem.ranks)[0].candidate
        chosen = registry().strategy_of(best)
        assert isinstance(chosen, Priced), "what was chosen has a price"
        as_configured = chosen.cost(problem, machine)  # its cuts are even: bytes are the same wherever a cut is
        notes = (f"chooses {best.label}",)
        if self.replan:
            notes += ("replan=true may go over to another plan after the warm-up: all figures are those of the first",)
        price = best.price(problem.work(best), machine)
        return replace(price, traffic=as_configured.traffic, notes=notes + as_configured.notes)

    def _machine(self, workload: Workload, ranks: int) -> Machine:
        if self.rates == "measured" and workload.setting is not None:
            return workload.setting()
        return Machine(one_host(ranks, cores=ranks, memory_bytes=1e12, rate=1e9, latency=5e-5), (NOMINAL,) * ranks)

    def chosen(self, plan: Plan) -> Strategy:
        """The strategy that a plan of TAG runs."""
        assert plan.predicted is not None, "a plan of tag says what it chose"
        names = registry()
        return names.strategy_of(names.candidate_of(plan.predicted["candidate"], plan.num_layers))

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
