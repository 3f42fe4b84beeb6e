"""Searches of a product space by evaluations alone: coordinate descent, annealing and random draws (`tree`: MCTS).

A point is one choice for every name; `price` gives seconds, infinite where it cannot
be. Each search spends at most `budget` evaluations of different points, a repeated point costs nothing.
"""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from gnnpar.files import JsonDict, JsonObject

Point = tuple[int, ...]
Price = Callable[[JsonObject], float]


@dataclass(frozen=True)
class Space:
    """Names with what each may be; the first choice is the default. Heavier names come first."""

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
    """Counts, remembers, and keeps the best and how it was reached. `canonical`: which of equal points counts."""

    space: Space
    price: Price
    budget: int
    canonical: Callable[[Point], Point] = lambda point: point
    seen: dict[Point, float] = field(default_factory=dict)
    curve: list[float] = field(default_factory=list)  # best seconds after each evaluation
    clock: list[float] = field(default_factory=list)  # CPU seconds when each was done

    def __call__(self, point: Point) -> float:
        point = self.canonical(point)
        if point not in self.seen:
            if self.spent:
                return math.inf
            self.seen[point] = self.price(self.space.at(point))
            self.curve.append(min(self.seen[point], self.curve[-1] if self.curve else math.inf))
            self.clock.append(time.process_time())
        return self.seen[point]

    @property
    def spent(self) -> bool:
        return len(self.seen) >= self.budget

    @property
    def best(self) -> tuple[Point, float]:
        return min(self.seen.items(), key=lambda item: (item[1], item[0]))


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


def draw(evaluate: Evaluator, *, seed: int) -> None:
    """Points at random: what any search must beat."""
    rng, sizes = random.Random(seed), evaluate.space.sizes
    evaluate((0,) * len(sizes))
    for _ in range(20 * evaluate.budget):
        if evaluate.spent:
            return
        evaluate(tuple(rng.randrange(size) for size in sizes))
