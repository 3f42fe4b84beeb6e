"""From settings to a chosen plan: the planner's request, its answer as a Plan that `train` runs, and the table."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import replace

import torch

from gnnpar.data.tasks import make_task
from gnnpar.files import JsonObject
from gnnpar.parallel.needs import refuse_edges_of_model
from gnnpar.parallel.strategy import Workload
from gnnpar.placement import Plan, Quality
from gnnpar.planner.machines import setting_of
from gnnpar.planner.planner import Evaluated, Planned, Request, price_grids, reasons, recorded
from gnnpar.planner.recompute import how_held
from gnnpar.planner.search.named import BUDGET, DEFAULT, run
from gnnpar.pricing.ir import ModelIR
from gnnpar.pricing.machine import Machine
from gnnpar.pricing.quantity import bytes_text, seconds_text
from gnnpar.pricing.simulate import EpochTimeline, simulated
from gnnpar.pricing.topology import Machines
from gnnpar.pricing.work import Held
from gnnpar.settings import PLAN_SETUP, Settings
from gnnpar.training import plans

Say = Callable[[str], None]


def workload_of(settings: Settings, say: Say = lambda _: None) -> Workload:
    """Return graph and model of the settings without their strategy. ValueError if strategies have no prices."""
    if settings.task.decoder is not None:
        raise ValueError(
            f"task={settings.names.get('task')} sends rows of pairs, which the planner does not price; choose a "
            "strategy yourself"
        )
    dataset = settings.load_dataset()
    refuse_edges_of_model(settings.model, dataset.edges.kinds, dataset.in_weight, dataset.name, settings.names)
    task = make_task(dataset.task, dataset.num_classes)
    model = settings.build_model(dataset.num_features, task.out_dim, dataset.edge_sizes)
    return replace(plans.workload_of(settings, dataset, model, torch.device("cpu")), say=say, layer_seconds=None)


def planned(
    settings: Settings,
    *,
    ranks: int | None,
    allowed: frozenset[Quality],
    factors: Mapping[Quality, float] = {},
    search: str = DEFAULT,
    budget: int = BUDGET,
    fewer: bool = False,
    say: Say = lambda _: None,
    recompute: bool = False,
    measuring: bool = True,
) -> Planned:
    """Search for a plan for these settings. ValueError if there is none.

    budget: evaluations. fewer: devices may stay unused. recompute: first_layer is a choice of the planner. measuring:
    measure this machine if it is not cached.
    """
    machine, count = setting_of(settings, ranks, say, measuring=measuring)
    workload, own_places = workload_of(settings, say), isinstance(settings.topology, Machines)
    request = replace(
        Request.of(workload, machine, count, seed=settings.seed, places=own_places),
        allowed=allowed,
        factors=factors,
        fewer=fewer,
        held=_keeping(settings, workload) if recompute and not settings.caches_first_layer else None,
    )
    return run(request, search, budget=budget, seed=settings.seed)


def with_one_device(
    planned: Planned, settings: Settings, say: Callable[[str], None] = lambda _: None, *, measuring: bool = True
) -> Planned:
    """Add strategies of one rank for comparison, never chosen: the whole graph on the topology's first device, or on
    this machine with the threads of a run of one rank."""
    if any(e.candidate.ranks == 1 for e in planned.evaluated):
        return planned
    request, there = planned.request, planned.request.machine
    machine = Machine(there.fabric.first(1), there.rates[:1])
    if not isinstance(settings.topology, Machines):
        here = setting_of(settings, 1, say if measuring else lambda _: None, measuring=measuring)[0]
        same = here.rates[0].source == machine.rates[0].source  # nominal and measured rates cannot be compared
        machine = here if same else machine
    one = {name: each for name, each in request.registry.strategies.items() if each.capabilities.max_ranks == 1}
    alone = price_grids(replace(request, machine=machine, ranks=1, registry=replace(request.registry, strategies=one)))
    unused = f"it uses 1 of {request.ranks} ranks: gnnpar train strategy="
    more = [e if e.refused else replace(e, refused=unused + e.candidate.family) for e in alone]
    allowed = [e for e in planned.evaluated if not e.refused]
    others = sorted([*(e for e in planned.evaluated if e.refused), *more], key=lambda e: (e.objective, e.label))
    return replace(planned, evaluated=(*allowed, *others))


def _keeping(settings: Settings, workload: Workload) -> tuple[ModelIR, Held] | None:
    """Return the model with first_layer=cached and its cached rows; None if learned features precede layer 0."""
    dataset, model = workload.dataset, workload.model
    if dataset.learned or model is None:
        return None
    try:
        config = settings.model.on(dataset.edge_sizes)
        twin = config.build(dataset.num_features, model.out_dim, seed=settings.seed, cached_first_layer=True)
    except ValueError:
        return None
    ir = recorded(twin, dataset)
    return ir, how_held(twin, ir)


def plan_of(planned: Planned, yaml_of: Callable[[str], JsonObject], settings: Settings) -> Plan:
    """Return the plan of the chosen candidate, with devices and prediction. yaml_of: strategy -> resolved YAML."""
    chosen, request = planned.chosen, planned.request
    candidate, fabric = chosen.candidate, chosen.at(request.machine).fabric
    plan = planned.plan(fabric.topology(candidate.ranks), yaml_of(candidate.family))
    alternatives = [
        {"label": e.label, "epoch_seconds": e.price.seconds, "refused": e.refused} for e in planned.evaluated[1:6]
    ]
    return replace(
        plan,
        hashes=plan.hashes | {"model": hashlib.sha256(repr(request.ir).encode()).hexdigest()},
        predicted={**(plan.predicted or {}), "alternatives": alternatives, "search": planned.searched},
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
    """Return a row per candidate: the best ones, and at least one per family. measured: label -> seconds per epoch."""
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


def timeline(planned: Planned) -> EpochTimeline:
    """Simulate an epoch of the chosen candidate."""
    chosen, request = planned.chosen, planned.request
    machine = chosen.at(request.machine)
    parts = request.partition(chosen.candidate.parts)
    if chosen.shares:
        assert request.uneven is not None, "shares are searched only where they can be made"
        parts = request.uneven(chosen.shares)
    work = request.work(parts, machine.rates, held=chosen.candidate.held)
    return simulated(chosen.candidate, work, machine)


def _places(planned: Planned) -> str:
    names = [
        d.name for d in planned.chosen.at(planned.request.machine).fabric.devices[: planned.chosen.candidate.ranks]
    ]
    return ", ".join(names[:12]) + (f" and {len(names) - 12} more" if len(names) > 12 else "")


def why(planned: Planned, simulated_seconds: float) -> list[str]:
    """Return the sentences below the table."""
    rates = planned.request.machine.rates[0]
    recompute = planned.request.recompute
    event = f"event by event the chosen plan takes {seconds_text(simulated_seconds)}"
    spent = seconds_text(planned.cpu_seconds)
    looked = f"search={planned.search} priced {planned.evaluations} candidates in {spent} of CPU"
    devices = planned.chosen.devices
    moved = [] if devices == tuple(range(len(devices))) else [f"ranks run on {_places(planned)}, in this order"]
    cut = [] if recompute is None else [recompute.describe(chosen=planned.chosen.candidate.held)]
    left_out = planned.request.registry.unpriced(planned.request.allowed)
    unpriced = [f"{name} is unpriced: {reason}" for name, reason in left_out.items()]
    doubted = f"times are predicted from {rates.described}{rates.doubt}"
    events = [event] if simulated_seconds else []
    return [*reasons(planned.evaluated), *planned.chosen.price.notes, *unpriced, *moved, *cut, looked, *events, doubted]
