"""The searches by name, on a request: what each found, how many evaluations and CPU seconds it took."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal, get_args

from gnnpar.planner.planner import Evaluated, Request, advised, evaluate, listed, nothing_fits, search
from gnnpar.planner.search.points import Points
from gnnpar.planner.search.space import Evaluator, Point, anneal, descend_again, draw
from gnnpar.planner.search.tree import Prior, climb, published

Name = Literal["enumerate", "refine", "descent", "anneal", "mcts", "guided", "tag", "random"]
NAMES: tuple[Name, ...] = get_args(Name)
DEFAULT: Name = "guided"  # best of all at equal CPU seconds in experiments/planner_search
BUDGET = 120  # evaluations


@dataclass(frozen=True)
class Result:
    """Of a search. `curve[i]`: best objective after i + 1 evaluations, `clock[i]`: CPU seconds by then."""

    search: Name
    evaluated: tuple[Evaluated, ...]
    evaluations: int
    cpu_seconds: float
    curve: tuple[float, ...] = ()
    clock: tuple[float, ...] = ()

    def as_predicted(self) -> dict[str, object]:
        """As plan.json has it."""
        return {"name": self.search, "evaluations": self.evaluations, "cpu_seconds": round(self.cpu_seconds, 3)}


def run(request: Request, name: Name, *, budget: int = BUDGET, seed: int = 0, prior: Prior | None = None) -> Result:
    """ValueError where nothing can be chosen, and for a name or a budget that is none.

    enumerate: uniform grids on the devices as given, whatever the budget. They are in every answer, so that none is
    worse and the table shows what is not allowed; the other searches go on from there (refine) or start from graph
    parallelism on all devices, and also search places, sizes of parts and numbers of ranks.
    """
    if name not in NAMES:
        raise ValueError(f"search={name} is none of {', '.join(NAMES)}")
    if budget < 1:
        raise ValueError(f"budget={budget} evaluations find nothing: give at least 1")
    began = time.process_time()
    if name == "enumerate":
        grids = search(request)
        return Result(name, grids, len(grids), time.process_time() - began)
    points = Points(request)
    evaluator = Evaluator(points.space, points.objective, budget, points.canonical)
    grids = listed(request)
    _searches(evaluator, seed, start_of(points, grids), prior, points)[name]()
    spent = time.process_time() - began
    table = _settled(points, grids)
    clock = tuple(t - began for t in evaluator.clock)
    return Result(name, table, len(evaluator.seen) + len(grids), spent, tuple(evaluator.curve), clock)


def _searches(
    evaluator: Evaluator, seed: int, start: Point | None, prior: Prior | None, points: Points
) -> dict[str, Callable[[], object]]:
    def guided() -> None:
        climb(evaluator, seed=seed, prior=prior or _guide(points))

    return {
        "refine": lambda: descend_again(evaluator, seed=seed, start=start),
        "descent": lambda: descend_again(evaluator, seed=seed),
        "anneal": lambda: anneal(evaluator, seed=seed),
        "mcts": lambda: climb(evaluator, seed=seed),
        "guided": guided,
        "tag": lambda: published(evaluator, seed=seed),
        "random": lambda: draw(evaluator, seed=seed),
    }


def _guide(points: Points) -> Prior:
    from gnnpar.planner.guide.prior import shipped  # torch_geometric takes seconds to import

    return shipped(points)


def start_of(points: Points, grids: tuple[Evaluated, ...]) -> Point | None:
    """The point of the best uniform grid, which every other choice is compared with."""
    starts = (points.point_of(e.candidate) for e in grids if not e.refused)
    return next((point for point in starts if point is not None), None)


def _settled(points: Points, grids: tuple[Evaluated, ...]) -> tuple[Evaluated, ...]:
    """All that was priced, the best first. Uneven parts are made and priced again before one of them is chosen; those
    that were only estimated are left out."""
    request = points.request
    table = {
        (p.candidate, p.devices or tuple(range(p.candidate.ranks)), p.shares): p
        for p in (*grids, *points.evaluations.values())
    }
    ranked = sorted(table.values(), key=_rank)
    made: list[Evaluated] = []
    while ranked and not ranked[0].refused and ranked[0].shares and len(made) < _PARTITIONS:
        made.append(_made(ranked.pop(0), request))
        ranked = sorted([*ranked, *made[-1:]], key=_rank)
        if ranked[0] is made[-1]:
            break
    ranked = [p for p in ranked if not p.shares or any(p is m for m in made)]
    if not ranked or ranked[0].refused:
        raise ValueError(nothing_fits(ranked, request))
    named: dict[tuple[str, int], Evaluated] = {}
    for p in ranked:
        named.setdefault((p.label, p.candidate.ranks), p)  # the best place of each candidate
    return advised(tuple(named.values()))


_PARTITIONS = 4  # uneven ones that are made before equal parts are taken


def _rank(p: Evaluated) -> tuple[bool, float, bool, str]:
    return bool(p.refused), p.objective, bool(p.shares), p.label


def _made(best: Evaluated, request: Request) -> Evaluated:
    """With the statistics of the partition itself."""
    assert request.uneven is not None, "shares are searched only where they can be made"
    machine = best.at(request.machine)
    work = request.work(request.uneven(best.shares), machine.rates, held=best.candidate.held)
    again = evaluate(best.candidate, work, replace(request, machine=machine))
    return replace(again, devices=best.devices, shares=best.shares)
