"""Scores of pairs of nodes from their output rows: link prediction's decoders."""

from __future__ import annotations

from typing import Literal

import torch.nn.functional as F
from torch import Tensor, nn

from gnnpar.files import require_memory
from gnnpar.models.gnn import GNN
from gnnpar.models.initial import Linear, construct

_NAME = "scorer"


class Scorer(nn.Module):
    """Two dense layers on the product of two rows by entries. Shapes: products [..., width] -> [...]."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.hidden, self.out = Linear(width, width), Linear(width, 1)

    def forward(self, products: Tensor) -> Tensor:
        return self.out(F.relu(self.hidden(products)))[..., 0]


def with_scorer(model: GNN, decoder: Literal["dot", "mlp"] | None, seed: int) -> GNN:
    """The model with the parameters of its decoder among its own, so that they are trained and saved with it.

    ValueError where pairs are to be scored, and it gives no rows of some of their nodes."""
    if decoder is not None and model.unanswered:
        raise ValueError(
            f"task=link scores pairs of any two nodes, and the model gives no rows of type {model.unanswered[0]}; let "
            "forward return a dictionary with rows of all types, of width task.width"
        )
    if decoder == "mlp":
        require_memory(4 * model.out_dim**2, f"a decoder of width {model.out_dim}", "set a smaller task.width")
        model.add_module(_NAME, construct(lambda: Scorer(model.out_dim), seed))
    return model


def scorer_parameters(model: nn.Module) -> list[nn.Parameter]:
    """Those of the decoder alone that are trained."""
    scorer = dict(model.named_children()).get(_NAME)
    return [] if scorer is None else [each for each in scorer.parameters() if each.requires_grad]


def pair_scores(model: nn.Module, source: Tensor, destination: Tensor) -> Tensor:
    """Logits of an edge, the same in both directions. Shapes: output rows [..., width] of either -> [...]."""
    products, scorer = source * destination, dict(model.named_children()).get(_NAME)
    return products.sum(-1) if scorer is None else scorer(products)
