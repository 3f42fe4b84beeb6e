"""Training of the guide: the tree plays on drawn instances, and the network learns where its visits and the best plans
lie.

    python experiments/planner_search/train_guide.py --instances 80 --rounds 2 --seed 0 --out weights.pt

Source: TAG (arXiv 2302.06126), its self-play, and imitation of the best plan known. In the first round the prior is
uniform, then it is the network's. On every node along the way to the best plan of an instance the target is half that
choice and half the visits of the tree where it went there.
"""

import random
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parents[1]))

import study
from planner_search.instances import draw
from planner_search.searches import descend_again

from gnnpar.planner.guide.features import Scene, choice_features, scene
from gnnpar.planner.guide.network import WEIGHTS, Guide, picks_of, prior_of
from gnnpar.planner.search.points import Points
from gnnpar.planner.search.tree import Evaluator, Node, Point, Prior, climb
from gnnpar.track.console import say

NOISE, PLAYS = 0.25, 150  # of the root's prior (8.10 D); evaluations of a game


class Example(NamedTuple):
    """Shapes: rows [choices, CHOICE_WIDTH], picks [choices, D], target [choices], which sums to 1."""

    rows: Tensor
    picks: Tensor
    target: Tensor


class Game(NamedTuple):
    """What one instance teaches."""

    scene: Scene
    examples: tuple[Example, ...]


def play(seed: int, guide: Guide | None, *, plays: int = PLAYS, most: int = 16) -> Game | None:
    """None where nothing fits on the instance drawn."""
    points = Points(draw(seed, split="train", most=most).request)
    tree = Evaluator(points.space, points.objective, plays, points.canonical)
    root = climb(tree, seed=seed, prior=disturbed(prior_of(guide, points), seed) if guide else None)
    other = Evaluator(points.space, points.objective, plays, points.canonical)
    descend_again(other, seed=seed)
    best, value = min((tree.best, other.best), key=lambda pair: pair[1])
    if value == float("inf"):
        return None
    seen = scene(points)
    default = points.canonical((0,) * len(best))
    examples = [e for rest in {default, best} for e in _along(points, root, best, rest, seen.kinds)]
    return Game(seen, tuple(examples))


def disturbed(prior: Prior, seed: int) -> Prior:
    """Return the prior with a Dirichlet draw mixed into that of the root."""
    rng = random.Random(seed)

    def noisy(prefix: Point, rest: Point) -> Sequence[float]:
        given = prior(prefix, rest)
        if prefix:
            return given
        draws = [rng.gammavariate(10 / len(given), 1.0) + 1e-12 for _ in given]
        return [(1 - NOISE) * p + NOISE * d / sum(draws) for p, d in zip(given, draws, strict=True)]

    return noisy


def _along(points: Points, root: Node, best: Point, rest: Point, kinds: Sequence[str]) -> list[Example]:
    """The decisions that lead to the best point, as they look when the rest is completed by `rest`."""
    examples: list[Example] = []
    node: Node | None = root
    for i, size in enumerate(points.space.sizes):
        if size > 1:
            rows, placed = choice_features(points, best[:i], rest)
            children = node.children if node else {}
            visits = torch.tensor([float(children[c].visits) if c in children else 0.0 for c in range(size)])
            target = torch.zeros(size)
            target[best[i]] = 1.0
            if visits.sum() >= 8:
                target = 0.5 * target + 0.5 * visits / visits.sum()
            examples.append(Example(rows, picks_of(placed, kinds), target))
        node = node.children.get(best[i]) if node else None
    return examples


def fit(guide: Guide, games: Sequence[Game], *, epochs: int, seed: int, rate: float = 2e-3) -> list[float]:
    """Cross-entropy an example, after each epoch."""
    rng = random.Random(seed)
    optimizer = torch.optim.AdamW(guide.parameters(), lr=rate, weight_decay=1e-3)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, epochs)
    losses = []
    for _ in range(epochs):
        total = count = 0.0
        for game in rng.sample(list(games), len(games)):
            loss = loss_of(guide, game)
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(guide.parameters(), 0.6)
            optimizer.step()
            total += float(loss.detach()) * len(game.examples)
            count += len(game.examples)
        schedule.step()
        losses.append(total / count)
    return losses


def loss_of(guide: Guide, game: Game) -> Tensor:
    """The mean over a game's examples of the entropy that the guide adds to the target's (0 when they agree)."""
    whole, devices = guide.encode(game.scene)
    sizes = [len(e.rows) for e in game.examples]
    rows = torch.cat([e.rows for e in game.examples])
    picks = torch.cat([e.picks for e in game.examples])
    every = zip(guide.score(whole, devices, rows, picks).split(sizes), game.examples, strict=True)
    terms = [F.kl_div(logits.log_softmax(0), example.target, reduction="sum") for logits, example in every]
    return torch.stack(terms).mean()


def train(*, instances: int = 80, rounds: int = 2, epochs: int = 30, seed: int = 0, out: Path = WEIGHTS) -> None:
    """Play and learn, and write the weights; the same for the same arguments. instances, epochs: of a round."""
    torch.manual_seed(seed)
    torch.set_num_threads(1)
    guide, games = Guide(), []
    began = time.process_time()
    for number in range(rounds):
        seeds = range(seed * 10**6 + number * instances, seed * 10**6 + (number + 1) * instances)
        played = [play(s, guide.eval() if number else None) for s in seeds]
        games += [game for game in played if game is not None]
        losses = fit(guide.train(), games, epochs=epochs, seed=seed + number)
        spent = time.process_time() - began
        say(f"round {number}: {len(games)} games, loss {losses[0]:.3f} to {losses[-1]:.3f}, {spent:.0f} s of CPU")
    save(guide.eval(), out)
    say(f"{sum(p.numel() for p in guide.parameters())} parameters -> {out}")


def save(guide: Guide, file: Path) -> None:
    """Write the weights in half precision."""
    torch.save({name: value.half() for name, value in guide.state_dict().items()}, file)


if __name__ == "__main__":
    train(**study.options(train, sys.argv[1:]))
