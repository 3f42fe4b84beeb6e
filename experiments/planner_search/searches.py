"""Baselines of `gnnpar plan`'s searches: coordinate descent, annealing, and its tree without a prior.

python experiments/planner_search/searches.py search=anneal model=gat topology=racks    # gnnpar plan with them
"""

import math
import random
import sys

from gnnpar.planner.planner import Evaluated, price_grids
from gnnpar.planner.search.named import SEARCHES, Search
from gnnpar.planner.search.points import Points
from gnnpar.planner.search.tree import Evaluator, Point, climb
from gnnpar.pricing.candidate import Candidate


def descend(evaluate: Evaluator, start: Point | None = None) -> None:
    """One name after the other to its best choice, until nothing improves."""
    sizes = evaluate.space.sizes
    here = start or (0,) * len(sizes)
    value = evaluate(here)
    improved = True
    while improved and not evaluate.spent:
        improved = False
        for i, size in enumerate(sizes):
            for choice in range(size):
                other = (*here[:i], choice, *here[i + 1 :])
                if (priced := evaluate(other)) < value:
                    here, value, improved = other, priced, True


def descend_again(evaluate: Evaluator, *, seed: int, start: Point | None = None) -> None:
    """Descent, and from random points for as long as there are evaluations left."""
    rng, sizes = random.Random(seed), evaluate.space.sizes
    descend(evaluate, start)
    for _ in range(evaluate.budget):
        if evaluate.spent:
            return
        descend(evaluate, tuple(rng.randrange(size) for size in sizes))


def anneal(
    evaluate: Evaluator, *, seed: int, start: Point | None = None, hot: float = 0.2, cold: float = 0.005
) -> None:
    """Random changes of one name, accepted by the logarithm of the ratio against a falling temperature."""
    rng, sizes = random.Random(seed), evaluate.space.sizes
    here = start or (0,) * len(sizes)
    value = evaluate(here)
    steps, free = 0, [i for i, size in enumerate(sizes) if size > 1]
    while not evaluate.spent and free and steps < 20 * evaluate.budget:
        i = rng.choice(free)
        other = (*here[:i], rng.randrange(sizes[i]), *here[i + 1 :])
        heat = hot * (cold / hot) ** min(1.0, len(evaluate.seen) / evaluate.budget)
        steps += 1
        if (priced := evaluate(other)) < math.inf:
            rise = math.log(priced / value) if value < math.inf else -1.0
            if rise <= 0 or rng.random() < math.exp(-rise / heat):
                here, value = other, priced


def start_of(points: Points, grids: tuple[Evaluated, ...]) -> Point | None:
    """Return the point of the best uniform grid; None where the space has none."""
    starts = (point_of(points, e.candidate) for e in grids if not e.refused)
    return next((point for point in starts if point is not None), None)


def point_of(points: Points, candidate: Candidate) -> Point | None:
    """Return the point of a candidate on the devices in order; None outside the space."""
    space, grid = points.space, points.grid_of(candidate)
    fields = candidate.as_json()
    if "chunks" in fields:  # the knob of a pipeline: chunks over stages, 0 for one chunk
        fields["chunks"] = fields["chunks"] // candidate.stages if fields["chunks"] > 1 else 0
    knobs = {name: fields[name] for name in grid.knobs(points.request.ir)}
    wanted: dict[str, object] = {"grid": grid, **knobs}
    if not all(value in space.choices[name] for name, value in wanted.items()):
        return None
    return tuple(space.choices[n].index(wanted[n]) if n in wanted else 0 for n in space.choices)


BASELINES: dict[str, Search] = {
    "descent": lambda evaluate, points, seed: descend_again(evaluate, seed=seed),
    "anneal": lambda evaluate, points, seed: anneal(evaluate, seed=seed),
    "mcts": lambda evaluate, points, seed: climb(evaluate, seed=seed),
    "refine": lambda evaluate, points, seed: descend_again(
        evaluate, seed=seed, start=start_of(points, price_grids(points.request))
    ),
}

if __name__ == "__main__":
    from gnnpar.__main__ import main

    SEARCHES.update(BASELINES)
    sys.exit(main(["plan", *sys.argv[1:]]))
