"""Losses of task.loss by name: (outputs, y) -> one value per row [N], or per entry [N, C]."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from gnnpar.data.dataset import TaskName

Rows = Callable[[Tensor, Tensor], Tensor]

cross_entropy: Rows = partial(F.cross_entropy, reduction="none")
nll: Rows = partial(F.nll_loss, reduction="none")  # outputs are log-probabilities
bce: Rows = partial(F.binary_cross_entropy_with_logits, reduction="none")
mse: Rows = partial(F.mse_loss, reduction="none")
l1: Rows = partial(F.l1_loss, reduction="none")
huber: Rows = partial(F.huber_loss, reduction="none")


def focal(logits: Tensor, y: Tensor) -> Tensor:
    """Return (1 - p)^2 times the cross entropy, p of the true label (Lin et al. 2017, arXiv:1708.02002, gamma 2)."""
    loss = bce(logits, y) if y.is_floating_point() else cross_entropy(logits, y)
    return (1 - torch.exp(-loss)).square() * loss


LOSSES: dict[TaskName, dict[str, Rows]] = {  # the first is the task's own
    "single_label": {"cross_entropy": cross_entropy, "nll": nll, "focal": focal},
    "binary": {"bce": bce, "focal": focal},
    "multi_label": {"bce": bce, "focal": focal},
    "regression": {"mse": mse, "l1": l1, "huber": huber},
}
