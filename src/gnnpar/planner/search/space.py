"""A product space, its evaluations and random draws from it (`tree`: MCTS).

A point is one choice for every name. `price` gives seconds, infinite if the point cannot run. A search spends at most
`budget` evaluations of distinct points; repeated points are free.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from gnnpar.files import JsonDict, JsonObject

Point = tuple[int, ...]
Price = Callable[[JsonObject], float]


@dataclass(frozen=True)
class Space:
    """Names with their choices; the first choice is the default. Names with more effect come first."""

    choices: Mapping[str, Sequence[object]]

    def __post_init__(self) -> None:
        for name, values in self.choices.items():
            if not values:
                raise ValueError(f"{name} has nothing to choose from; give it a value")

    @property
    def sizes(self) -> tuple[int, ...]:
        return tuple(map(len, self.choices.values()))

    def at(self, point: Point) -> JsonDict:
        return {name: values[i] for (name, values), i in zip(self.choices.items(), point, strict=True)}


@dataclass
class Evaluator:
    """Counts and caches evaluations, and keeps the best. canonical: the representative of equal points."""

    space: Space
    price: Price
    budget: int
    canonical: Callable[[Point], Point] = lambda point: point
    seen: dict[Point, float] = field(default_factory=dict)

    def __call__(self, point: Point) -> float:
        point = self.canonical(point)
        if point not in self.seen:
            if self.spent:
                return math.inf
            self.seen[point] = self.price(self.space.at(point))
        return self.seen[point]

    @property
    def spent(self) -> bool:
        return len(self.seen) >= self.budget

    @property
    def rounds(self) -> Iterator[None]:
        """Yield until the budget is spent, or points repeat for long."""
        for _ in range(20 * self.budget):
            if self.spent:
                return
            yield

    @property
    def best(self) -> tuple[Point, float]:
        return min(self.seen.items(), key=lambda item: (item[1], item[0]))


def draw(evaluate: Evaluator, *, seed: int) -> None:
    """Evaluate random points: the baseline for every search."""
    rng, sizes = random.Random(seed), evaluate.space.sizes
    evaluate((0,) * len(sizes))
    for _ in evaluate.rounds:
        evaluate(tuple(rng.randrange(size) for size in sizes))
