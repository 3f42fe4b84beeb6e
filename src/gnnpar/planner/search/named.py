"""Searches by name: best candidates, evaluations, and CPU seconds."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace

from gnnpar.planner.planner import Evaluated, Planned, Request, evaluate, nothing_fits, price_grids, recommend
from gnnpar.planner.search.points import Points
from gnnpar.planner.search.tree import Evaluator, climb, draw, published

DEFAULT = "guided"  # best at equal CPU seconds in experiments/planner_search
BUDGET = 120  # evaluations


def guided(evaluate: Evaluator, points: Points, seed: int) -> None:
    from gnnpar.planner.guide.network import shipped  # importing torch_geometric takes seconds

    climb(evaluate, seed=seed, prior=shipped(points))


Search = Callable[[Evaluator, Points, int], object]
SEARCHES: dict[str, Search] = {
    "guided": guided,
    "tag": lambda evaluate, points, seed: published(evaluate, seed=seed),
    "random": lambda evaluate, points, seed: draw(evaluate, seed=seed),
}
"""Name -> search(evaluator, points, seed), besides `enumerate`. A study may add its own."""


def names() -> tuple[str, ...]:
    """Return the names of all searches."""
    return ("enumerate", *SEARCHES)


def run(request: Request, name: str = DEFAULT, *, budget: int = BUDGET, seed: int = 0) -> Planned:
    """Search for a plan. ValueError if no candidate is eligible.

    `enumerate` prices uniform grids on the devices in order, whatever the budget. Every search includes these grids, so
    none is worse than enumeration, and the table shows classes that are not allowed. Other searches start from graph
    parallelism on all devices, and also vary placement, part sizes and numbers of ranks.
    """
    began, points, count = time.process_time(), Points(request), 0
    if name != "enumerate":
        evaluator = Evaluator(points.space, points.objective, budget, points.canonical)
        SEARCHES[name](evaluator, points, seed)
        count = len(evaluator.seen)
    grids = price_grids(request)
    spent = time.process_time() - began
    return Planned(request, _rank_all(points, grids), name, count + len(grids), spent)


def _rank_all(points: Points, grids: tuple[Evaluated, ...]) -> tuple[Evaluated, ...]:
    """Return all priced candidates, best first. Before choosing uneven parts, make the partition and price it again;
    omit the other candidates with estimated parts."""
    request = points.request
    table = {
        (p.candidate, p.devices or tuple(range(p.candidate.ranks)), p.shares): p
        for p in (*grids, *points.evaluations.values())
    }
    ranked = sorted(table.values(), key=_rank)
    made: list[Evaluated] = []
    while ranked and not ranked[0].refused and ranked[0].shares and len(made) < _PARTITIONS:
        made.append(_price_partition(ranked.pop(0), request))
        ranked = sorted([*ranked, *made[-1:]], key=_rank)
        if ranked[0] is made[-1]:
            break
    ranked = [p for p in ranked if not p.shares or any(p is m for m in made)]
    if not ranked or ranked[0].refused:
        raise ValueError(nothing_fits(ranked, request))
    named: dict[tuple[str, int], Evaluated] = {}
    for p in ranked:
        named.setdefault((p.label, p.candidate.ranks), p)  # the best placement of each candidate
    return recommend(tuple(named.values()))


_PARTITIONS = 4  # uneven partitions to make before falling back to equal parts


def _rank(p: Evaluated) -> tuple[bool, float, bool, str]:
    return bool(p.refused), p.objective, bool(p.shares), p.label


def _price_partition(best: Evaluated, request: Request) -> Evaluated:
    """Price a candidate again with the statistics of its real partition."""
    assert request.uneven is not None, "shares are searched only where they can be made"
    machine = best.at(request.machine)
    work = request.work(request.uneven(best.shares), machine.rates, held=best.candidate.held)
    again = evaluate(best.candidate, work, replace(request, machine=machine))
    return replace(again, devices=best.devices, shares=best.shares)
