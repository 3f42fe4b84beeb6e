"""The guide network: relation-wise attention over the scene, and a score for each choice of the next name.

Source: TAG (arXiv 2302.06126) with 14 M parameters. Here: two layers of width 32 with LayerNorm, 43 k parameters. It
has no value head, since the cost model gives values as fast. A search uses it as prior: it encodes once per request and
scores once per node of the tree.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from pathlib import Path

import torch
from torch import Tensor, nn
from torch_geometric.nn import GATv2Conv, HeteroConv

from gnnpar.planner.guide.features import CHOICE_WIDTH, PRICED, RELATIONS, WIDTHS, Scene, choice_features, scene
from gnnpar.planner.search.points import Points
from gnnpar.planner.search.tree import Point, Prior
from gnnpar.seeding import torch_seeded

LAYERS = 2
WEIGHTS = Path(__file__).with_name("weights.pt")


class Guide(nn.Module):
    """Shapes: a scene's nodes -> embeddings [count, width] -> logits [choices]."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.width = width
        self.enter = nn.ModuleDict({name: nn.Linear(size, width) for name, size in WIDTHS.items()})
        self.layers = nn.ModuleList(
            HeteroConv({relation: self._conv(relation) for relation in RELATIONS}, aggr="mean") for _ in range(LAYERS)
        )
        self.norms = nn.ModuleList(nn.ModuleDict({name: nn.LayerNorm(width) for name in WIDTHS}) for _ in range(LAYERS))
        self.whole = nn.Linear(len(WIDTHS) * width, width)
        self.choice = nn.Sequential(nn.Linear(2 * width + CHOICE_WIDTH, width), nn.Tanh(), nn.Linear(width, 1))

    def _conv(self, relation: tuple[str, str, str]) -> GATv2Conv:
        price = 1 if relation in PRICED else None
        return GATv2Conv((self.width, self.width), self.width, edge_dim=price, add_self_loops=False)

    def encode(self, scene: Scene) -> tuple[Tensor, Tensor]:
        """Return the embedding of the scene [width] and of its device nodes [D, width]."""
        h = {name: torch.tanh(self.enter[name](x)) for name, x in scene.nodes.items()}
        for layer, norms in zip(self.layers, self.norms, strict=True):
            messages = layer(h, scene.edges, edge_attr_dict=scene.prices)
            assert isinstance(norms, nn.ModuleDict)
            h = {name: norms[name](x + torch.relu(messages[name])) if name in messages else x for name, x in h.items()}
        means = [h[name].mean(0) if len(h[name]) else h[name].new_zeros(self.width) for name in WIDTHS]
        return torch.tanh(self.whole(torch.cat(means))), h["device"]

    def score(self, whole: Tensor, devices: Tensor, rows: Tensor, picks: Tensor) -> Tensor:
        """Return logits. Shapes: rows [choices, CHOICE_WIDTH]; picks [choices, D], weights of a choice's devices."""
        together = torch.cat([whole.expand(len(rows), -1), picks @ devices, rows], dim=1)
        return self.choice(together).squeeze(1)


def picks_of(kinds: Sequence[str], devices: Sequence[str]) -> Tensor:
    """Return [choices, D] equal weights on the classes of the kind that a choice places, 0 if it places none."""
    marks = torch.tensor([[float(kind == device) for device in devices] for kind in kinds])
    return marks / marks.sum(1, keepdim=True).clamp_min(1.0)


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
