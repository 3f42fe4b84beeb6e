"""Models whose forward reads the rows of all nodes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch_geometric import nn as pyg
from torch_geometric.nn import global_add_pool, global_max_pool, global_mean_pool
from torch_geometric.nn.attention import PolynormerAttention, SGFormerAttention
from torch_geometric.nn.models import Polynormer, SGFormer

Step = Callable[[Tensor, nn.Module], Tensor]

STEPS: dict[str, Step] = {  # of rows between two convolutions; lin is a layer of the model
    "centred": lambda h, lin: h - h.mean(0),
    "virtual node": lambda h, lin: h + lin(h.sum(0, keepdim=True) / 9).tanh().expand_as(h),
    "columns": lambda h, lin: F.normalize(h, dim=0),
    "attention": lambda h, lin: h * h.softmax(0) + F.log_softmax(h, dim=0) / 9,
    "mean pool": lambda h, lin: h + global_mean_pool(h, None),
    "add pool": lambda h, lin: h + global_add_pool(h, torch.zeros(len(h), dtype=torch.long)).tanh(),
    "max pool": lambda h, lin: h + global_max_pool(h.relu(), None),
    "max pool of a batch": lambda h, lin: h + global_max_pool(h.relu(), h.new_zeros(len(h), dtype=torch.long)),
    "largest": lambda h, lin: h / h.abs().max() + h.amax(dim=0),
    "extremes": lambda h, lin: h + torch.min(h, 0)[0] + h.max(dim=0).values,
    "standard": lambda h, lin: (h - h.mean()) / h.std() + h.var(dim=(0, 1), unbiased=False),
    "lengths": lambda h, lin: h / (1 + h.norm(dim=0) + torch.linalg.norm(h, dim=0)),
    "vector norm": lambda h, lin: h / (1 + torch.linalg.vector_norm(h, dim=0)),
    "linear attention": lambda h, lin: h + h.relu() @ (lin(h).relu().t() @ h) / 9,
    "einsum": lambda h, lin: h + torch.einsum("nd,dm->nm", h, torch.einsum("nd,nm->dm", lin(h).sigmoid(), h)) / 9,
    "clusters": lambda h, lin: h + (lin(h).softmax(1).T @ h).mean(0),
    "aggregation": lambda h, lin: h + pyg.MeanAggregation()(h) + pyg.SumAggregation()(h).tanh(),
    "softmax aggregation": lambda h, lin: h + pyg.SoftmaxAggregation()(h),
    "as many rows as columns": lambda h, lin: (
        h + (h.T @ h).mean() + h.T.mean(1) + torch.stack([h, -h.exp()], 1).mean((0, 1))
    ),
    "equal entries": lambda h, lin: (
        h + h.relu().max(0).values + h.relu().max(0).indices.to(h.dtype) / 9 + h.relu().amin(0)
    ),
    "ones without a mark": lambda h, lin: h + torch.einsum("nd,n->d", h, torch.ones(len(h), dtype=h.dtype)) / 9,
    "PairNorm by hand": lambda h, lin: (h - h.mean(0)) / (1e-6 + (h - h.mean(0)).pow(2).sum(1).mean()).sqrt(),
    "deviation": lambda h, lin: h / (1 + h.std(0)),
    "norm of all": lambda h, lin: h / h.norm(),
    "each row alone": lambda h, lin: (
        F.normalize(h, dim=1)
        + h.softmax(1)
        + (h.view(len(h), 2, 4).softmax(1) * h.view(len(h), 2, 4)).flatten(1)
        + h / (1 + h.abs().amax(1, keepdim=True))
    ),
}
NORMS: dict[str, Callable[[], nn.Module]] = {
    "GraphNorm": lambda: pyg.GraphNorm(8),
    "PairNorm": lambda: pyg.PairNorm(),
    "PairNorm by row": lambda: pyg.PairNorm(scale_individually=True),
    "MeanSubtractionNorm": lambda: pyg.MeanSubtractionNorm(),
    "InstanceNorm": lambda: pyg.InstanceNorm(8, affine=True),
    "DiffGroupNorm": lambda: pyg.DiffGroupNorm(8, 2),
    "LayerNorm of the graph": lambda: pyg.LayerNorm(8),
    "GraphSizeNorm": lambda: pyg.GraphSizeNorm(),
    "attention over a node's hops": lambda: Hops(),
    "shadowed attention": lambda: shadowed(),
}
ROWS = (*STEPS, *NORMS)
NORMS["running"] = lambda: pyg.InstanceNorm(8, track_running_stats=True)


class _Scaled(torch.autograd.Function):
    """The forward is local to rows, the backward is not."""

    @staticmethod
    def forward(ctx: Any, h: Tensor) -> Tensor:
        return h.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return grads[0] / grads[0].norm()


def _top(h: Tensor) -> Tensor:
    return h * torch.zeros(len(h)).index_fill(0, h.sum(1).topk(min(5, len(h))).indices, 1.0)[:, None].to(h.dtype)


MIXING: dict[str, Step] = {  # rows depend on others otherwise than by sums and maxima
    "number": lambda h, lin: h / len(h),
    "first row": lambda h, lin: h + h[0],
    "cumulative": lambda h, lin: h.cumsum(0) / 9,
    "all pairs": lambda h, lin: (h @ h.t()).softmax(1) @ h,
    "scaled dot products": lambda h, lin: h + F.scaled_dot_product_attention(h[None], h[None], h[None])[0],
    "order": lambda h, lin: h[h[:, 0].argsort()],
    "sorted": lambda h, lin: h + h.sort(0).values,
    "best rows": lambda h, lin: _top(h),
    "median": lambda h, lin: h - h.median(0).values,
    "flip": lambda h, lin: h + h.flip(0),
    "roll": lambda h, lin: h + h.roll(1, 0),
    "positions": lambda h, lin: h + torch.sin(torch.arange(len(h), dtype=h.dtype))[:, None],
    "scaled gradient": lambda h, lin: _Scaled.apply(h),  # type: ignore[return-value]
}
REFUSED = {  # what the line says
    "running": "net.norm mixes rows",
    **dict.fromkeys(MIXING, "mixes rows"),
    **dict.fromkeys(("number", "positions"), "depends on how many rows there are"),
}
STEPS |= MIXING


class Hops(nn.Module):
    """Attention between two hops of each node: rows stay alone."""

    def __init__(self) -> None:
        super().__init__()
        self.attn = PolynormerAttention(8, heads=1, head_channels=8)

    def forward(self, h: Tensor) -> Tensor:
        return self.attn(torch.stack([h, h.tanh()], 1)).mean(1)


def shadowed() -> nn.Module:
    attention = SGFormerAttention(8, 1, 8)
    vars(attention)["forward"] = lambda h: 2 * h.tanh()
    return attention


class Net(nn.Module):
    """`step` acts on the rows of both convolutions."""

    def __init__(self, in_channels: int, out_channels: int, step: str) -> None:
        super().__init__()
        self.begin, self.lin, self.end = nn.Linear(in_channels, 8), nn.Linear(8, 8), nn.Linear(8, out_channels)
        self.conv1, self.conv2 = pyg.SAGEConv(8, 8), pyg.SAGEConv(8, 8)
        self.norm, self.step = NORMS[step]() if step in NORMS else None, step

    def stepped(self, h: Tensor) -> Tensor:
        return STEPS[self.step](h, self.lin) if self.norm is None else self.norm(h)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        h = self.stepped(self.conv1(self.begin(x).relu(), edge_index))
        return self.end(self.stepped(self.conv2(h.relu(), edge_index)))


def sgformer(in_channels: int, out_channels: int, **kwargs: Any) -> nn.Module:
    return SGFormer(in_channels, 8, out_channels, trans_dropout=0.0, gnn_dropout=0.0, **kwargs)


def polynormer(in_channels: int, out_channels: int, **kwargs: Any) -> nn.Module:
    """With attention over all nodes, which PyG's class leaves off until it is told."""
    without = {"in_dropout": 0.0, "dropout": 0.0, "global_dropout": 0.0, "local_layers": 2}
    net = Polynormer(in_channels, 8, out_channels, **(without | kwargs))
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
