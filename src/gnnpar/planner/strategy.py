"""TAG: plan for the model, graph and machine, then run the chosen plan.

Zhang et al., Expediting Distributed DNN Training with Device Topology-Aware Graph Deployment, TPDS 2023 (arXiv
2302.06126), applied to full-graph training. plan() searches the classes in `quality` on the measured machine and
returns the best plan, which contains the YAML of its strategy. build() calls that strategy's build().

Deviations: closed forms price candidates, exact dynamic programming finds cuts, and the tree differs (`search=guided`
of `gnnpar plan`). Ranks stay on their devices. TAG is lossless, and so is the default: lossy classes must be named.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from gnnpar.codecs.codec import Exactness
from gnnpar.parallel.context import BuildContext
from gnnpar.parallel.declared import Priced, Problem
from gnnpar.parallel.engine import Engine
from gnnpar.parallel.strategy import Capabilities, LayerFacts, Strategy, Workload
from gnnpar.placement import Plan, Quality, Topology
from gnnpar.planner.planner import Planned, Request
from gnnpar.planner.search.named import run
from gnnpar.pricing.candidate import Candidate, Scope
from gnnpar.pricing.machine import Machine
from gnnpar.pricing.price import Price
from gnnpar.pricing.quantity import seconds_text
from gnnpar.pricing.rates import NOMINAL
from gnnpar.pricing.topology import one_host
from gnnpar.settings import instantiate


@dataclass(frozen=True, kw_only=True)
class TAG:
    """Configuration of TAG.

    quality: classes of inexactness that may be chosen. rates: measured on this machine (once, then cached), or nominal
    rates of a server core. replan: compare predicted and measured times after the warm-up, and plan again if they
    differ by more than a fifth.
    """

    quality: tuple[Quality, ...] = ("exact",)
    rates: Literal["measured", "nominal"] = "measured"
    replan: bool = False

    @property
    def exactness(self) -> frozenset[Exactness]:
        return frozenset(self.quality)

    @property
    def capabilities(self) -> Capabilities:
        """Capabilities of all strategies that it may choose."""
        return Capabilities(
            chunks=True,
            moments=True,
            replicated_weights=False,
            plans_again=self.replan,
        )

    def exact_limit(self) -> TAG:
        return replace(self, quality=("exact",), rates="nominal")

    def check(self, num_ranks: int, num_layers: int, epochs: int) -> None:
        """Accept any request, since some candidate always runs."""

    def plan(self, workload: Workload, topology: Topology) -> Plan:
        """Return the plan of the best candidate. Its `strategy` is the YAML of the strategy that runs it."""
        found = self.choose(workload, topology.num_ranks)
        best = found.chosen
        workload.say(f"tag: {best.label}, predicted {seconds_text(best.price.seconds)} an epoch")
        return found.plan(topology)

    def choose(self, workload: Workload, ranks: int) -> Planned:
        """Search for the best plan of a workload."""
        if workload.model is None:
            raise ValueError("strategy=tag reads the model; give it to the Workload")
        request = Request.of(workload, self._machine(workload, ranks), ranks)
        return run(replace(request, allowed=frozenset({*self.quality, "exact"})))

    def candidates(self, scope: Scope, ranks: int) -> tuple[Candidate, ...]:
        """Return no candidates: TAG chooses among the candidates of other strategies."""
        return ()

    def cost(self, problem: Problem, machine: Machine) -> Price:
        """Return the price of the strategy that a run would choose."""
        workload = replace(
            problem.workload, model=problem.model, setting=lambda: machine, first_layer=problem.first_layer
        )
        found = self.choose(workload, problem.ranks)
        best, work_of = found.chosen, problem.work_of
        if (uneven := found.request.uneven) and best.shares:
            problem = replace(problem, work_of=lambda parts: replace(work_of(parts), parts=uneven(best.shares)))
        chosen = found.request.registry.strategy_of(best.candidate)
        assert isinstance(chosen, Priced), "what was chosen has a price"
        as_configured = chosen.cost(problem, machine)  # with even cuts; bytes are equal for all cuts
        notes = (f"chooses {best.label}",)
        if self.replan:
            notes += ("replan=true may go over to another plan after the warm-up: all figures are those of the first",)
        notes += as_configured.notes
        return replace(best.price, label=best.label, traffic=as_configured.traffic, notes=notes)

    def _machine(self, workload: Workload, ranks: int) -> Machine:
        if self.rates == "measured" and workload.setting is not None:
            return workload.setting()
        return Machine(one_host(ranks, memory_bytes=1e12, rate=1e9, latency=5e-5), (NOMINAL,) * ranks)

    def chosen(self, plan: Plan) -> Strategy:
        """Return the strategy that a plan names. ValueError if it cannot run."""
        strategy = instantiate({key: value for key, value in plan.strategy.items() if key != "name"}, "strategy")
        if isinstance(strategy, TAG):
            raise ValueError("the plan cannot run: strategy=tag has to say what it chose; plan again")
        return strategy

    def describe(self, plan: Plan) -> Sequence[LayerFacts]:
        return self.chosen(plan).describe(plan)

    def build(self, context: BuildContext) -> Engine:
        return self.chosen(context.plan).build(context)
