"""How good a plan each search finds, by evaluations and by CPU seconds, on models, graphs and topologies held out of
the guide's training.

An instance's points are priced once for all searches; a search that asks for a point again is charged the CPU seconds
that pricing it took. Prices are predictions: nothing of a training run is measured.
"""

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import records
from planner_search.instances import device_of, draw, machine_of, model_of
from planner_search.searches import BASELINES, descend_again, start_of
from records import Files

from gnnpar.planner.guide.network import load
from gnnpar.planner.search import named
from gnnpar.planner.search.points import Points
from gnnpar.planner.search.tree import Evaluator
from gnnpar.pricing.topology import Machines

INSTANCES, SEEDS, BUDGET, MOST = 10, 10, 120, 16
EVALUATIONS = (1, 3, 5, 10, 20, 30, 40, 60, 80, 100, 120)  # where curves are read off
SECONDS = (0.03, 0.05, 0.1, 0.2, 0.3, 0.5, 1.0, 2.0)
NAMES = ("tag", "mcts", "guided", "descent", "anneal", "random", "refine")


class Charged:
    """Prices of an instance's points for one search after the other. curve: best seconds after each evaluation of the
    current one. clock: CPU seconds by then; a known point is charged what pricing it took."""

    def __init__(self, points: Points) -> None:
        self.points, self.known = points, dict[tuple, tuple[float, float]]()
        self.begin()

    def begin(self) -> None:
        self.credit, self.curve, self.clock = 0.0, list[float](), list[float]()

    def __call__(self, chosen: Mapping[str, Any]) -> float:
        key, began = tuple(chosen.items()), time.process_time()
        if key in self.known:
            self.credit += self.known[key][1]
        else:
            value = self.points.objective(chosen)
            self.known[key] = value, time.process_time() - began
        self.curve.append(min([self.known[key][0], *self.curve[-1:]]))
        self.clock.append(time.process_time() + self.credit)
        return self.known[key][0]


def one(price: Charged, name: str, seed: int, budget: int) -> dict[str, Any]:
    """Return a run of a search: its best after so many evaluations and so many CPU seconds."""
    began, points = time.process_time(), price.points
    price.begin()
    evaluate = Evaluator(points.space, price, budget, points.canonical)
    if name in ("enumerate", "refine"):  # the enumeration of refine is a part of its curve
        listed = named.run(points.request, "enumerate").evaluated
        price.curve += [math.inf] * (len(listed) - 1) + [listed[0].objective]  # known at its end
        price.clock += [time.process_time()] * len(listed)
        if name == "refine":
            descend_again(evaluate, seed=seed, start=start_of(points, listed))
    else:
        (named.SEARCHES | BASELINES)[name](evaluate, points, seed)
    return {"search": name, "seed": seed, **marks(price.curve, [t - began for t in price.clock])}


def marks(curve: Sequence[float], clock: Sequence[float]) -> dict[str, Any]:
    """The curve at EVALUATIONS and SECONDS; null before the first."""
    within = [sum(t <= limit for t in clock) for limit in SECONDS]
    return {
        "evaluations": len(curve),
        "cpu_seconds": round(clock[-1], 4),
        "at_evaluations": [_six(curve[min(n, len(curve)) - 1]) for n in EVALUATIONS],
        "at_seconds": [_six(curve[n - 1]) if n else None for n in within],
    }


def _six(value: float) -> float | None:
    return float(f"{value:.6g}") if value < float("inf") else None


def study(number: int, *, seeds: int, budget: int) -> list[dict[str, Any]]:
    """All searches on one instance."""
    instance = draw(number, split="held_out", most=MOST)
    head = {"instance": number, "split": "held_out", "name": instance.name, "devices": instance.request.ranks}
    price = Charged(Points(instance.request))
    try:
        found, names = [one(price, "enumerate", 0, budget)], NAMES
    except ValueError:  # no grid fits
        found, names = [], NAMES[:-1]
    found += [one(price, name, seed, budget) for name in names for seed in range(seeds)]
    return [{**head, **each} for each in found]


def large() -> dict[str, Any]:
    """Whole planning for 64 different devices and 64 layers."""
    kinds, layers = ("v100", "p100"), 64
    hosts = [{"name": f"h{i}", "devices": {kinds[i % 2]: 8}, "inside": "bus", "nic": "nic"} for i in range(8)]
    links = {"bus": {"rate": "50 GB/s", "latency": "8 us"}, "nic": {"rate": "25 Gbit/s", "latency": "30 us"}}
    machine = machine_of(Machines(devices={kind: device_of(kind) for kind in kinds}, hosts=tuple(hosts), links=links))
    base = draw(0, split="train").request
    began = time.process_time()
    ir = model_of("resgcn", layers, 128, base.graph.features)
    request = replace(base, ir=ir, machine=machine, ranks=machine.fabric.size, fewer=False)
    found = named.run(request, named.DEFAULT)
    spent = round(time.process_time() - began, 2)
    row = {"kind": "large", "search": named.DEFAULT, "devices": machine.fabric.size, "layers": layers}
    return row | {"evaluations": found.evaluations, "cpu_seconds": spent, "label": found.evaluated[0].label}


def run(files: Files, *, only: int = INSTANCES) -> None:
    """Search plans of `only` more instances; in a rehearsal of one, with two seeds."""
    load()  # importing and reading the guide is not charged to a search
    instances, seeds, budget = (1, 2, 60) if files.smoke else (INSTANCES, SEEDS, BUDGET)
    rows = files.read()
    done = {row.get("instance") for row in rows}
    for number in [number for number in range(instances) if number not in done][:only]:
        found = study(number, seeds=seeds, budget=budget)
        records.append(files(), found)
        print(f"{number}: {found[0]['name']}, {found[0]['devices']} devices", flush=True)
    if not files.smoke and not any(row.get("kind") == "large" for row in rows):
        records.append(files(), [large()])
