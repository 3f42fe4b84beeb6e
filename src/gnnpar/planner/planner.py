"""The planner: every candidate priced by time and memory, the best allowed one chosen, and why.

Source: specs/tag.md 8.10. Grids and knobs are enumerated; cuts over different devices come from exact dynamic
programming (`search.ordered`). `search.named` moves through what uniform grids in the given order leave out. The
objective is seconds an epoch times the user's factor of its quality class; nothing beyond the allowed classes is
chosen, but it is priced, so that the table shows what they would give.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, cached_property
from typing import Any

import numpy as np

from gnnpar.planner.candidate import Candidate, Family, Quality, even_cuts
from gnnpar.planner.closed import DIRECTIONS, boundary_seconds, closed, in_engine, stage_seconds
from gnnpar.planner.memory import Memory, memory
from gnnpar.planner.prediction import Prediction
from gnnpar.planner.recompute import Recompute, decide
from gnnpar.planner.search.grid import candidates
from gnnpar.planner.search.ordered import Line, place_layers
from gnnpar.planner.search.places import Places
from gnnpar.pricing.ir import ModelIR
from gnnpar.pricing.machine import Machine
from gnnpar.pricing.price import Phases
from gnnpar.pricing.quantity import bytes_text, seconds_text
from gnnpar.pricing.rates import Rates
from gnnpar.pricing.statistics import GraphStats, PartStats
from gnnpar.pricing.work import Held, Work

USABLE = 0.92  # of a device's memory


@dataclass(frozen=True)
class Request:
    """What there is to plan. `partition`: parts -> statistics. `factors`: quality class -> epochs it costs, >= 1.

    `kept`: what layer 0 of `ir` keeps in every candidate. `held`: another model that keeps it, to choose from.
    For searches: may ranks be put on any device (`places`), may there be `fewer` of them, and what a partition with
    given shares of the nodes comes to (`uneven`; None: parts are equal)."""

    ir: ModelIR
    graph: GraphStats
    partition: Callable[[int], PartStats]
    setting: Machine
    ranks: int
    families: Collection[Family]
    allowed: frozenset[Quality] = frozenset({"exact"})
    factors: Mapping[Quality, float] = field(default_factory=dict)
    usable: float = USABLE
    kept: Held = "no"
    held: tuple[ModelIR, Held] | None = None
    places: bool = False
    fewer: bool = False
    uneven: Callable[[tuple[float, ...]], PartStats] | None = None

    def work(self, parts: PartStats, rates: tuple[Rates, ...], *, held: bool = False) -> Work:
        """Of the model on a partition, or of that which is `held`. rates: of rank after rank, one a part or more."""
        ir, kept = self.held if held and self.held is not None else (self.ir, self.kept)
        return Work(ir, self.graph, parts, rates[: parts.parts], kept)

    @cached_property
    def recompute(self) -> Recompute | None:
        """What the minimum cut would recompute; None where there is no halo, or layer 0 cannot be kept."""
        if self.held is None or self.ranks == 1:
            return None
        parts, rates = self.partition(self.ranks), self.setting.rates
        return decide(self.work(parts, rates), self.work(parts, rates, held=True), self.setting)

    @property
    def holds(self) -> bool:
        """Is it worth keeping layer 0?"""
        return self.recompute is not None and self.recompute.held != "no"


@dataclass(frozen=True)
class Priced(Prediction):
    """A candidate with what it is predicted to take; `refused`: why it cannot be chosen, empty where it can.

    `devices`: of each rank, () for the first ones as given. `shares`: of the nodes by part, () where all are equal."""

    candidate: Candidate
    phases: Phases
    memory: tuple[Memory, ...]
    objective: float
    refused: str = ""
    devices: tuple[int, ...] = ()
    shares: tuple[float, ...] = ()

    @property
    def label(self) -> str:
        return self.candidate.label + (", uneven parts" if self.shares else "")

    def at(self, setting: Machine) -> Machine:
        """Where its ranks run."""
        if not self.devices:
            return setting
        return Machine(setting.fabric.choose(self.devices), tuple(setting.rates[d] for d in self.devices))

    def as_predicted(self) -> dict[str, Any]:
        candidate = {**vars(self.candidate), "cuts": list(self.candidate.cuts)}
        return {**super().as_predicted(), "candidate": candidate}


def candidate_of(data: Mapping[str, Any]) -> Candidate:
    """From what plan.json says."""
    return Candidate(**{**data, "cuts": tuple(data["cuts"])})


def search(request: Request) -> tuple[Priced, ...]:
    """All uniform grids, those that can be chosen first, by objective. ValueError where none can."""
    priced = listed(request)
    if not priced or priced[0].refused:
        raise ValueError(nothing_fits(priced, request))
    return priced


def listed(request: Request) -> tuple[Priced, ...]:
    """The same, whether or not one can be chosen."""

    @cache
    def work(parts: int, *, held: bool = False) -> Work:
        return request.work(request.partition(parts), request.setting.rates, held=held)

    counts = rank_counts(request)
    given = [c for n in counts for c in candidates(request.ir, n, families=request.families, nodes=request.graph.nodes)]
    priced = [price(cut_for_devices(c, work(c.parts), request), work(c.parts), request) for c in given]
    if request.holds:
        flat = [p.candidate for p in priced if p.candidate.may_hold]
        priced += [price(replace(c, held=True), work(c.parts, held=True), request) for c in flat]
    return tuple(sorted(priced, key=lambda p: (bool(p.refused), p.objective, p.candidate.label)))


def rank_counts(request: Request) -> list[int]:
    """All ranks that are asked for; where fewer may do also those without some classes of devices, and halves."""
    count = request.ranks
    if not request.fewer:
        return [count]
    sizes = [len(c) for c in Places(request.setting.fabric, free=request.places).classes]
    sums = {sum(sizes[:i]) for i in range(1, len(sizes))} | {sum(sizes[i:]) for i in range(1, len(sizes))}
    halves = {count >> i for i in range(1, 4) if count >> i}
    return [count, *sorted((sums | halves | {1}) - {count}, reverse=True)[:10]]


def price(candidate: Candidate, work: Work, request: Request) -> Priced:
    """Time, memory, and whether it may be chosen."""
    phases = closed(candidate, work, request.setting)
    ranks = memory(candidate, work)
    factor = max([request.factors.get(q, 1.0) for q in candidate.quality], default=1.0)
    return Priced(candidate, phases, ranks, phases.seconds * factor, refused(candidate, ranks, request))


def refused(candidate: Candidate, ranks: tuple[Memory, ...], request: Request) -> str:
    """Why a candidate cannot be chosen; empty where it can."""
    if beyond := sorted(candidate.quality - request.allowed - {"exact"}):
        return f"{beyond[0]} is not allowed"
    return lacking(ranks, request)


def lacking(ranks: tuple[Memory, ...], request: Request) -> str:
    """The first rank whose device has too little memory; empty where all have enough."""
    for rank, (need, device) in enumerate(zip(ranks, request.setting.fabric.devices, strict=False)):
        if need.total > request.usable * device.memory_bytes:
            return f"rank {rank} needs {bytes_text(need.total)} of {bytes_text(device.memory_bytes)}"
    return ""


def nothing_fits(priced: Sequence[Priced], request: Request) -> str:
    """One line: what the nearest candidate lacks."""
    allowed = [p for p in priced if not p.refused.endswith("not allowed")]
    if not allowed:
        return f"no strategy of quality {', '.join(sorted(request.allowed))} runs on {request.ranks} ranks; allow more"
    nearest = min(allowed, key=lambda p: p.peak_bytes)
    beyond = [p for p in priced if p.refused.endswith("not allowed")]
    others = [
        p
        for p in beyond
        if all(
            m.total <= request.usable * d.memory_bytes
            for m, d in zip(p.memory, request.setting.fabric.devices, strict=False)
        )
    ]
    hint = f"; {others[0].candidate.label} would fit, but {others[0].refused}" if others else ""
    return f"no plan fits: the nearest, {nearest.candidate.label}: {nearest.refused}{hint}; use more ranks"


def cut_for_devices(candidate: Candidate, work: Work, request: Request) -> Candidate:
    """With the best cuts for the devices its stages run on."""
    if candidate.stages == 1:
        return candidate
    setting, layers = request.setting, request.ir.num_layers
    even = replace(candidate, cuts=even_cuts(layers, candidate.stages))
    _, cuts = place_layers(_line(even, work, setting), chunks=candidate.chunks)
    if cuts == even.cuts:
        return even
    return min((even, replace(candidate, cuts=cuts)), key=lambda c: closed(c, work, setting).seconds)


def _line(candidate: Candidate, work: Work, setting: Machine) -> Line:
    """What each layer takes on each stage, and each message between stages, forward and backward."""
    work, setting = in_engine(candidate, work, setting)
    ir, num_stages = work.ir, candidate.stages
    layers = np.zeros((num_stages, ir.num_layers))
    whole, alone = np.zeros((num_stages - 1, ir.num_layers)), np.zeros((num_stages - 1, ir.num_layers))
    for s in range(num_stages):
        seconds = {
            kind: sum(stage_seconds(candidate, work, setting, s, range(kind, kind + 1), d).seconds for d in DIRECTIONS)
            for kind, _ in ir.alike(range(ir.num_layers))
        }
        layers[s] = [seconds[kind] for kind in ir.twins]
    widths = {ir.cuts[layer - 1]: layer for layer in range(1, ir.num_layers)}
    for s in range(num_stages - 1):
        before = setting.at_stages(s, candidate.parts)
        trial = replace(candidate, stages=2)
        found = {w: boundary_seconds(replace(trial, cuts=(0, i)), work, before, 0) for w, i in widths.items()}
        for layer in range(1, ir.num_layers):
            whole[s, layer], alone[s, layer] = (2 * seconds for seconds in found[ir.cuts[layer - 1]])
    return Line(layers, whole, alone)


def reasons(priced: tuple[Priced, ...]) -> list[str]:
    """Why the first was chosen, in sentences: what it saves over the best of each other family, and by which phase."""
    best, lines, told = priced[0], [], set()
    for other in priced[1:]:
        family = other.candidate.family
        if family in told or family == best.candidate.family:
            continue
        told.add(family)
        if other.refused and other.objective >= best.objective:
            continue
        gap = other.objective - best.objective
        phase = _largest_difference(best.phases, other.phases, gap)
        if other.refused:
            lines.append(f"{other.label} would save {seconds_text(-gap)} ({phase}), but {other.refused}")
        elif gap < 0:
            lines.append(f"{other.label} is predicted to take {seconds_text(-gap)} less ({phase})")
        else:
            lines.append(f"{other.label} takes {seconds_text(gap)} longer ({phase})")
    return lines


def _largest_difference(best: Phases, other: Phases, gap: float) -> str:
    gaps = {name: vars(other)[name] - vars(best)[name] for name in vars(best)}
    name = max(gaps, key=lambda key: gaps[key] if gap >= 0 else -gaps[key])
    return f"{name} {seconds_text(vars(other)[name])} against {seconds_text(vars(best)[name])}"
