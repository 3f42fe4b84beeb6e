"""A product space with its evaluations, random draws from it, and Monte-Carlo tree search over its names in order.

A point is one choice for every name. `price` gives seconds, infinite if the point cannot run. A search spends at most
`budget` evaluations of distinct points; repeated points are free. Tree searches: with or without a guide's priors, and
the one published by TAG (arXiv 2302.06126). A node is a prefix of choices; every playout prices one whole point.
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
        """Yield until the budget is spent, at most 20 times the budget."""
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


Prior = Callable[[Point, Point], Sequence[float]]
"""(choices so far, completion of the rest) -> a probability for each choice of the next name."""


@dataclass
class Node:
    """A prefix of choices. prior: of its children, empty until used."""

    visits: int = 0
    total: float = 0.0
    most: float = -math.inf
    prior: Sequence[float] = ()
    children: dict[int, Node] = field(default_factory=dict)
    closed: bool = False  # every point below is priced; prices are constant

    @property
    def value(self) -> float:
        """Average of the mean and the best reward, since the search looks for the best plan."""
        return 0.5 * self.total / max(1, self.visits) + 0.5 * self.most if self.visits else -math.inf

    def add(self, reward: float) -> None:
        self.visits += 1
        self.total += reward
        self.most = max(self.most, reward)


def climb(evaluate: Evaluator, *, seed: int, prior: Prior | None = None) -> Node:
    """Run a tree search that completes prefixes with the incumbent. Return the root.

    A playout's reward is ln(default / seconds), -1 for an infeasible point. Selection is PUCT on values (`Node.value`)
    normalised over the tree. The number of children grows with the square root of the visits, by prior if there is one.
    """
    rng, sizes = random.Random(seed), evaluate.space.sizes
    base = evaluate((0,) * len(sizes))
    root, range_ = Node(), [math.inf, -math.inf]
    for _ in evaluate.rounds:
        if root.closed:
            break
        incumbent = evaluate.best[0]
        path, prefix = [root], []
        while len(prefix) < len(sizes):
            node, size = path[-1], sizes[len(prefix)]
            if prior is not None and not node.prior and size > 1:
                node.prior = prior(tuple(prefix), incumbent)
            choice = _select(node, size, range_, rng)
            new = choice not in node.children and size > 1
            path.append(node.children.setdefault(choice, Node()))
            prefix.append(choice)
            if new:
                break
        seconds = evaluate((*prefix, *incumbent[len(prefix) :]))
        if base == math.inf and seconds < math.inf:
            base = seconds
        reward = math.log(base / seconds) if seconds < math.inf else -1.0
        range_[:] = [min(range_[0], reward), max(range_[1], reward)]
        path[-1].closed = len(prefix) == len(sizes)
        for depth, node in reversed(list(enumerate(path))):
            node.add(reward)
            below = node.children.values()
            if depth < len(prefix) and len(below) == sizes[depth] and all(child.closed for child in below):
                node.closed = True
    return root


def _select(node: Node, size: int, bounds: Sequence[float], rng: random.Random) -> int:
    """Add a child if widening allows, else select by PUCT. Add the child with the largest prior, else a random one."""
    fresh = [c for c in range(size) if c not in node.children]
    if size == 1:
        return 0
    room = len(node.children) < max(1.0, 4 * math.sqrt(node.visits + 1))
    if fresh and room and not node.prior:
        return rng.choice(fresh)
    span = bounds[1] - bounds[0] if bounds[1] > bounds[0] else 1.0
    explore = 1.25 + math.log((node.visits + 19653) / 19652)
    prior = node.prior or [1 / size] * size
    known = [child.value for child in node.children.values()]
    unseen = (sum(known) / len(known) - bounds[0]) / span if known else 0.0  # a new child starts at its siblings' mean

    def score(choice: int) -> float:
        child = node.children.get(choice)
        value = unseen if child is None else (child.value - bounds[0]) / span
        visits = 0 if child is None else child.visits
        return value + explore * prior[choice] * math.sqrt(node.visits + 1) / (1 + visits)

    left = [
        *(c for c, child in node.children.items() if not child.closed),
        *((sorted(fresh, key=lambda c: -prior[c])[:1]) if room else ()),
    ]
    return max(left or fresh, key=score)


def published(evaluate: Evaluator, *, seed: int) -> None:
    """Search by TAG's published tree with a uniform prior.

    Reward T_base/T - 1, its fourth root above 1, -1 for an infeasible point. The value of a child is its mean. All
    children are added at once, in random order; c = sqrt(children / 10). Undecided names copy the first decision of
    their kind (`next.0`, `next.1`, ...), else the baseline.
    """
    rng, space = random.Random(seed), evaluate.space
    sizes, kinds = space.sizes, [name.partition(".")[0] for name in space.choices]
    base = evaluate((0,) * len(sizes))
    root = Node()
    for _ in evaluate.rounds:
        node, path, prefix = root, [root], []
        while len(prefix) < len(sizes) and (node.visits or node is root):
            choice = _published_choice(node, sizes[len(prefix)], rng)
            node = node.children[choice]
            path.append(node)
            prefix.append(choice)
        first = {kind: prefix[kinds.index(kind)] for kind in kinds[: len(prefix)]}
        rest = [first.get(kind, 0) for kind in kinds[len(prefix) :]]
        seconds = evaluate((*prefix, *rest))
        if base == math.inf and seconds < math.inf:
            base = seconds
        gain = base / seconds - 1 if seconds < math.inf else -1.0
        for visited in path:
            visited.add(gain**0.25 if gain > 1 else gain)


def _published_choice(node: Node, size: int, rng: random.Random) -> int:
    if not node.children:
        node.children = {choice: Node() for choice in rng.sample(range(size), size)}
    explore = math.sqrt(size / 10)

    def score(child: Node) -> float:
        mean = child.total / child.visits if child.visits else 0.0
        return mean + explore / size * math.sqrt(node.visits) / (1 + child.visits)

    return max(node.children.items(), key=lambda item: score(item[1]))[0]
