"""From settings to a chosen plan: the planner's request, its answer as a Plan that `train` runs, and the table."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

from gnnpar.data.dataset import Dataset
from gnnpar.data.tasks import make_task
from gnnpar.models.gnn import GNN
from gnnpar.parallel.strategy import Workload
from gnnpar.partition.shares import Shares
from gnnpar.placement import Plan
from gnnpar.planner.candidate import Quality, layers_of
from gnnpar.planner.extract import record
from gnnpar.planner.lower import simulated
from gnnpar.planner.machines import setting_of
from gnnpar.planner.planner import Priced, Request, reasons
from gnnpar.planner.recompute import how_held
from gnnpar.planner.search.named import BUDGET, DEFAULT, Found, Name, run
from gnnpar.planner.simulate import Timeline
from gnnpar.planner.strategy import families
from gnnpar.pricing.ir import ModelIR
from gnnpar.pricing.machine import Machine
from gnnpar.pricing.quantity import bytes_text, seconds_text
from gnnpar.pricing.statistics import GraphStats, PartStats
from gnnpar.pricing.topology import Machines
from gnnpar.pricing.work import Held
from gnnpar.settings import Settings, instantiate
from gnnpar.training.plans import partition_cache


@dataclass(frozen=True, kw_only=True)
class Searching:
    """How `gnnpar plan` looks for a plan. `budget`: evaluations. `fewer`: may devices stay unused?"""

    search: Name = DEFAULT
    budget: int = BUDGET
    fewer: bool = False


@dataclass(frozen=True, eq=False)
class Planned:
    """A planner's answer. `chosen` is priced[0]."""

    priced: tuple[Priced, ...]
    setting: Machine
    workload: Workload
    request: Request
    dataset: Dataset
    model_hash: str
    found: Found

    @property
    def chosen(self) -> Priced:
        return self.priced[0]


@dataclass(frozen=True, eq=False)
class Inputs:
    """What settings say to the planner, wherever it runs: the graph and the model, without a strategy."""

    workload: Workload
    model: GNN
    ir: ModelIR

    @staticmethod
    def of(settings: Settings, say: Callable[[str], None] = lambda _: None) -> Inputs:
        dataset = settings.dataset.load(settings.data_dir, settings.seed)
        task = make_task(dataset.task, dataset.num_classes)
        cached = settings.first_layer == "cached"
        model = settings.model.build(dataset.num_features, task.out_dim, seed=settings.seed, cached_first_layer=cached)
        ir = record(model, dataset.num_features)
        workload = Workload(
            dataset=dataset,
            partition=settings.partition,
            num_layers=ir.num_layers,
            cache=partition_cache(settings),
            say=say,
        )
        return Inputs(workload, model, ir)

    def request(self, setting: Machine, ranks: int, settings: Settings) -> Request:
        """Of so many ranks, lossless strategies alone."""
        graph, first_layer = GraphStats.of(self.workload.dataset), settings.first_layer
        kept = what_is_held(settings, self.ir) if first_layer == "cached" else "no"
        return Request(self.ir, graph, _even(self.workload), setting, ranks, families(first_layer), kept=kept)


def planned(
    settings: Settings,
    *,
    ranks: int | None,
    allowed: frozenset[Quality],
    factors: Mapping[Quality, float] = {},
    how: Searching = Searching(),
    say: Callable[[str], None] = lambda _: None,
    recompute: bool = False,
) -> Planned:
    """Search for these settings. ValueError says what cannot be, in one line.

    `recompute`: first_layer is the planner's choice, too.
    """
    setting, count = setting_of(settings, ranks, say)
    inputs = Inputs.of(settings, say)
    workload, cached = inputs.workload, settings.first_layer == "cached"
    own_places = isinstance(settings.topology, Machines)
    request = replace(
        inputs.request(setting, count, settings),
        allowed=allowed,
        factors=factors,
        places=own_places,
        fewer=how.fewer,
        uneven=_uneven(workload) if own_places and Shares.supported(workload.partition) else None,
        held=_keeping(settings, inputs) if recompute and not cached else None,
    )
    ir, dataset = inputs.ir, workload.dataset
    model_hash = hashlib.sha256(repr(ir).encode()).hexdigest()
    found = run(request, how.search, budget=how.budget, seed=settings.seed)
    return Planned(found.priced, setting, workload, request, dataset, model_hash, found)


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
    try:
        width, out_dim = inputs.workload.dataset.num_features, inputs.model.out_dim
        model = settings.model.build(width, out_dim, seed=settings.seed, cached_first_layer=True)
    except ValueError:
        return None
    ir = record(model, width)
    return ir, what_is_held(settings, ir)


def what_is_held(settings: Settings, ir: ModelIR) -> Held:
    """Of layer 0, where it is kept."""
    return how_held(ir, random=settings.model.input_dropout > 0)


_SETUP = ("model", "dataset", "partition", "first_layer", "seed")


def plan_of(found: Planned, yaml_of: Callable[[str], Mapping[str, Any]], settings: Settings) -> Plan:
    """The plan of the chosen candidate: its strategy's own, with cuts, devices, prediction and what it is for.

    yaml_of: name of a strategy -> its resolved YAML.
    """
    priced = found.chosen
    candidate = priced.candidate
    resolved = dict(yaml_of(candidate.family)) | candidate.fields
    strategy = instantiate(resolved, "strategy")
    fabric = priced.at(found.setting).fabric
    plan: Plan = strategy.plan(_sharing(found.workload, priced.shares), fabric.topology(candidate.ranks))
    placement = plan.placement
    if candidate.stages > 1:
        placement = replace(placement, layers_of=layers_of(candidate.cuts, found.request.ir.num_layers))
    alternatives = [
        {"label": p.label, "epoch_seconds": p.phases.seconds, "refused": p.refused} for p in found.priced[1:6]
    ]
    return replace(
        plan,
        placement=placement,
        strategy={"name": candidate.family, **resolved},
        hashes=plan.hashes | {"model": found.model_hash},
        predicted=priced.as_predicted() | {"alternatives": alternatives, "search": found.found.as_predicted()},
        quality=tuple(sorted(found.request.allowed)),
        devices=tuple(d.name for d in fabric.devices[: candidate.ranks]),
        setup={
            "names": {group: settings.names[group] for group in _SETUP if group in settings.names},
            **{key: settings.resolved[key] for key in _SETUP},
            **({"first_layer": "cached"} if candidate.held else {}),
        },
    )


COLUMNS = ("strategy", "epoch", "compute", "encode", "wire", "bubble", "reduce", "peak memory", "")


def table_rows(priced: tuple[Priced, ...], limit: int, measured: Mapping[str, float] = {}) -> list[tuple[str, ...]]:
    """A row a candidate: the best of all, and of every family at least one. `measured`: label -> seconds an epoch."""
    shown: list[Priced] = []
    seen: set[str] = set()
    for i, p in enumerate(priced):
        if i < limit or p.candidate.family not in seen or p.candidate.label in measured:
            shown.append(p)
        seen.add(p.candidate.family)
    return [_row(p, i == 0, measured) for i, p in enumerate(shown)]


def _row(p: Priced, first: bool, measured: Mapping[str, float]) -> tuple[str, ...]:
    phases = tuple(seconds_text(v) if v else "-" for v in vars(p.phases).values())
    note = "chosen" if first else p.refused
    if p.candidate.label in measured:
        note = f"measured {seconds_text(measured[p.candidate.label])}" + (", chosen" if first else "")
    return (p.label, seconds_text(p.phases.seconds), *phases, bytes_text(p.peak_bytes), note)


def timeline(found: Planned) -> Timeline:
    """An epoch of the chosen candidate in the event simulator."""
    candidate = found.chosen.candidate
    shares, setting = found.chosen.shares, found.chosen.at(found.setting)
    parts = _uneven(found.workload)(shares) if shares else found.request.partition(candidate.parts)
    work = found.request.work(parts, setting.rates, held=candidate.held)
    return simulated(candidate, work, setting)


def _places(found: Planned) -> str:
    names = [d.name for d in found.chosen.at(found.setting).fabric.devices[: found.chosen.candidate.ranks]]
    return ", ".join(names[:12]) + (f" and {len(names) - 12} more" if len(names) > 12 else "")


def why(found: Planned, simulated_seconds: float) -> list[str]:
    """The sentences below the table."""
    rates = found.setting.rates[0]
    worst = max(rates.residuals.values(), default=None)
    doubt = f"; the fit of kernels is off by {worst:.0%} at worst (median of a kind)" if worst is not None else ""
    told = found.request.recompute
    event = f"event by event the chosen plan takes {seconds_text(simulated_seconds)}"
    how = found.found
    looked = f"search={how.search} priced {how.evaluations} candidates in {seconds_text(how.cpu_seconds)} of CPU"
    devices = found.chosen.devices
    moved = [] if devices == tuple(range(len(devices))) else [f"ranks run on {_places(found)}, in this order"]
    cut = [told.describe(chosen=found.chosen.candidate.held)] if told is not None else []
    doubted = f"times are predicted from {rates.source} rates{doubt}"
    return [*reasons(found.priced), *moved, *cut, looked, event, doubted]
