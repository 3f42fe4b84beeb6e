"""From settings to a chosen plan: the planner's request, its answer as a Plan that `train` runs, and the table."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cache

from gnnpar.data.dataset import Dataset
from gnnpar.data.tasks import make_task
from gnnpar.files import JsonObject
from gnnpar.models.gnn import GNN
from gnnpar.parallel.priced import Problem
from gnnpar.parallel.strategy import Workload, refuse_edges_of_model
from gnnpar.partition.shares import Shares
from gnnpar.placement import Plan
from gnnpar.planner.extract import record
from gnnpar.planner.machines import setting_of
from gnnpar.planner.planner import Evaluated, Request, listed, reasons
from gnnpar.planner.recompute import how_held
from gnnpar.planner.registry import registry
from gnnpar.planner.search.named import BUDGET, DEFAULT, Result, run
from gnnpar.planner.simulate import Timeline, simulated
from gnnpar.pricing.ir import ModelIR
from gnnpar.pricing.machine import Machine
from gnnpar.pricing.quality import Quality
from gnnpar.pricing.quantity import bytes_text, seconds_text
from gnnpar.pricing.statistics import GraphStats, PartStats
from gnnpar.pricing.topology import Machines
from gnnpar.pricing.work import Held, Work
from gnnpar.settings import PLAN_SETUP, Settings, instantiate
from gnnpar.training.plans import partition_cache


@dataclass(frozen=True, kw_only=True)
class Searching:
    """How `gnnpar plan` looks for a plan. `budget`: evaluations. `fewer`: may devices stay unused?"""

    search: str = DEFAULT
    budget: int = BUDGET
    fewer: bool = False


@dataclass(frozen=True, eq=False)
class Planned:
    """A planner's answer. `chosen` is evaluated[0]."""

    evaluated: tuple[Evaluated, ...]
    machine: Machine
    workload: Workload
    request: Request
    dataset: Dataset
    model_hash: str
    result: Result

    @property
    def chosen(self) -> Evaluated:
        return self.evaluated[0]


@dataclass(frozen=True, eq=False)
class Inputs:
    """Of settings without their strategy, wherever the planner runs: the graph and the model."""

    workload: Workload
    model: GNN
    ir: ModelIR

    @staticmethod
    def of(settings: Settings, say: Callable[[str], None] = lambda _: None) -> Inputs:
        if settings.task.decoder is not None:
            raise ValueError(
                f"task={settings.names.get('task')} sends rows of pairs, which the planner does not price; choose a "
                "strategy yourself"
            )
        dataset = settings.load_dataset()
        kinds, name = dataset.edges.kinds, dataset.name
        refuse_edges_of_model(settings.model, kinds, dataset.in_weight, name, settings.names)
        task = make_task(dataset.task, dataset.num_classes)
        if settings.model.wraps:
            raise ValueError(
                f"model={settings.names.get('model')} runs code of its own, for which the planner has no rates; choose "
                "one of gnnpar's models"
            )
        model = settings.build_model(dataset.num_features, task.out_dim, dataset.edge_sizes)
        ir = record(model, dataset.num_features, learned=dataset.learned.width if dataset.learned else 0)
        workload = Workload(
            dataset=dataset,
            partition=settings.partition,
            num_layers=ir.num_layers,
            cache=partition_cache(settings),
            say=say,
        )
        return Inputs(workload, model, ir)

    def request(self, machine: Machine, ranks: int, settings: Settings) -> Request:
        """Of so many ranks, lossless strategies alone."""
        graph, ir = GraphStats.of(self.workload.dataset), self.ir
        kept = what_is_held(settings, ir) if settings.caches_first_layer else "no"
        partition = _even(self.workload)
        problem = Problem(
            workload=self.workload,
            model=self.model,
            ir=ir,
            ranks=ranks,
            work_of=lambda parts: Work(ir, graph, partition(parts), machine.rates[:parts]),
            first_layer=settings.first_layer,
            kept=kept,
            seed=settings.seed,
        )
        return Request(
            ir,
            graph,
            partition,
            machine,
            ranks,
            kept=kept,
            registry=registry(),
            problem=problem,
            edge_data=self.workload.dataset.edges.kinds,
        )


def planned(
    settings: Settings,
    *,
    ranks: int | None,
    allowed: frozenset[Quality],
    factors: Mapping[Quality, float] = {},
    how: Searching = Searching(),
    say: Callable[[str], None] = lambda _: None,
    recompute: bool = False,
    measuring: bool = True,
) -> Planned:
    """Search for these settings. ValueError says what cannot be, in one line.

    `recompute`: first_layer is the planner's choice, too. `measuring`: of this machine's speed, where it is not cached.
    """
    machine, count = setting_of(settings, ranks, say, measuring=measuring)
    inputs = Inputs.of(settings, say)
    workload, cached = inputs.workload, settings.caches_first_layer
    own_places = isinstance(settings.topology, Machines)
    mixed = any(rates != machine.rates[0] for rates in machine.rates)
    request = replace(
        inputs.request(machine, count, settings),
        allowed=allowed,
        factors=factors,
        places=own_places,
        fewer=how.fewer,
        uneven=_uneven(workload) if (own_places or mixed) and Shares.supported(workload.partition) else None,
        held=_keeping(settings, inputs) if recompute and not cached else None,
    )
    ir, dataset = inputs.ir, workload.dataset
    model_hash = hashlib.sha256(repr(ir).encode()).hexdigest()
    result = run(request, how.search, budget=how.budget, seed=settings.seed)
    return Planned(result.evaluated, machine, workload, request, dataset, model_hash, result)


def with_one_device(
    planned: Planned, settings: Settings, say: Callable[[str], None] = lambda _: None, *, measuring: bool = True
) -> Planned:
    """With strategies of one rank among the candidates that are not chosen: the whole graph on the topology's first
    device, else on this machine with the threads that a run of one rank has."""
    if any(e.candidate.ranks == 1 for e in planned.evaluated):
        return planned
    machine, request = Machine(planned.machine.fabric.first(1), planned.machine.rates[:1]), planned.request
    if not isinstance(settings.topology, Machines):
        here = setting_of(settings, 1, say if measuring else lambda _: None, measuring=measuring)[0]
        same = here.rates[0].source == machine.rates[0].source  # nominal ones say nothing beside measured ones
        machine = here if same else machine
    of_one = {name: each for name, each in request.registry.strategies.items() if each.capabilities.max_ranks == 1}
    alone = listed(replace(request, machine=machine, ranks=1, registry=replace(request.registry, strategies=of_one)))
    unused = f"it uses 1 of {request.ranks} ranks: gnnpar train strategy="
    more = [e if e.refused else replace(e, refused=unused + e.candidate.family) for e in alone]
    allowed = [e for e in planned.evaluated if not e.refused]
    others = sorted([*(e for e in planned.evaluated if e.refused), *more], key=lambda e: (e.objective, e.label))
    return replace(planned, evaluated=(*allowed, *others))


def _even(workload: Workload) -> Callable[[int], PartStats]:
    @cache
    def made(parts: int) -> PartStats:
        return PartStats.of(workload.dataset.edge_index, workload.part_of(parts), parts)

    return made


def _uneven(workload: Workload) -> Callable[[tuple[float, ...]], PartStats]:
    def made(shares: tuple[float, ...]) -> PartStats:
        part_of = _sharing(workload, shares).part_of(len(shares))
        return PartStats.of(workload.dataset.edge_index, part_of, len(shares))

    return made


def _sharing(workload: Workload, shares: tuple[float, ...]) -> Workload:
    """The same with parts of these shares; as it is where there are none."""
    return replace(workload, partition=Shares.around(workload.partition, shares)) if shares else workload


def _keeping(settings: Settings, inputs: Inputs) -> tuple[ModelIR, Held] | None:
    """The model with first_layer=cached, and what it keeps; None where learned rows stand in front of layer 0."""
    if inputs.ir.learned:
        return None
    try:
        dataset, out_dim = inputs.workload.dataset, inputs.model.out_dim
        width = dataset.num_features
        model = settings.model.on(dataset.edge_sizes).build(width, out_dim, seed=settings.seed, cached_first_layer=True)
    except ValueError:
        return None
    ir = record(model, width)
    return ir, what_is_held(settings, ir)


def what_is_held(settings: Settings, ir: ModelIR) -> Held:
    """Of layer 0, where it is kept."""
    return how_held(ir, random=settings.model.input_dropout > 0)


def plan_of(planned: Planned, yaml_of: Callable[[str], JsonObject], settings: Settings) -> Plan:
    """The plan of the chosen candidate: its strategy's own, with cuts, devices, prediction and what it is for.

    yaml_of: name of a strategy -> its resolved YAML.
    """
    chosen = planned.chosen
    candidate = chosen.candidate
    resolved = dict(yaml_of(candidate.family)) | candidate.fields
    strategy = instantiate(resolved, "strategy")
    fabric = chosen.at(planned.machine).fabric
    plan: Plan = strategy.plan(_sharing(planned.workload, chosen.shares), fabric.topology(candidate.ranks))
    placement = plan.placement
    if candidate.stages > 1:
        placement = replace(placement, layers_of=candidate.layers_of(planned.request.ir.num_layers))
    alternatives = [
        {"label": e.label, "epoch_seconds": e.price.seconds, "refused": e.refused} for e in planned.evaluated[1:6]
    ]
    return replace(
        plan,
        placement=placement,
        strategy={"name": candidate.family, **resolved},
        hashes=plan.hashes | {"model": planned.model_hash},
        predicted=chosen.as_predicted() | {"alternatives": alternatives, "search": planned.result.as_predicted()},
        quality=tuple(sorted(planned.request.allowed)),
        devices=tuple(d.name for d in fabric.devices[: candidate.ranks]),
        setup={
            "names": {group: settings.names[group] for group in PLAN_SETUP if group in settings.names},
            **{key: settings.resolved[key] for key in PLAN_SETUP},
            **({"first_layer": "cached"} if candidate.held else {}),
        },
    )


PHASES = ("compute", "encode", "wire", "bubble", "reduce")
COLUMNS = ("strategy", "epoch", *PHASES, "peak memory", "")


def table_rows(
    evaluated: tuple[Evaluated, ...], limit: int, measured: Mapping[str, float] = {}
) -> list[tuple[str, ...]]:
    """A row a candidate: the best of all, and of every family at least one. `measured`: label -> seconds an epoch."""
    shown: list[Evaluated] = []
    seen: set[str] = set()
    for i, e in enumerate(evaluated):
        if i < limit or e.candidate.family not in seen or e.candidate.label in measured:
            shown.append(e)
        seen.add(e.candidate.family)
    return [_row(e, i == 0, measured) for i, e in enumerate(shown)]


def _row(e: Evaluated, first: bool, measured: Mapping[str, float]) -> tuple[str, ...]:
    price = e.price
    if price.unpriced:
        return (e.label, *["-"] * (len(COLUMNS) - 2), e.refused)
    phases = tuple(seconds_text(v) if (v := price.phases.get(name, 0.0)) else "-" for name in PHASES)
    advice = f"not recommended: {e.discouraged}" if e.discouraged else ""
    note = "; ".join(filter(None, ("chosen" if first else e.refused, advice)))
    if e.candidate.label in measured:
        note = f"measured {seconds_text(measured[e.candidate.label])}" + (", chosen" if first else "")
    return (e.label, seconds_text(price.seconds), *phases, bytes_text(price.peak_bytes), note)


def timeline(planned: Planned) -> Timeline:
    """An epoch of the chosen candidate in the event simulator."""
    candidate = planned.chosen.candidate
    shares, machine = planned.chosen.shares, planned.chosen.at(planned.machine)
    parts = _uneven(planned.workload)(shares) if shares else planned.request.partition(candidate.parts)
    work = planned.request.work(parts, machine.rates, held=candidate.held)
    return simulated(candidate, work, machine)


def _places(planned: Planned) -> str:
    names = [d.name for d in planned.chosen.at(planned.machine).fabric.devices[: planned.chosen.candidate.ranks]]
    return ", ".join(names[:12]) + (f" and {len(names) - 12} more" if len(names) > 12 else "")


def why(planned: Planned, simulated_seconds: float) -> list[str]:
    """The sentences below the table."""
    rates = planned.machine.rates[0]
    worst = max(rates.residuals.values(), default=None)
    doubt = f"; the fit of kernels is off by {worst:.0%} at worst (median of a kind)" if worst is not None else ""
    recompute = planned.request.recompute
    event = f"event by event the chosen plan takes {seconds_text(simulated_seconds)}"
    how = planned.result
    looked = f"search={how.search} priced {how.evaluations} candidates in {seconds_text(how.cpu_seconds)} of CPU"
    devices = planned.chosen.devices
    moved = [] if devices == tuple(range(len(devices))) else [f"ranks run on {_places(planned)}, in this order"]
    cut = [] if recompute is None else [recompute.describe(chosen=planned.chosen.candidate.held)]
    left_out = planned.request.registry.unpriced(planned.request.allowed)
    unpriced = [f"{name} is unpriced: {reason}" for name, reason in left_out.items()]
    doubted = f"times are predicted from {rates.described}{doubt}"
    events = [event] if simulated_seconds else []
    return [*reasons(planned.evaluated), *planned.chosen.price.notes, *unpriced, *moved, *cut, looked, *events, doubted]
