"""The planner's product space: the choices of every name for a request, and the candidate of a point.

A point is a grid (a candidate with default knobs), the knobs of all candidates, sizes of parts and devices of ranks. It
excludes cuts and the cache of layer 0, since pricing a point chooses the best ones. Knobs that a candidate lacks take
their default, so each candidate is one point. Only allowed quality classes are included.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from functools import cached_property

from gnnpar.planner.planner import Evaluated, Request, evaluate, rank_counts
from gnnpar.planner.search.places import Places, device_of_rank
from gnnpar.planner.search.tree import Point, Space
from gnnpar.pricing.candidate import Candidate, Values
from gnnpar.pricing.machine import Machine
from gnnpar.pricing.rates import Rates
from gnnpar.pricing.statistics import PartStats
from gnnpar.pricing.work import DIRECTIONS, Work
from gnnpar.track.text import counted

POWERS = {"even": 0.0, "speed": 1.0, "half": 0.5}
"""Exponents: the share of a part is proportional to this power of its devices' speed."""


@dataclass(eq=False)
class Points:
    """The `space` and evaluations of a request, with all partial results cached."""

    request: Request
    made: dict[tuple, PartStats] = field(default_factory=dict)
    evaluations: dict[Point, Evaluated] = field(default_factory=dict)
    per_unit: dict[tuple[int, range], float] = field(default_factory=dict)

    @cached_property
    def places(self) -> Places:
        return Places(self.request.machine.fabric, free=self.request.places)

    @cached_property
    def space(self) -> Space:
        request, grids = self.request, self._grids()
        choices: dict[str, list[object]] = {"grid": [*grids]}
        for grid in sorted(grids, key=lambda g: -g.stages):
            for name, values in grid.knobs(request.ir).items():
                known = choices.setdefault(name, [values[0]])
                known += [v for v in values[1:] if v not in known and self._allowed(grid, name, v)]
        different = any(r != request.machine.rates[0] for r in request.machine.rates)
        choices["shares"] = list(POWERS) if request.uneven is not None and different else ["even"]
        choices["layout"] = ["stages", "parts"] if request.places else ["stages"]
        for i in range(self.places.decisions):
            choices[f"next.{i}"] = list(self.places.kinds)
        return Space(choices)

    def _allowed(self, grid: Candidate, name: str, value: object) -> bool:
        return grid.with_knobs({name: value}).quality <= self.request.allowed | {"exact"}

    def _grids(self) -> list[Candidate]:
        """Return all candidates with default knobs; for equal numbers of ranks, few stages first."""
        request, candidates = self.request, {}
        for ranks in rank_counts(request):
            of_ranks = dict.fromkeys(self.grid_of(c) for c in request.candidates(ranks))
            candidates |= dict.fromkeys(sorted(of_ranks, key=lambda c: c.stages))
        if not candidates:
            names = ", ".join(request.registry.strategies)
            raise ValueError(f"no strategy of {names} runs on {counted(request.ranks, 'rank')}; allow more")
        return [c for c in candidates if c.quality <= request.allowed | {"exact"}]

    def grid_of(self, candidate: Candidate) -> Candidate:
        knobs = candidate.knobs(self.request.ir)
        return replace(candidate.with_knobs({name: values[0] for name, values in knobs.items()}), held=False)

    def canonical(self, point: Point) -> Point:
        """Return the first of all points with the same candidate and placement."""
        chosen = self.space.at(point)
        grid: Candidate = chosen["grid"]
        names = list(self.space.choices)
        index = dict(zip(names, point, strict=True))
        knobs = grid.knobs(self.request.ir)
        turned = grid.with_knobs({name: chosen[name] for name in knobs})
        knobs_fit = not knobs or turned.makes_sense(self.request.graph.nodes)
        for name in names[1 : names.index("shares")]:
            if name not in knobs or not knobs_fit:
                index[name] = 0
        if grid.parts == 1:
            index["shares"] = 0
        if grid.parts == 1 or grid.stages == 1:
            index["layout"] = 0
        if self.places.decisions:
            if not grid.ordered and grid.parts == self.request.machine.fabric.size:
                index |= {f"next.{i}": 0 for i in range(self.places.decisions)}
            else:
                kinds = self.places.used_kinds([chosen[f"next.{i}"] for i in range(self.places.decisions)], grid.ranks)
                index |= {f"next.{i}": self.places.kinds.index(kind) for i, kind in enumerate(kinds)}
        return tuple(index.values())

    def candidate(self, point: Point) -> tuple[Candidate, tuple[int, ...], str]:
        """Return the candidate without cuts, the device of each rank, and the kind of shares."""
        chosen = self.space.at(self.canonical(point))
        grid: Candidate = chosen["grid"]
        candidate = grid.with_knobs({name: chosen[name] for name in grid.knobs(self.request.ir)})
        order = self.places.order([chosen[f"next.{i}"] for i in range(self.places.decisions)])
        devices = device_of_rank(order, candidate.stages, candidate.parts, chosen["layout"])
        return candidate, devices, chosen["shares"]

    def evaluated(self, point: Point) -> Evaluated:
        """Price a point by time and memory, with the best cuts and the better choice of caching layer 0."""
        point = self.canonical(point)
        if point not in self.evaluations:
            candidate, devices, kind = self.candidate(point)
            machine = self.request.machine.choose(devices)
            shares = self.shares(candidate, machine, kind)
            here = replace(self.request, machine=machine)
            statistics = self.statistics(candidate.parts, shares)
            work = self.request.work(statistics, machine.rates)
            evaluation = evaluate(candidate.placed(work, machine), work, here)
            if self.request.holds and candidate.may_hold:
                held = self.request.work(statistics, machine.rates, held=True)
                keeping = evaluate(replace(candidate, held=True), held, here)
                evaluation = min(evaluation, keeping, key=lambda e: (bool(e.refused), e.objective))
            self.evaluations[point] = replace(evaluation, devices=devices, shares=shares)
        return self.evaluations[point]

    def objective(self, chosen: Values) -> float:
        """Return the objective in seconds; infinite if the point is not eligible."""
        evaluation = self.evaluated(tuple(values.index(chosen[name]) for name, values in self.space.choices.items()))
        return math.inf if evaluation.refused else evaluation.objective

    def statistics(self, parts: int, shares: tuple[float, ...]) -> PartStats:
        """Return statistics of parts. Uneven parts are estimated from even ones."""
        key = (parts, shares)
        if key not in self.made:
            even = self.request.partition(parts)
            self.made[key] = even.reshaped(shares) if shares else even
        return self.made[key]

    def shares(self, candidate: Candidate, machine: Machine, kind: str) -> tuple[float, ...]:
        """Return each part's share: a power of the speed of its slowest device; () for equal shares."""
        if kind == "even" or candidate.parts == 1:
            return ()
        speeds = []
        for p in range(candidate.parts):
            mine = [machine.rates[s * candidate.parts + p] for s in range(candidate.stages)]
            speeds.append(1 / max(self.seconds_alone(r) for r in mine))
        weights = [speed ** POWERS[kind] for speed in speeds]
        shares = tuple(round(w / sum(weights), 6) for w in weights)
        return () if len(set(shares)) == 1 else shares

    def seconds_alone(self, rates: Rates, layers: range | None = None) -> float:
        """Return compute seconds of layers, by default all, of the whole graph on one device."""
        graph, ir = self.request.graph, self.request.ir
        key = id(rates), layers or range(ir.num_layers)
        if key not in self.per_unit:
            parts = PartStats.even(graph.nodes, graph.edges, 1, alpha=0.0, cut_share=0.0)
            whole = Work(ir, graph, parts, (rates,))
            kinds = ir.layer_kinds(key[1])
            self.per_unit[key] = sum(n * whole.piece(i, 0, d).compute for i, n in kinds for d in DIRECTIONS)
        return self.per_unit[key]
