"""The planner: price every candidate by time and memory, choose the best allowed one, and say why.

The strategies of the registry enumerate candidates, and each candidate prices itself. `search.named` also explores
other points than uniform grids on the devices in order. The objective is seconds per epoch times the user's factor for
the quality class. Classes that are not allowed are priced for the table, but never chosen.
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
from gnnpar.parallel.declared import Problem
from gnnpar.parallel.needs import EDGE_TITLES
from gnnpar.parallel.strategy import Strategy, Workload
from gnnpar.partition.partition import Shares
from gnnpar.placement import Plan, Quality, Topology
from gnnpar.planner.extract import record
from gnnpar.planner.recompute import Recompute, by_factors, decide, how_held
from gnnpar.planner.registry import Registry, registry, shipped
from gnnpar.planner.search.places import Places
from gnnpar.pricing.candidate import Candidate, Scope
from gnnpar.pricing.ir import ModelIR
from gnnpar.pricing.machine import Machine
from gnnpar.pricing.price import Memory, Price
from gnnpar.pricing.quantity import bytes_text, seconds_text
from gnnpar.pricing.rates import Rates
from gnnpar.pricing.statistics import GraphStats, PartStats
from gnnpar.pricing.work import Held, Work
from gnnpar.settings import instantiate
from gnnpar.track.text import counted

USABLE = 0.92  # share of a device's memory
NEAR = 1.1  # prefer a recommended candidate within this factor of the best one
NOT_RECOMMENDED = {
    "bns": "inferior accuracy at rate 0.1",
    "cagnet": "0.94 times vanilla",
    "digest": "inferior accuracy",
    "minibatch": "longer to the same accuracy",
    "sancus": "inferior accuracy on 4 parts",
}
"""Family -> why experiments advise against it (experiments/compare_all/decisions.md)."""


@dataclass(frozen=True)
class Request:
    """A planning problem. partition: parts -> statistics. factors: quality class -> factor on the epochs, >= 1.

    kept: cache of layer 0 of `ir` in every candidate. held: the IR and cache of a model with layer 0 cached, as an
    alternative. problem: the run, for strategies that price only their own YAML; None omits them and makes no plan.
    edge_data: kinds of edge data of the graph. For searches: `places` (ranks on any device), `fewer` (fewer ranks),
    `uneven` (statistics of a partition with given shares of the nodes; None: equal parts).
    """

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
        """Return the request for a workload with its model, with lossless strategies only."""
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
            registry=registry().carrying(model.config) if model.config.wraps else registry(),
            problem=problem,
            edge_data=dataset.edges.kinds,
        )

    @property
    def workload(self) -> Workload:
        assert self.problem is not None, "only a run has a workload"
        return self.problem.workload

    def work(self, parts: PartStats, rates: tuple[Rates, ...], *, held: bool = False) -> Work:
        """Return the work of the model, or of the `held` one, on a partition. rates: of consecutive ranks."""
        ir, kept = self.held if held and self.held is not None else (self.ir, self.kept)
        return Work(ir, self.graph, parts, rates[: parts.parts], kept)

    def candidates(self, ranks: int) -> list[Candidate]:
        """Return the candidates on exactly `ranks` ranks, with layers cut evenly."""
        scope = Scope(ir=self.ir, nodes=self.graph.nodes, cached=self.kept != "no")
        return self.registry.candidates(scope, ranks, self.problem, self.allowed)

    @cached_property
    def recompute(self) -> Recompute | None:
        """The minimum cut's choice of recomputation; None without a halo, or if layer 0 cannot be cached."""
        if self.held is None or self.ranks == 1:
            return None
        parts, rates = self.partition(self.ranks), self.machine.rates
        return decide(self.work(parts, rates), self.work(parts, rates, held=True), self.machine)

    def factored(self, parts: int) -> bool:
        """Return True if sufficient factors are faster for the gradient of some weight."""
        return by_factors(self.work(self.partition(parts), self.machine.rates), self.machine)[0] > 0

    @property
    def holds(self) -> bool:
        """Return True if caching layer 0 pays."""
        return self.recompute is not None and self.recompute.held != "no"


@dataclass(frozen=True)
class Evaluated:
    """A candidate with its price. refused: why it cannot be chosen, else empty. devices: device of each rank; (): the
    first ones in order. shares: share of the nodes of each part; (): equal parts."""

    candidate: Candidate
    price: Price
    objective: float
    refused: str = ""
    devices: tuple[int, ...] = ()
    shares: tuple[float, ...] = ()

    @property
    def discouraged(self) -> str:
        """Why experiments advise against it, else empty."""
        return NOT_RECOMMENDED.get(self.candidate.family, "")

    @property
    def label(self) -> str:
        return (self.price.label or self.candidate.label) + (", uneven parts" if self.shares else "")

    def at(self, machine: Machine) -> Machine:
        """Return the machine with this candidate's ranks on their devices."""
        return machine.choose(self.devices) if self.devices else machine

    def as_predicted(self) -> JsonDict:
        return {**self.price.as_predicted(), "label": self.label, "candidate": self.candidate.as_json()}


@dataclass(frozen=True, eq=False)
class Planned:
    """The answer to a request: candidates, best first, and the cost of the search."""

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
        """Return the entry of plan.json on the search."""
        return {"name": self.search, "evaluations": self.evaluations, "cpu_seconds": round(self.cpu_seconds, 3)}

    def plan(self, topology: Topology, resolved: JsonObject | None = None) -> Plan:
        """Return the plan that the chosen candidate's strategy makes, with cuts, YAML and prediction. resolved: YAML of
        the strategy, if it is not the registry's."""
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
    learned = dataset.learned.width if dataset.learned else 0
    if not model.config.wraps:
        return record(model, dataset.num_features, learned=learned)
    from gnnpar.models.pyg.model import PyGNet
    from gnnpar.planner.pyg import record_pyg

    assert isinstance(model, PyGNet)
    degree = dataset.edge_index.shape[1] / dataset.num_nodes
    weighted = dataset.in_weight is not None
    return record_pyg(model, dataset.num_features, degree=degree, weighted=weighted, learned=learned)


def with_shares(workload: Workload, shares: tuple[float, ...]) -> Workload:
    """Return the workload with parts of these shares of the nodes; unchanged without shares."""
    return replace(workload, partition=Shares.wrap(workload.partition, shares)) if shares else workload


def recommend(evaluated: tuple[Evaluated, ...]) -> tuple[Evaluated, ...]:
    """If the first candidate is discouraged, move the best recommended one within `NEAR` of it to the front."""
    best = evaluated[0]
    near = (e for e in evaluated if not e.refused and not e.discouraged and e.objective <= NEAR * best.objective)
    first = (best.discouraged and next(near, None)) or best
    return (first, *(e for e in evaluated if e is not first))


def price_grids(request: Request) -> tuple[Evaluated, ...]:
    """Price all uniform grids, also if none is eligible."""

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
    """Return the numbers of ranks to price: all; with `fewer` also halves, and sums of consecutive device classes."""
    count = request.ranks
    if not request.fewer:
        return [count]
    sizes = [len(c) for c in Places(request.machine.fabric, free=request.places).classes]
    sums = {sum(sizes[:i]) for i in range(1, len(sizes))} | {sum(sizes[i:]) for i in range(1, len(sizes))}
    halves = {count >> i for i in range(1, 4) if count >> i}
    return [count, *sorted((sums | halves | {1}) - {count}, reverse=True)[:10]]


def evaluate(candidate: Candidate, work: Work, request: Request) -> Evaluated:
    """Price a candidate by time and memory, and check whether it may be chosen."""
    price = candidate.price(work, request.machine)
    if price.unpriced:
        return Evaluated(candidate, price, math.inf, f"unpriced: {price.unpriced}")
    factor = max([request.factors.get(q, 1.0) for q in candidate.quality], default=1.0)
    return Evaluated(candidate, price, price.seconds * factor, refused(candidate, price.memory, request))


def refused(candidate: Candidate, memory: tuple[Memory, ...], request: Request) -> str:
    """Return why a candidate cannot be chosen, else an empty string."""
    if beyond := sorted(candidate.quality - request.allowed - {"exact"}):
        return f"{beyond[0]} is not allowed"
    if request.edge_data:
        carried = request.registry.strategy_of(candidate).capabilities.edge_data
        if lost := [EDGE_TITLES[kind] for kind in EDGE_KINDS if kind in request.edge_data - carried]:
            return f"it does not carry {lost[0]} of edges"
    return lacking(memory, request)


def lacking(memory: tuple[Memory, ...], request: Request) -> str:
    """Return a line on the first rank without enough memory, else an empty string."""
    for rank, (need, device) in enumerate(zip(memory, request.machine.fabric.devices, strict=False)):
        if need.total > request.usable * device.memory_bytes:
            return f"rank {rank} needs {bytes_text(need.total)} of {bytes_text(device.memory_bytes)}"
    return ""


def nothing_fits(evaluated: Sequence[Evaluated], request: Request) -> str:
    """Return a line on the memory that the nearest candidate lacks."""
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
    """Return sentences on the choice: time saved over the best of each other family, by phase."""
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
