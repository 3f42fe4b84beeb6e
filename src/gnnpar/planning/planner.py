"""The planner: every candidate priced by time and memory, the best allowed one chosen, and why.

Source: specs/tag.md 8.10. Grids and knobs are enumerated; cuts of pipelines over different devices come from exact
dynamic programming. The objective is seconds an epoch times the user's factor of its quality class; nothing beyond the
allowed classes is chosen, but it is priced, so that the table shows what they would give.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

from gnnpar.planning.candidate import Candidate, Family, Quality
from gnnpar.planning.closed import Phases, Setting, boundary_seconds, closed, stage_seconds
from gnnpar.planning.ir import ModelIR
from gnnpar.planning.memory import Memory, memory
from gnnpar.planning.quantity import bytes_text, seconds_text
from gnnpar.planning.recompute import Recompute, decide
from gnnpar.planning.search.grid import candidates
from gnnpar.planning.search.stages import assign_stages
from gnnpar.planning.statistics import GraphStats, PartStats
from gnnpar.planning.work import Direction, Held, Work

USABLE = 0.92  # of a device's memory


@dataclass(frozen=True)
class Request:
    """What there is to plan. `partition`: parts -> statistics. `factors`: quality class -> epochs it costs, >= 1."""

    ir: ModelIR
    graph: GraphStats
    partition: Callable[[int], PartStats]
    setting: Setting
    ranks: int
    families: Collection[Family]
    allowed: frozenset[Quality] = frozenset({"exact"})
    factors: Mapping[Quality, float] = field(default_factory=dict)
    usable: float = USABLE
    held: tuple[ModelIR, Held] | None = None  # the model that keeps layer 0, and what it keeps


@dataclass(frozen=True)
class Priced:
    """A candidate with what it is predicted to take; `refused`: why it cannot be chosen, empty where it can."""

    candidate: Candidate
    phases: Phases
    memory: tuple[Memory, ...]
    objective: float
    refused: str = ""

    @property
    def peak_bytes(self) -> float:
        return max(m.total for m in self.memory)

    def as_predicted(self) -> dict[str, Any]:
        """What plan.json says of it."""
        return {
            "epoch_seconds": self.phases.seconds, "phases": dict(vars(self.phases)),
            "peak_bytes": [round(m.total) for m in self.memory], "label": self.candidate.label,
            "candidate": {**vars(self.candidate), "cuts": list(self.candidate.cuts)},
        }  # fmt: skip


def candidate_of(data: Mapping[str, Any]) -> Candidate:
    """From what plan.json says."""
    return Candidate(**{**data, "cuts": tuple(data["cuts"])})


def search(request: Request) -> tuple[Priced, ...]:
    """All candidates, those that can be chosen first, by objective. ValueError where none can."""
    works: dict[int, Work] = {}

    def work(parts: int) -> Work:
        if parts not in works:
            statistics = request.partition(parts)
            works[parts] = Work(request.ir, request.graph, statistics, request.setting.rates[:parts])
        return works[parts]

    given = candidates(request.ir, request.ranks, families=request.families, nodes=request.graph.nodes)
    priced = [price(_cut_for_devices(c, work(c.parts), request), work(c.parts), request) for c in given]
    if (found := recomputing(request)) is not None and found.held != "no":
        flat = [p.candidate for p in priced if p.candidate.family in ("graph_parallel", "adaqp")]
        keeping = held_work(request, work(request.ranks))
        priced += [price(replace(c, held=True), keeping, request) for c in flat]
    priced.sort(key=lambda p: (bool(p.refused), p.objective, p.candidate.label))
    if not priced or priced[0].refused:
        raise ValueError(nothing_fits(priced, request))
    return tuple(priced)


def held_work(request: Request, live: Work) -> Work:
    """The work of the model that keeps layer 0."""
    assert request.held is not None
    ir, held = request.held
    return replace(live, ir=ir, held=held)


def recomputing(request: Request) -> Recompute | None:
    """What the minimum cut would recompute; None where there is no halo, or the model cannot keep its first layer."""
    if request.held is None or request.ranks == 1:
        return None
    live = Work(request.ir, request.graph, request.partition(request.ranks), request.setting.rates[: request.ranks])
    return decide(live, held_work(request, live), request.setting)


def price(candidate: Candidate, work: Work, request: Request) -> Priced:
    """Time, memory, and whether it may be chosen."""
    phases = closed(candidate, work, request.setting)
    ranks = memory(candidate, work)
    factor = max([request.factors.get(q, 1.0) for q in candidate.quality], default=1.0)
    return Priced(candidate, phases, ranks, phases.seconds * factor, _refused(candidate, ranks, request))


def _refused(candidate: Candidate, ranks: tuple[Memory, ...], request: Request) -> str:
    if beyond := sorted(candidate.quality - request.allowed - {"exact"}):
        return f"{beyond[0]} is not allowed"
    for rank, (need, device) in enumerate(zip(ranks, request.setting.fabric.devices, strict=False)):
        if need.total > request.usable * device.memory_bytes:
            return f"rank {rank} needs {bytes_text(need.total)} of {bytes_text(device.memory_bytes)}"
    return ""


def nothing_fits(priced: list[Priced], request: Request) -> str:
    """One line: what the nearest candidate lacks."""
    allowed = [p for p in priced if not p.refused.endswith("not allowed")]
    if not allowed:
        return f"no strategy of quality {', '.join(sorted(request.allowed))} runs on {request.ranks} ranks; allow more"
    nearest = min(allowed, key=lambda p: p.peak_bytes)
    beyond = [p for p in priced if p.refused.endswith("not allowed")]
    others = [p for p in beyond if all(m.total <= request.usable * d.memory_bytes for m, d in
                                       zip(p.memory, request.setting.fabric.devices, strict=False))]  # fmt: skip
    hint = f"; {others[0].candidate.label} would fit, but {others[0].refused}" if others else ""
    return f"no plan fits: the nearest, {nearest.candidate.label}: {nearest.refused}{hint}; use more ranks"


def _cut_for_devices(candidate: Candidate, work: Work, request: Request) -> Candidate:
    """The cuts of a pipeline of one part a stage, exact for the devices it runs on; others keep the even cuts."""
    if candidate.stages == 1 or candidate.parts > 1:
        return candidate
    setting, layers = request.setting, request.ir.num_layers
    devices = setting.fabric.devices[: candidate.stages]
    alike = (
        len({d.kind for d in devices}) == 1
        and len({setting.fabric.rate(i, i + 1) for i in range(len(devices) - 1)}) == 1
    )
    sums = [_prefix_sums(candidate, work, setting, s) for s in range(1 if alike else candidate.stages)]

    @cache
    def way(layer: int, before: int, after: int) -> tuple[float, float]:
        trial = replace(candidate, stages=2, cuts=(0, layer))
        whole, alone = boundary_seconds(trial, work, _pair(setting, before, after), 0)
        return 2 * whole, 2 * alone

    def cut(layer: int, before: int, after: int) -> tuple[float, float]:
        if alike:
            return way(layer, 0, 1)
        return way(layer, before, after) if after == before + 1 else (math.inf, math.inf)  # stages follow the ranks

    def stage(first: int, end: int, s: int) -> float:
        return sums[s][end] - sums[s][first]

    counts = (candidate.stages,) if alike else (1,) * candidate.stages
    found = assign_stages(layers, counts, stage, cut, chunks=candidate.chunks, stages=candidate.stages)
    better = replace(candidate, cuts=found.cuts)
    return min((candidate, better), key=lambda c: closed(c, work, setting).seconds)


def _prefix_sums(candidate: Candidate, work: Work, setting: Setting, s: int) -> list[float]:
    """[i]: seconds of a chunk in layers 0 to i on stage s, forward and backward."""
    sums = [0.0]
    for i in range(work.ir.num_layers):
        ways: tuple[Direction, ...] = ("forward", "backward")
        sums.append(
            sums[-1] + sum(stage_seconds(candidate, work, setting, s, range(i, i + 1), d).seconds for d in ways)
        )
    return sums


def _pair(setting: Setting, a: int, b: int) -> Setting:
    return Setting(setting.fabric.choose((a, b)), (setting.rates[a], setting.rates[b]))


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
            lines.append(f"{other.candidate.label} would save {seconds_text(-gap)} ({phase}), but {other.refused}")
        elif gap < 0:
            lines.append(f"{other.candidate.label} is predicted to take {seconds_text(-gap)} less ({phase})")
        else:
            lines.append(f"{other.candidate.label} takes {seconds_text(gap)} longer ({phase})")
    return lines


def _largest_difference(best: Phases, other: Phases, gap: float) -> str:
    gaps = {name: vars(other)[name] - vars(best)[name] for name in vars(best)}
    name = max(gaps, key=lambda key: gaps[key] if gap >= 0 else -gaps[key])
    return f"{name} {seconds_text(vars(other)[name])} against {seconds_text(vars(best)[name])}"
