"""The planner's product space: what every name may be for a request, and which candidate a point is.

A point is a grid (family, stages, parts), its knobs, the sizes of its parts and the devices of its ranks. Cuts, and
whether layer 0 is held, are no names: the best ones follow (`ordered`, `recompute`). Names that a family does not have
are set to their default, so that each candidate is one point. Only allowed classes of quality are in the space.
Source: specs/tag.md 8.3, 8.10 D.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from gnnpar.planner.candidate import Candidate, Family
from gnnpar.planner.planner import Priced, Request, cut_for_devices, price, rank_counts
from gnnpar.planner.search.places import Places, laid_out
from gnnpar.planner.search.space import Point, Space
from gnnpar.pricing.machine import Machine
from gnnpar.pricing.rates import Rates
from gnnpar.pricing.statistics import PartStats
from gnnpar.pricing.work import Work

Grid = tuple[Family, int, int]
_THETA = {"even": 0.0, "speed": 1.0, "half": 0.5}
FACTORS = (0, 1, 2, 4, 8)  # chunks of a part over stages; 0: one chunk
KNOBS: Mapping[str, frozenset[str]] = {
    "chunks": frozenset({"gnnpipe", "hybrid"}),
    "bits": frozenset({"graph_parallel"}),
    "overlap": frozenset({"graph_parallel"}),
    "prefetch": frozenset({"sar"}),
    "backward": frozenset({"sar"}),
    "remat": frozenset({"sar"}),
    "layout": frozenset({"hybrid"}),
}


@dataclass(eq=False)
class Points:
    """`space` and `priced` of a request. Everything that is made on the way is kept."""

    request: Request
    made: dict[tuple, PartStats] = field(default_factory=dict)
    kept: dict[Point, Priced] = field(default_factory=dict)
    per_unit: dict[int, float] = field(default_factory=dict)

    @cached_property
    def places(self) -> Places:
        return Places(self.request.setting.fabric, free=self.request.places)

    @cached_property
    def space(self) -> Space:
        request = self.request
        folds = [f for g in request.ir.groups for f in g.folds]
        sar = "sar" in request.families
        choices: dict[str, list[Any]] = {"grid": self._grids(), "chunks": [0], "bits": [32]}
        if "stale" in request.allowed:
            choices["chunks"] = list(FACTORS)
        if "rounded" in request.allowed:
            choices["bits"].append(16)
        if "quantized" in request.allowed and "adaqp" in request.families:
            choices["bits"] += [8, 4, 2]
        choices["overlap"] = ["edges", "none"]
        choices["prefetch"] = [1, 0, 2] if sar else [1]
        choices["backward"] = ["push", "pull"] if sar and any(f.pushed for f in folds) else ["push"]
        choices["remat"] = [True, False] if sar and any(f.needs_src for f in folds) else [True]
        different = any(r != request.setting.rates[0] for r in request.setting.rates)
        choices["shares"] = list(_THETA) if request.uneven is not None and different else ["even"]
        choices["layout"] = ["stages", "parts"] if request.places else ["stages"]
        for i in range(self.places.decisions):
            choices[f"next.{i}"] = list(self.places.kinds)
        return Space(choices)

    def _grids(self) -> list[Grid]:
        request, found = self.request, []
        for ranks in rank_counts(request):
            if ranks == 1:
                found.append(("single", 1, 1))
                continue
            found += [(f, 1, ranks) for f in ("graph_parallel", "sar") if f in request.families]
            for stages in (s for s in range(2, ranks + 1) if ranks % s == 0 and s <= request.ir.num_layers):
                family = "gnnpipe" if stages == ranks else "hybrid"
                if family in request.families:
                    found.append((family, stages, ranks // stages))
        if not found:
            raise ValueError(f"no strategy of {', '.join(request.families)} runs on {request.ranks} ranks; allow more")
        return found

    def canonical(self, point: Point) -> Point:
        """The first of all points that are the same candidate in the same place."""
        chosen = self.space.at(point)
        family, stages, parts = chosen["grid"]
        names = list(self.space.choices)
        fixed = [0 if name in KNOBS and family not in KNOBS[name] else i for name, i in zip(names, point, strict=True)]
        if parts == 1:
            fixed[names.index("shares")] = 0
        if self._too_small(chosen["chunks"] * stages, parts):
            fixed[names.index("chunks")] = 0
        if self.places.decisions:
            at = names.index("next.0")
            if family == "graph_parallel" and parts == self.request.setting.fabric.size:
                fixed[at:] = [0] * self.places.decisions  # every pair of devices exchanges: the order is of no matter
            else:
                kinds = self.places.settled([chosen[f"next.{i}"] for i in range(self.places.decisions)], stages * parts)
                fixed[at:] = [self.places.kinds.index(kind) for kind in kinds]
        return tuple(fixed)

    def _too_small(self, chunks: int, parts: int) -> bool:
        return chunks * parts * 8 > self.request.graph.nodes

    def candidate(self, point: Point) -> tuple[Candidate, tuple[int, ...], str]:
        """(without its cuts, device of each rank, how nodes are shared)."""
        chosen = self.space.at(self.canonical(point))
        family, stages, parts = chosen["grid"]
        if family == "graph_parallel" and chosen["bits"] < 16:
            family = "adaqp"
        order = self.places.order([chosen[f"next.{i}"] for i in range(self.places.decisions)])
        devices = laid_out(order, stages, parts, chosen["layout"])
        fields = {name: chosen[name] for name in ("bits", "overlap", "prefetch", "backward", "remat")}
        made = Candidate(
            family=family,
            stages=stages,
            parts=parts,
            chunks=max(1, chosen["chunks"] * stages),
            cuts=tuple(range(stages)),
            **fields,
        )
        return made, devices, chosen["shares"]

    def priced(self, point: Point) -> Priced:
        """Time and memory of a point, with the best cuts there are, layer 0 held or not."""
        point = self.canonical(point)
        if point not in self.kept:
            candidate, devices, kind = self.candidate(point)
            setting = self.setting(devices)
            shares = self.shares(candidate, setting, kind)
            here = replace(self.request, setting=setting)
            statistics = self.statistics(candidate.parts, shares)
            work = self.request.work(statistics, setting.rates)
            found = price(cut_for_devices(candidate, work, here), work, here)
            if self.request.holds and candidate.may_hold:
                held = self.request.work(statistics, setting.rates, held=True)
                kept = price(replace(candidate, held=True), held, here)
                found = min(found, kept, key=lambda p: (bool(p.refused), p.objective))
            self.kept[point] = replace(found, devices=devices, shares=shares)
        return self.kept[point]

    def objective(self, chosen: Mapping[str, Any]) -> float:
        """Seconds to be made small; infinite where it cannot be chosen."""
        found = self.priced(tuple(values.index(chosen[name]) for name, values in self.space.choices.items()))
        return math.inf if found.refused else found.objective

    def setting(self, devices: tuple[int, ...]) -> Machine:
        whole = self.request.setting
        return Machine(whole.fabric.choose(devices), tuple(whole.rates[d] for d in devices))

    def statistics(self, parts: int, shares: tuple[float, ...]) -> PartStats:
        """Uneven parts are estimated from even ones."""
        key = (parts, shares)
        if key not in self.made:
            even = self.request.partition(parts)
            self.made[key] = even.reshaped(shares) if shares else even
        return self.made[key]

    def shares(self, candidate: Candidate, setting: Machine, kind: str) -> tuple[float, ...]:
        """Of each part: a power of the speed of the slowest device that holds it; () where all are equal."""
        if kind == "even" or candidate.parts == 1:
            return ()
        speeds = []
        for p in range(candidate.parts):
            mine = [setting.rates[s * candidate.parts + p] for s in range(candidate.stages)]
            speeds.append(1 / max(self.seconds_alone(r) for r in mine))
        weights = [speed ** _THETA[kind] for speed in speeds]
        shares = tuple(round(w / sum(weights), 6) for w in weights)
        return () if len(set(shares)) == 1 else shares

    def seconds_alone(self, rates: Rates) -> float:
        """Computing of the whole graph on one device."""
        key = id(rates)
        if key not in self.per_unit:
            graph = self.request.graph
            whole = Work(
                self.request.ir, graph, PartStats.even(graph.nodes, graph.edges, 1, alpha=0.0, cut_share=0.0), (rates,)
            )
            layers = self.request.ir.alike(range(self.request.ir.num_layers))
            ways: Any = ("forward", "backward")
            self.per_unit[key] = sum(n * whole.piece(i, 0, d).compute for i, n in layers for d in ways)
        return self.per_unit[key]
