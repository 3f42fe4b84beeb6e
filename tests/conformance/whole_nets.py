"""Models whose forward reads the rows of all nodes."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch_geometric import nn as pyg
from torch_geometric.nn import global_mean_pool
from torch_geometric.nn.models import Polynormer, SGFormer

ROWS = {  # what is made of the rows between two convolutions
    "centred": "h - h.mean(0)",
    "virtual node": "h + lin(h.sum(0, keepdim=True) / 9).tanh().expand_as(h)",
    "columns": "F.normalize(h, dim=0)",
    "attention": "h * h.softmax(0) + F.log_softmax(h, dim=0) / 9",
    "mean pool": "h + pyg.global_mean_pool(h, None)",
    "add pool": "h + pyg.global_add_pool(h, torch.zeros(len(h), dtype=torch.long)).tanh()",
    "max pool": "h + pyg.global_max_pool(h.relu(), None)",
    "max pool of a batch": "h + pyg.global_max_pool(h.relu(), h.new_zeros(len(h), dtype=torch.long))",
    "largest": "h / h.abs().max() + h.amax(dim=0)",
    "extremes": "h + torch.min(h, 0)[0] + h.max(dim=0).values",
    "standard": "(h - h.mean()) / h.std() + h.var(dim=(0, 1), unbiased=False)",
    "lengths": "h / (1 + h.norm(dim=0) + torch.linalg.norm(h, dim=0) + torch.linalg.vector_norm(h, dim=0))",
    "linear attention": "h + h.relu() @ (lin(h).relu().t() @ h) / 9",
    "einsum": "h + torch.einsum('nd,dm->nm', h, torch.einsum('nd,nm->dm', lin(h).sigmoid(), h)) / 9",
    "clusters": "h + (lin(h).softmax(1).T @ h).mean(0)",
    "aggregation": "h + pyg.MeanAggregation()(h) + pyg.SoftmaxAggregation()(h) + pyg.SumAggregation()(h).tanh()",
    "GraphNorm": "pyg.GraphNorm(8)",
    "PairNorm": "pyg.PairNorm()",
    "PairNorm by row": "pyg.PairNorm(scale_individually=True)",
    "MeanSubtractionNorm": "pyg.MeanSubtractionNorm()",
    "InstanceNorm": "pyg.InstanceNorm(8, affine=True)",
    "DiffGroupNorm": "pyg.DiffGroupNorm(8, 2)",
    "LayerNorm of the graph": "pyg.LayerNorm(8)",
    "GraphSizeNorm": "pyg.GraphSizeNorm()",
}
REFUSED = {
    "running": ("pyg.InstanceNorm(8, track_running_stats=True)", "net.norm mixes rows"),
    "number": ("h / len(h)", "depends on how many rows there are"),
    "first row": ("h + h[0]", "mixes rows"),
    "cumulative": ("h.cumsum(0) / 9", "mixes rows"),
    "all pairs": ("(h @ h.t()).softmax(1) @ h", "mixes rows"),
    "order": ("h[h[:, 0].argsort()]", "mixes rows"),
}


class Net(nn.Module):
    """`step` acts on the rows of both convolutions: an expression of h, or a norm."""

    def __init__(self, in_channels: int, out_channels: int, step: str, conv: str = "SAGEConv(8, 8)") -> None:
        super().__init__()
        self.begin, self.lin, self.end = nn.Linear(in_channels, 8), nn.Linear(8, 8), nn.Linear(8, out_channels)
        self.conv1, self.conv2 = (eval(f"pyg.{conv}") for _ in range(2))  # noqa: S307
        self.norm = eval(step) if "Norm(" in step else None  # noqa: S307
        self.step = "norm(h)" if self.norm is not None else step

    def stepped(self, h: Tensor) -> Tensor:
        known = {"h": h, "lin": self.lin, "norm": self.norm, "torch": torch, "F": F, "pyg": pyg}
        return eval(self.step, known)  # noqa: S307

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        h = self.stepped(self.conv1(self.begin(x).relu(), edge_index))
        return self.end(self.stepped(self.conv2(h.relu(), edge_index)))


def sgformer(in_channels: int, out_channels: int, **kwargs: Any) -> nn.Module:
    return SGFormer(in_channels, 8, out_channels, trans_dropout=0.0, gnn_dropout=0.0, **kwargs)


def polynormer(in_channels: int, out_channels: int, **kwargs: Any) -> nn.Module:
    """With attention over all nodes, which PyG's class leaves off until it is told."""
    kwargs |= {"in_dropout": 0.0, "dropout": 0.0, "global_dropout": 0.0, "local_layers": 2}
    net = Polynormer(in_channels, 8, out_channels, **kwargs)
    net._global = True
    return net


class Han(nn.Module):
    def __init__(self, hidden: int, out_channels: int, metadata: tuple) -> None:
        super().__init__()
        self.conv1 = pyg.HANConv(-1, hidden, metadata, heads=2)
        self.conv2, self.lin = pyg.HANConv(hidden, hidden, metadata), nn.Linear(hidden, out_channels)

    def forward(self, x_dict, edge_index_dict):
        x = {key: rows.relu() for key, rows in self.conv1(x_dict, edge_index_dict).items() if rows is not None}
        return self.lin(self.conv2(x, edge_index_dict)["a"])


class NormsByType(nn.Module):
    """A norm for each type, and rows of one type with means of another."""

    def __init__(self, hidden: int, out_channels: int, metadata: tuple) -> None:
        super().__init__()
        self.conv = pyg.HeteroConv({key: pyg.SAGEConv((-1, -1), hidden) for key in metadata[1]})
        self.norm = nn.ModuleDict({key: pyg.GraphNorm(hidden) for key in metadata[0]})
        self.lin = nn.Linear(hidden, out_channels)

    def forward(self, x_dict, edge_index_dict):
        x = {key: self.norm[key](rows).relu() for key, rows in self.conv(x_dict, edge_index_dict).items()}
        return self.lin(x["a"] + global_mean_pool(x["b"], None) + x["b"].amax(0))
