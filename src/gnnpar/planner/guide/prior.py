"""A guide as the prior of a tree search, and the weights shipped with the package."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import torch

from gnnpar.planner.guide.features import choice_features, scene
from gnnpar.planner.guide.network import Guide, picks_of
from gnnpar.planner.search.points import Points
from gnnpar.planner.search.space import Point
from gnnpar.planner.search.tree import Prior
from gnnpar.seeding import torch_seeded

WEIGHTS = Path(__file__).with_name("weights.pt")


def prior_of(guide: Guide, points: Points) -> Prior:
    """Return the guide's prior. It encodes the scene on first use."""

    @cache
    def encoded() -> tuple[torch.Tensor, torch.Tensor, tuple[str, ...]]:
        with torch.no_grad():
            seen = scene(points)
            return (*guide.encode(seen), seen.kinds)

    def prior(prefix: Point, rest: Point) -> list[float]:
        whole, devices, kinds = encoded()
        rows, placed = choice_features(points, prefix, rest)
        with torch.no_grad():
            logits = guide.score(whole, devices, rows, picks_of(placed, kinds))
            return torch.softmax(logits, 0).tolist()

    return prior


@cache
def load(file: Path = WEIGHTS) -> Guide:
    """Load a guide from half-precision weights. ValueError for another architecture."""
    try:
        state = torch.load(file, weights_only=True)
        with torch_seeded(0):  # its initial weights are replaced; keep the caller's random state
            guide = Guide()
        guide.load_state_dict({name: value.float() for name, value in state.items()})
    except (OSError, RuntimeError, AttributeError) as error:
        raise ValueError(f"{file} holds no guide ({type(error).__name__}): use another search") from error
    return guide.eval()


def shipped(points: Points) -> Prior:
    """Return the prior of the weights shipped with the package."""
    return prior_of(load(), points)
