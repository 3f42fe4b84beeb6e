"""Searches of a product space by evaluations alone: coordinate descent, annealing, random draws and a tree search.

Source: specs/tag.md 8.10 C to E. A point is one choice for every name; `price` gives seconds, infinite where it cannot
be. Each search spends at most `budget` evaluations of different points, a repeated point costs nothing.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

Point = tuple[int, ...]
Price = Callable[[Mapping[str, Any]], float]


@dataclass(frozen=True)
class Space:
    """Names with what each may be; the first choice is the default. Heavier names come first."""

    choices: Mapping[str, Sequence[Any]]

    def __post_init__(self) -> None:
        for name, values in self.choices.items():
            if not values:
                raise ValueError(f"{name} has nothing to choose from; give it a value")

    @property
    def sizes(self) -> tuple[int, ...]:
        return tuple(map(len, self.choices.values()))

    def at(self, point: Point) -> dict[str, Any]:
        return {name: values[i] for (name, values), i in zip(self.choices.items(), point, strict=True)}


@dataclass
class Evaluator:
    """Counts, remembers, and keeps the best and how it was reached."""

    space: Space
    price: Price
    budget: int
    seen: dict[Point, float] = field(default_factory=dict)
    curve: list[float] = field(default_factory=list)  # best seconds after each evaluation

    def __call__(self, point: Point) -> float:
        if point not in self.seen:
            if self.spent:
                return math.inf
            self.seen[point] = self.price(self.space.at(point))
            self.curve.append(min(self.seen[point], self.curve[-1] if self.curve else math.inf))
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
                if (found := evaluate(other)) < value:
                    here, value, improved = other, found, True


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
        if (found := evaluate(other)) < math.inf:
            rise = math.log(found / value) if value < math.inf else -1.0
            if rise <= 0 or rng.random() < math.exp(-rise / heat):
                here, value = other, found


def draw(evaluate: Evaluator, *, seed: int) -> None:
    """Points at random: what any search must beat."""
    rng, sizes = random.Random(seed), evaluate.space.sizes
    evaluate((0,) * len(sizes))
    for _ in range(20 * evaluate.budget):
        if evaluate.spent:
            return
        evaluate(tuple(rng.randrange(size) for size in sizes))


@dataclass
class _Node:
    """The tree's node of a prefix of choices."""

    visits: int = 0
    total: float = 0.0
    most: float = -math.inf
    children: dict[int, _Node] = field(default_factory=dict)

    @property
    def value(self) -> float:
        return 0.5 * self.total / max(1, self.visits) + 0.5 * self.most if self.visits else -math.inf


def climb(evaluate: Evaluator, *, seed: int, playouts: int | None = None) -> None:
    """Monte-Carlo tree search with a uniform prior: names in order, the rest completed by the incumbent.

    A playout's reward is ln(default / seconds), -1 where the point cannot be. Selection is PUCT on values normalised
    over the tree, a mean of the mean and the best below; children widen with the root of the visits.
    """
    rng, sizes = random.Random(seed), evaluate.space.sizes
    default = (0,) * len(sizes)
    base = evaluate(default)
    root = _Node()
    for _ in range(playouts or 20 * evaluate.budget):
        if evaluate.spent:
            return
        incumbent = evaluate.best[0]
        path, prefix = [root], []
        while len(prefix) < len(sizes):
            node = path[-1]
            choice = _select(node, sizes[len(prefix)], root, rng)
            new = choice not in node.children
            path.append(node.children.setdefault(choice, _Node()))
            prefix.append(choice)
            if new:
                break
        seconds = evaluate((*prefix, *incumbent[len(prefix) :]))
        reward = math.log(base / seconds) if seconds < math.inf and base < math.inf else -1.0
        for node in path:
            node.visits += 1
            node.total += reward
            node.most = max(node.most, reward)


def _select(node: _Node, size: int, root: _Node, rng: random.Random) -> int:
    fresh = [c for c in range(size) if c not in node.children]
    if fresh and len(node.children) < max(1.0, 4 * math.sqrt(node.visits + 1)):
        return rng.choice(fresh)
    low = min(child.value for child in node.children.values())
    span = max(child.value for child in node.children.values()) - low or 1.0
    explore = 1.25 + math.log((node.visits + 19653) / 19652)

    def score(item: tuple[int, _Node]) -> float:
        _, child = item
        return (child.value - low) / span + explore / size * math.sqrt(node.visits) / (1 + child.visits)

    return max(node.children.items(), key=score)[0]
