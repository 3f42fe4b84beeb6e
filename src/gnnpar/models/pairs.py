"""Decoders of link prediction: scores of node pairs from output rows."""

from __future__ import annotations

from typing import Literal

import torch.nn.functional as F
from torch import Tensor, nn

from gnnpar.files import require_memory
from gnnpar.models.gnn import GNN
from gnnpar.models.initial import Linear, construct

_NAME = "scorer"


class Scorer(nn.Module):
    """Two dense layers on the elementwise product of two rows. Shapes: products [..., width] -> [...]."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.hidden, self.out = Linear(width, width), Linear(width, 1)

    def forward(self, products: Tensor) -> Tensor:
        return self.out(F.relu(self.hidden(products)))[..., 0]


def with_scorer(model: GNN, decoder: Literal["dot", "mlp"] | None, seed: int) -> GNN:
    """Add the decoder's parameters to the model, so that they are trained and saved with it. ValueError if pairs are to
    be scored and the model gives no rows for some node types."""
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
    """Return the trained parameters of the decoder."""
    scorer = dict(model.named_children()).get(_NAME)
    return [] if scorer is None else [each for each in scorer.parameters() if each.requires_grad]


def pair_scores(model: nn.Module, source: Tensor, destination: Tensor) -> Tensor:
    """Return logits of edges, symmetric in both ends. Shapes: output rows [..., width] of each end -> [...]."""
    products, scorer = source * destination, dict(model.named_children()).get(_NAME)
    return products.sum(-1) if scorer is None else scorer(products)
