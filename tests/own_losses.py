"""A PyG model with fixed weights, and losses, metrics and callbacks as users write them. Nothing here knows gnnpar."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn
from torch_geometric.nn import SAGEConv


class Net(nn.Module):
    def __init__(self, in_channels, out_channels, end=""):
        super().__init__()
        self.conv1, self.conv2, self.end = SAGEConv(in_channels, 8), SAGEConv(8, out_channels), end
        generator = torch.Generator().manual_seed(0)
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=generator) / 2)

    def forward(self, x, edge_index):
        x = self.conv2(self.conv1(x, edge_index).relu(), edge_index)
        if self.end == "broken":
            return x / (1 // len(x[:0]))
        return {"": x, "sigmoid": x.sigmoid(), "log_softmax": x.log_softmax(-1)}[self.end]


def row_loss(logits, y):
    """One value a row."""
    return F.cross_entropy(logits, y, reduction="none").square()


def mean_loss(logits, y):
    """A mean that is one number."""
    return F.cross_entropy(logits, y) * 2


def mixed_loss(logits, y):
    """One number that is no mean over rows."""
    return F.cross_entropy(logits, y).square()


def first_logit(logits, y):
    """A metric that depends on the order of rows."""
    return (logits[:, 0] * torch.arange(len(y))).sum() / len(y)


def stop_after_two(epoch, metrics):
    return epoch == 1 and metrics["epoch"] == 1
