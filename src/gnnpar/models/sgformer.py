"""SGFormer: graph convolutions and, in parallel, linear attention between all nodes (Wu et al. 2023, section 4).

The branch reads the features: Z = D^-1 (N V + Q (K^T V) / (|Q| |K|)), D = N + Q (K^T 1) / (|Q| |K|), with norms over
all rows. The decoder reads w (rows of the convolutions) + (1 - w) (rows of the branch), or both concatenated.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

import torch
import torch.nn.functional as F
from annotated_types import Ge, Gt, Le
from torch import Tensor, nn

from gnnpar.folds.block import widened
from gnnpar.graph import Graph
from gnnpar.models.gcn import GCN
from gnnpar.models.gnn import GNN, Layer, ModelConfig, Probability
from gnnpar.models.initial import Linear
from gnnpar.models.norm import norm_of
from gnnpar.precision import mixed, unmixed

ROWS_MASK, GLOBAL_MASK = 3, 16  # dropout tags; gnn.py has others


def over_all_nodes(g: Graph, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Return Q (K^T V) and Q (K^T 1). Shapes: q, k [N, H, D], v [N, H, M] -> [N, H, M], [N, H, 1]."""
    q, k, v = widened(q), widened(k), F.pad(widened(v), (0, 1), value=1.0)  # K^T 1 is a column of K^T V
    with unmixed(q.device):  # sums over many rows are in fp32
        out = torch.einsum("nhd,hdm->nhm", q, g.total(torch.einsum("nhd,nhm->hdm", k, v)))
    return out[..., :-1], out[..., -1:]


class AllPairsConv(nn.Module):
    """Attention between all nodes, the mean of its heads. Without `values`, V is the input."""

    def __init__(self, dim: int, *, heads: int, values: bool) -> None:
        super().__init__()
        self.query, self.key = Linear(dim, heads * dim), Linear(dim, heads * dim)
        self.heads, self.value = heads, Linear(dim, heads * dim) if values else None

    def forward(self, g: Graph, h: Tensor) -> Tensor:
        rows = self.query(h), self.key(h), h.repeat(1, self.heads) if self.value is None else self.value(h)
        q, k, v = (widened(each).unflatten(-1, (self.heads, -1)) for each in rows)
        scale = g.total(torch.stack([each.square().sum() for each in (q, k)])).clamp_min(1e-30).rsqrt().prod()
        out, share = over_all_nodes(g, q, k, v)
        return ((g.num_nodes * v + scale * out) / (g.num_nodes + scale * share)).mean(1).to(h.dtype)


class Branch(nn.Module):
    """The branch of attention between all nodes. Shapes: x [N, F] -> [N, hidden]."""

    def __init__(self, config: SGFormer, in_dim: int) -> None:
        super().__init__()
        dims = [config.hidden] * config.global_layers
        self.first = Linear(in_dim, config.hidden)
        self.convs = nn.ModuleList(AllPairsConv(dim, heads=config.heads, values=config.values) for dim in dims)
        self.norms = nn.ModuleList(norm_of(config.global_norm, config.hidden) or nn.Identity() for _ in (0, *dims))
        self.alpha, self.p = config.alpha, config.global_dropout

    def forward(self, g: Graph, x: Tensor) -> Tensor:
        h = g.dropout(F.relu(self.norms[0](self.first(x)).to(x.dtype)), self.p, tag=GLOBAL_MASK)
        for i, conv in enumerate(self.convs, 1):
            out = self.alpha * conv(g, h) + (1 - self.alpha) * h
            h = g.dropout(self.norms[i](out).to(x.dtype), self.p, tag=GLOBAL_MASK + i)
        return h


class SGFormerNet(GNN):
    def __init__(self, config: SGFormer, in_dim: int, out_dim: int, *, cached_first_layer: bool) -> None:
        super().__init__(config, in_dim, out_dim, cached_first_layer=cached_first_layer)
        self.source, self.branch = config, Branch(config, in_dim)
        self.decoder = Linear(config.hidden * (1 + (config.combine == "cat")), out_dim)
        end = self.layers[-1]
        assert isinstance(end, Layer)
        end.plain = self.plain = config.encoder == "none"

    def forward(self, g: Graph, x: Tensor) -> Tensor:
        assert self.decoder is not None
        with mixed(x):
            far, near, w = self.branch(g.at(0), x), self.begin(g, x), self.source.graph_weight
            for i in range(self.num_layers):
                near = self.run_layer(i, g, near)
            g = g.at(self.num_layers - 1)
            rows = near[0] if self.plain else g.dropout(near[0], self.source.dropout, tag=ROWS_MASK)
            joined = torch.cat((far, rows), 1) if self.source.combine == "cat" else w * rows + (1 - w) * far
            return widened(self.decoder(joined))


class ReadsAllNodes(ModelConfig):
    """Configuration of models with layers and a separate attention between all nodes. net: class of the module. ends:
    settings of the encoder and decoder that it needs."""

    net: ClassVar[type[GNN]]
    ends: ClassVar[str] = "model.encoder=linear and model.decoder=linear"
    totals = ("the attention",)
    in_one_piece = "attention between all nodes runs beside the layers"

    def module(self, in_dim: int, out_dim: int, *, cached_first_layer: bool) -> GNN:
        name = type(self).__name__
        if self.decoder == "none" or ("encoder" in self.ends and self.encoder == "none"):
            raise ValueError(f"{name} reads rows of model.hidden before its decoder: set {self.ends}.")
        if self.jump != "none":
            raise ValueError(f"model.jump={self.jump}: {name} has a sum of its own before its decoder. Use jump=none.")
        return self.net(self, in_dim, out_dim, cached_first_layer=cached_first_layer)


@dataclass(frozen=True, kw_only=True)
class SGFormer(ReadsAllNodes, GCN):
    """Configuration of SGFormer; keys of GCN configure the convolutions.

    encoder: without one (the authors' code for small graphs), the last convolution has no norm, activation and dropout.
    alpha: weight of attention; the layer's input has 1 - alpha. values: V has its own matrix.
    """

    graph_weight: Annotated[float, Ge(0.0), Le(1.0)] = 0.8
    combine: Literal["add", "cat"] = "add"
    global_layers: Annotated[int, Ge(1)] = 1
    global_dropout: Probability = 0.2
    global_norm: Literal["none", "layer"] = "none"
    heads: Annotated[int, Ge(1), Le(1024)] = 1
    alpha: Annotated[float, Gt(0.0), Le(1.0)] = 1.0
    values: bool = False
    net = SGFormerNet
    ends = "model.decoder=linear"

    @property
    def square_matrices(self) -> float:
        return (2 + self.values) * self.heads * self.global_layers / self.num_layers
