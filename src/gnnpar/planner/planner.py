"""The planner: every candidate priced by time and memory, the best allowed one chosen, and why.

Candidates are those that the strategies of the registry name; each prices itself.
`search.named` moves through what uniform grids in the given order leave out. The objective is seconds an epoch times
the user's factor of its quality class; nothing beyond the allowed classes is chosen, but it is priced, so that the
table shows what they would give.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, cached_property

from gnnpar.data.dataset import Dataset
from gnnpar.files import JsonDict, JsonObject
from gnnpar.folds.edge_data import EDGE_KINDS, EdgeKind
from gnnpar.models.gnn import GNN
from gnnpar.parallel.needs import EDGE_TITLES
from gnnpar.parallel.priced import Problem
from gnnpar.parallel.strategy import Strategy, Workload
from gnnpar.partition.shares import Shares
from gnnpar.placement import Plan, Topology
from gnnpar.planner.extract import record
from gnnpar.planner.recompute import Recompute, by_factors, decide, how_held
from gnnpar.planner.registry import Registry, registry, shipped
from gnnpar.planner.search.places import Places
from gnnpar.pricing.candidate import Candidate, Scope
from gnnpar.pricing.ir import ModelIR
from gnnpar.pricing.machine import Machine
from gnnpar.pricing.price import Memory, Price
from gnnpar.pricing.quality import Quality
from gnnpar.pricing.quantity import bytes_text, seconds_text
from gnnpar.pricing.rates import Rates
from gnnpar.pricing.statistics import GraphStats, PartStats
from gnnpar.pricing.work import Held, Work
from gnnpar.settings import instantiate
from gnnpar.track.text import counted

USABLE = 0.92  # of a device's memory
NEAR = 1.1  # times the best, within which a recommended candidate is chosen before one that is not
NOT_RECOMMENDED = {
    "bns": "inferior accuracy at rate 0.1",
    "cagnet": "0.94 times vanilla",
    "digest": "inferior accuracy",
    "minibatch": "longer to the same accuracy",
    "sancus": "inferior accuracy on 4 parts",
}
"""Family -> reason, as in experiments/compare_all/decisions.md."""


@dataclass(frozen=True)
class Request:
    """What there is to plan. `partition`: parts -> statistics. `factors`: quality class -> epochs it costs, >= 1.

    `kept`: what layer 0 of `ir` keeps in every candidate. `held`: another model that keeps it, to choose from.
    `problem`: the run, for strategies that price only what their YAML says; None leaves them out, and makes no plan.
    `edge_data`: what edges have. For searches: may ranks be put on any device (`places`), may there be `fewer` of them,
    and what a partition with given shares of the nodes comes to (`uneven`; None: parts are equal)."""

    ir: ModelIR
    graph: GraphStats
    partition: Callable[[int], PartStats]
    machine: Machine
    ranks: int
    allowed: frozenset[Quality] = frozenset({"exact"})
    factors: Mapping[Quality, float] = field(default_factory=dict)
    usable: float = USABLE
    kept: Held = "no"
    held: tuple[ModelIR, Held] | None = None
    places: bool = False
    fewer: bool = False
    uneven: Callable[[tuple[float, ...]], PartStats] | None = None
    registry: Registry = field(default_factory=shipped)
    problem: Problem | None = None
    edge_data: frozenset[EdgeKind] = frozenset()

    @staticmethod
    def of(workload: Workload, machine: Machine, ranks: int, *, seed: int = 0, places: bool = False) -> Request:
        """Return the request for a workload that has its model, lossless strategies alone."""
        model, dataset = workload.model, workload.dataset
        assert model is not None, "the planner reads the model"
        ir, graph = recorded(model, dataset), GraphStats.of(dataset)
        kept: Held = "no" if workload.first_layer == "live" else how_held(model, ir)

        @cache
        def partition(parts: int) -> PartStats:
            return PartStats.of(dataset.edge_index, workload.part_of(parts), parts, dataset.edges.type)

        def uneven(shares: tuple[float, ...]) -> PartStats:
            part_of = with_shares(workload, shares).part_of(len(shares))
            return PartStats.of(dataset.edge_index, part_of, len(shares), dataset.edges.type)

        problem = Problem(
            workload=workload,
            model=model,
            ir=ir,
            ranks=ranks,
            work_of=lambda parts: Work(ir, graph, partition(parts), machine.rates[:parts]),
            first_layer=workload.first_layer,
            kept=kept,
            seed=seed,
        )
        mixed = places or any(rates != machine.rates[0] for rates in machine.rates)
        return Request(
            ir,
            graph,
            partition,
            machine,
            ranks,
            kept=kept,
            places=places,
            uneven=uneven if mixed and Shares.supported(workload.partition) else None,
            registry=registry(),
            problem=problem,
            edge_data=dataset.edges.kinds,
        )

    @property
    def workload(self) -> Workload:
        assert self.problem is not None, "only a run has a workload"
        return self.problem.workload

    def work(self, parts: PartStats, rates: tuple[Rates, ...], *, held: bool = False) -> Work:
        """Of the model on a partition, or of that which is `held`. rates: of rank after rank, one a part or more."""
        ir, kept = self.held if held and self.held is not None else (self.ir, self.kept)
        return Work(ir, self.graph, parts, rates[: parts.parts], kept)

    def candidates(self, ranks: int) -> list[Candidate]:
        """On exactly so many ranks, layers cut evenly."""
        scope = Scope(ir=self.ir, nodes=self.graph.nodes, cached=self.kept != "no")
        return self.registry.candidates(scope, ranks, self.problem, self.allowed)

    @cached_property
    def recompute(self) -> Recompute | None:
        """What the minimum cut would recompute; None where there is no halo, or layer 0 cannot be kept."""
        if self.held is None or self.ranks == 1:
            return None
        parts, rates = self.partition(self.ranks), self.machine.rates
        return decide(self.work(parts, rates), self.work(parts, rates, held=True), self.machine)

    def factored(self, parts: int) -> bool:
        """Is the gradient of some weight made by sufficient factors?"""
        return by_factors(self.work(self.partition(parts), self.machine.rates), self.machine)[0] > 0

    @property
    def holds(self) -> bool:
        """Is it worth keeping layer 0?"""
        return self.recompute is not None and self.recompute.held != "no"


@dataclass(frozen=True)
class Evaluated:
    """A candidate with its price; `refused`: why it cannot be chosen, empty where it can.

    `devices`: of each rank, () for the first ones as given. `shares`: of the nodes by part, () where all are equal."""

    candidate: Candidate
    price: Price
    objective: float
    refused: str = ""
    devices: tuple[int, ...] = ()
    shares: tuple[float, ...] = ()

    @property
    def discouraged(self) -> str:
        """Why experiments advise against it; empty: they do not."""
        return NOT_RECOMMENDED.get(self.candidate.family, "")

    @property
    def label(self) -> str:
        return (self.price.label or self.candidate.label) + (", uneven parts" if self.shares else "")

    def at(self, machine: Machine) -> Machine:
        """Where its ranks run."""
        if not self.devices:
            return machine
        return Machine(machine.fabric.choose(self.devices), tuple(machine.rates[d] for d in self.devices))

    def as_predicted(self) -> JsonDict:
        return {**self.price.as_predicted(), "label": self.label, "candidate": self.candidate.as_json()}


@dataclass(frozen=True, eq=False)
class Planned:
    """The answer to a request: candidates, the best first, and what searching took."""

    request: Request
    evaluated: tuple[Evaluated, ...]
    search: str
    evaluations: int
    cpu_seconds: float

    @property
    def chosen(self) -> Evaluated:
        return self.evaluated[0]

    @property
    def searched(self) -> JsonDict:
        """The search as plan.json has it."""
        return {"name": self.search, "evaluations": self.evaluations, "cpu_seconds": round(self.cpu_seconds, 3)}

    def plan(self, topology: Topology, resolved: JsonObject | None = None) -> Plan:
        """Return the plan of the chosen candidate: its strategy's own, with its cuts, YAML and prediction.

        `resolved`: YAML of the strategy, where it is not that of the registry.
        """
        chosen, candidate = self.chosen, self.chosen.candidate
        yaml = {**(resolved or self.request.registry.yaml[candidate.family]), **candidate.fields}
        learned = self.request.workload.dataset.learned
        if "reduce" in yaml and not learned and self.request.factored(candidate.parts):
            yaml["reduce"] = "factors"
        strategy: Strategy = instantiate(yaml, "strategy")
        plan: Plan = strategy.plan(with_shares(self.request.workload, chosen.shares), topology)
        placement = plan.placement
        if candidate.stages > 1:
            placement = replace(placement, layers_of=candidate.layers_of(self.request.ir.num_layers))
        return replace(
            plan,
            placement=placement,
            strategy={"name": candidate.family, **yaml},
            predicted=chosen.as_predicted(),
            quality=tuple(sorted(self.request.allowed)),
        )


def recorded(model: GNN, dataset: Dataset) -> ModelIR:
    """Return the model's IR on a dataset."""
    return record(model, dataset.num_features, learned=dataset.learned.width if dataset.learned else 0)


def with_shares(workload: Workload, shares: tuple[float, ...]) -> Workload:
    """Return the workload with parts of these shares of the nodes; as it is where there are none."""
    return replace(workload, partition=Shares.around(workload.partition, shares)) if shares else workload


def search(request: Request) -> tuple[Evaluated, ...]:
    """All uniform grids, those that can be chosen first, by objective. ValueError where none can."""
    evaluated = listed(request)
    if not evaluated or evaluated[0].refused:
        raise ValueError(nothing_fits(evaluated, request))
    return advised(evaluated)


def advised(evaluated: tuple[Evaluated, ...]) -> tuple[Evaluated, ...]:
    """The same; where the first is discouraged, the best one `NEAR` it that is not comes before it."""
    best = evaluated[0]
    near = (e for e in evaluated if not e.refused and not e.discouraged and e.objective <= NEAR * best.objective)
    first = (best.discouraged and next(near, None)) or best
    return (first, *(e for e in evaluated if e is not first))


def listed(request: Request) -> tuple[Evaluated, ...]:
    """The same, whether or not one can be chosen."""

    @cache
    def work(parts: int, *, held: bool = False) -> Work:
        return request.work(request.partition(parts), request.machine.rates, held=held)

    given = [c for n in rank_counts(request) for c in request.candidates(n)]
    evaluated = [evaluate(c.placed(work(c.parts), request.machine), work(c.parts), request) for c in given]
    if request.holds:
        flat = [e.candidate for e in evaluated if e.candidate.may_hold]
        evaluated += [evaluate(replace(c, held=True), work(c.parts, held=True), request) for c in flat]
    return tuple(sorted(evaluated, key=lambda e: (bool(e.refused), e.objective, e.candidate.label)))


def rank_counts(request: Request) -> list[int]:
    """All ranks that are asked for; where fewer may do also those without some classes of devices, and halves."""
    count = request.ranks
    if not request.fewer:
        return [count]
    sizes = [len(c) for c in Places(request.machine.fabric, free=request.places).classes]
    sums = {sum(sizes[:i]) for i in range(1, len(sizes))} | {sum(sizes[i:]) for i in range(1, len(sizes))}
    halves = {count >> i for i in range(1, 4) if count >> i}
    return [count, *sorted((sums | halves | {1}) - {count}, reverse=True)[:10]]


def evaluate(candidate: Candidate, work: Work, request: Request) -> Evaluated:
    """Time, memory, and whether it may be chosen."""
    price = candidate.price(work, request.machine)
    if price.unpriced:
        return Evaluated(candidate, price, math.inf, f"unpriced: {price.unpriced}")
    factor = max([request.factors.get(q, 1.0) for q in candidate.quality], default=1.0)
    return Evaluated(candidate, price, price.seconds * factor, refused(candidate, price.memory, request))


def refused(candidate: Candidate, memory: tuple[Memory, ...], request: Request) -> str:
    """Why a candidate cannot be chosen; empty where it can."""
    if beyond := sorted(candidate.quality - request.allowed - {"exact"}):
        return f"{beyond[0]} is not allowed"
    if request.edge_data:
        carried = request.registry.strategy_of(candidate).capabilities.edge_data
        if lost := [EDGE_TITLES[kind] for kind in EDGE_KINDS if kind in request.edge_data - carried]:
            return f"it does not carry {lost[0]} of edges"
    return lacking(memory, request)


def lacking(memory: tuple[Memory, ...], request: Request) -> str:
    """The first rank whose device has too little memory; empty where all have enough."""
    for rank, (need, device) in enumerate(zip(memory, request.machine.fabric.devices, strict=False)):
        if need.total > request.usable * device.memory_bytes:
            return f"rank {rank} needs {bytes_text(need.total)} of {bytes_text(device.memory_bytes)}"
    return ""


def nothing_fits(evaluated: Sequence[Evaluated], request: Request) -> str:
    """One line: what the nearest candidate lacks."""
    allowed = [e for e in evaluated if e.price.phases and not e.refused.endswith("not allowed")]
    if not allowed:
        quality, ranks = ", ".join(sorted(request.allowed)), counted(request.ranks, "rank")
        return f"no strategy of quality {quality} runs on {ranks}; allow more"
    nearest = min(allowed, key=lambda e: e.price.peak_bytes)
    beyond = [e for e in evaluated if e.refused.endswith("not allowed")]
    others = [e for e in beyond if not lacking(e.price.memory, request)]
    hint = f"; {others[0].candidate.label} would fit, but {others[0].refused}" if others else ""
    return f"no plan fits: the nearest, {nearest.candidate.label}: {nearest.refused}{hint}; use more ranks"


def reasons(evaluated: tuple[Evaluated, ...]) -> list[str]:
    """Why the first was chosen, in sentences: what it saves over the best of each other family, and by which phase."""
    best, lines = evaluated[0], []
    seen = {best.candidate.family}
    for other in evaluated[1:]:
        if other.candidate.family in seen:
            continue
        seen.add(other.candidate.family)
        if other.refused and other.objective >= best.objective:
            continue
        gap = other.objective - best.objective
        phase = _largest_difference(best.price.phases, other.price.phases, gap)
        if other.refused:
            lines.append(f"{other.label} would save {seconds_text(-gap)} ({phase}), but {other.refused}")
        elif gap < 0:
            but = f", but is not recommended: {other.discouraged}" if other.discouraged else ""
            lines.append(f"{other.label} is predicted to take {seconds_text(-gap)} less ({phase}){but}")
        else:
            lines.append(f"{other.label} takes {seconds_text(gap)} longer ({phase})")
    return lines


def _largest_difference(best: Mapping[str, float], other: Mapping[str, float], gap: float) -> str:
    names = {**best, **other}
    gaps = {name: other.get(name, 0.0) - best.get(name, 0.0) for name in names}
    name = max(gaps, key=lambda key: gaps[key] if gap >= 0 else -gaps[key])
    return f"{name} {seconds_text(other.get(name, 0.0))} against {seconds_text(best.get(name, 0.0))}"
