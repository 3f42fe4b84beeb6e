"""How good a plan each search finds, by evaluations and by CPU seconds, on models, graphs and topologies held out of
the guide's training.

An instance's points are priced once for all searches; a search that asks for a point again is charged the CPU seconds
that pricing it took. Prices are predictions: nothing of a training run is measured.
"""

import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent

import records
from planner_search.instances import draw
from planner_search.searches import BASELINES, descend_again, start_of
from records import Files

from gnnpar.models.resgcn import ResGCN
from gnnpar.planner.extract import record
from gnnpar.planner.guide.network import load
from gnnpar.planner.planner import Request
from gnnpar.planner.search import named
from gnnpar.planner.search.points import Points
from gnnpar.planner.search.tree import Evaluator
from gnnpar.pricing.machine import Machine
from gnnpar.pricing.rates import derived
from gnnpar.pricing.topology import Machines

INSTANCES, SEEDS, BUDGET, MOST = 10, 10, 120, 16
EVALUATIONS = (1, 3, 5, 10, 20, 30, 40, 60, 80, 100, 120)  # where curves are read off
SECONDS = (0.03, 0.05, 0.1, 0.2, 0.3, 0.5, 1.0, 2.0)
NAMES = ("tag", "mcts", "guided", "descent", "anneal", "random", "refine")
LARGE = {"hosts": 8, "per_host": 8, "layers": 64}


class Charged:
    """Prices of an instance's points; `credit`: seconds that a search would have spent on those that are known."""

    def __init__(self, points: Points) -> None:
        self.points, self.known, self.credit = points, {}, 0.0

    def __call__(self, chosen: dict[str, Any]) -> float:
        key = tuple(chosen.items())
        began = time.process_time()
        if key in self.known:
            value, cost = self.known[key]
            self.credit += cost
            return value
        value = self.points.objective(chosen)
        self.known[key] = (value, time.process_time() - began)
        return value


class Timed(Evaluator):
    """`curve`: best seconds after each evaluation; `clock`: CPU seconds by then, those of known points charged."""

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self.curve, self.clock = list[float](), list[float]()

    def __call__(self, point: tuple[int, ...]) -> float:
        before = len(self.seen)
        value = super().__call__(point)
        if len(self.seen) > before:
            assert isinstance(self.price, Charged)
            self.curve.append(min([value, *self.curve[-1:]]))
            self.clock.append(time.process_time() + self.price.credit)
        return value


def one(points: Points, price: Charged, name: str, seed: int, budget: int) -> dict[str, Any]:
    """A run of a search: its best after so many evaluations and so many CPU seconds."""
    began, price.credit = time.process_time(), 0.0
    evaluate = Timed(points.space, price, budget, points.canonical)
    first: list[float] = []
    if name == "refine":  # its enumeration is a part of its curve
        listed = named.run(points.request, "enumerate").evaluated
        first = _whole(listed[0].objective, len(listed))
        enumerated = time.process_time() - began
        descend_again(evaluate, seed=seed, start=start_of(points, listed))
    else:
        enumerated = 0.0
        (named.SEARCHES | BASELINES)[name](evaluate, points, seed)
    clock = [enumerated] * len(first) + [t - began for t in evaluate.clock]
    curve = first + [min([value, *first[-1:]]) for value in evaluate.curve]
    return {"search": name, "seed": seed, **marks(curve, clock)}


def _whole(value: float, count: int) -> list[float]:
    """What an enumeration has found is known at its end."""
    return [float("inf")] * (count - 1) + [value]


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
    points = Points(instance.request)
    head = {"instance": number, "split": "held_out", "name": instance.name, "devices": instance.request.ranks}
    rows = []
    began = time.process_time()
    try:
        listed = named.run(instance.request, "enumerate").evaluated
    except ValueError:
        listed = ()
    spent = time.process_time() - began
    if listed:
        value, count = min(e.objective for e in listed if not e.refused), len(listed)
        rows.append({**head, "search": "enumerate", "seed": 0, **marks(_whole(value, count), [spent] * count)})
    price = Charged(points)
    for name in NAMES if listed else NAMES[:-1]:
        rows += [{**head, **one(points, price, name, seed, budget)} for seed in range(seeds)]
    return rows


def large() -> dict[str, Any]:
    """Whole planning for 64 different devices and 64 layers."""
    kinds = {"v100": (14, 900, 32), "p100": (9.3, 549, 12)}
    fabric = Machines(
        devices={
            k: {"type": "cuda", "memory": f"{m} GiB", "speed": f"{s} Tflop/s", "memory_rate": f"{r} GB/s"}
            for k, (s, r, m) in kinds.items()
        },
        hosts=tuple(
            {"name": f"h{i}", "devices": {("v100", "p100")[i % 2]: LARGE["per_host"]}, "inside": "bus", "nic": "nic"}
            for i in range(LARGE["hosts"])
        ),
        links={"bus": {"rate": "50 GB/s", "latency": "8 us"}, "nic": {"rate": "25 Gbit/s", "latency": "30 us"}},
    ).fabric
    base: Request = draw(0, split="train").request
    began = time.process_time()
    made = ResGCN(num_layers=LARGE["layers"], hidden=128, encoder="linear", decoder="linear", norm="layer")
    ir = record(made.build(base.graph.features, 16, seed=0), base.graph.features)
    rates = {d.kind: derived(d.speed or 0, d.memory_rate or 0) for d in fabric.devices}
    machine = Machine(fabric, tuple(rates[d.kind] for d in fabric.devices))
    request = replace(base, ir=ir, machine=machine, ranks=fabric.size, fewer=False)
    found = named.run(request, named.DEFAULT)
    spent = time.process_time() - began
    row = {"kind": "large", "search": named.DEFAULT, "devices": fabric.size, "layers": LARGE["layers"]}
    ends = {"evaluations": found.evaluations, "cpu_seconds": round(spent, 2), "label": found.evaluated[0].label}
    return {**row, **ends}


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
