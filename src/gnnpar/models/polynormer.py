"""Polynormer: gated GAT layers, and gated linear attention between all nodes over their sum (Deng et al. 2024).

Local layer: X' = (1 - b) LN(relu(X A) * M) + b M, M = dropout(relu(GAT(X) + X B)) (section 3, with the authors' relu).
Global layer of LN(sum of X'): X' = dropout(relu((LN(K (K^T V) / K (K^T 1)) * (X A + b)) C)), K = sigmoid(X B). The
authors train the decoder of local rows first, then the one of global rows; here the logits are the sum of both.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import torch
import torch.nn.functional as F
from annotated_types import Ge, Le
from torch import Tensor, nn

from gnnpar.folds.block import widened
from gnnpar.graph import Graph
from gnnpar.models.gat import GATConv
from gnnpar.models.gnn import GNN, Layer, Probability
from gnnpar.models.initial import Linear
from gnnpar.models.sgformer import GLOBAL_MASK, ROWS_MASK, ReadsAllNodes, over_all_nodes
from gnnpar.precision import mixed


class Gated(nn.Module):
    """Base of local and global layers: a gate, a norm, and a learned scalar b per column."""

    def __init__(self, config: Polynormer, dim: int) -> None:
        super().__init__()
        self.gate, self.norm, self.heads = Linear(dim, dim), nn.LayerNorm(dim), config.heads
        self.number = nn.Parameter(torch.full((dim,), config.beta or 0.0))
        self.bounded = nn.Sigmoid() if config.beta is None else nn.Identity()


class LocalConv(Gated):
    """A local layer, with its dropout."""

    def __init__(self, config: Polynormer, dim: int) -> None:
        super().__init__(config, dim)
        self.conv = GATConv(dim, dim, heads=config.heads, average=False, slope=0.2, attention_dropout=0.0)
        self.own, self.p = Linear(dim, dim), config.dropout
        self.before = nn.LayerNorm(dim) if config.pre_norm else nn.Identity()

    def forward(self, g: Graph, h: Tensor) -> Tensor:
        h = self.before(h).to(h.dtype)
        out = g.dropout(F.relu(self.conv(g, h) + self.own(h)), self.p, tag=ROWS_MASK)
        b = self.bounded(self.number)
        return (1 - b) * self.norm(F.relu(self.gate(h)) * out) + b * out


class GlobalConv(Gated):
    """Attention between all nodes, times a gate. Queries are the keys."""

    def __init__(self, config: Polynormer, dim: int) -> None:
        super().__init__(config, dim)
        self.key, self.value = Linear(dim, dim), Linear(dim, dim)

    def forward(self, g: Graph, h: Tensor) -> Tensor:
        k, v = (each.unflatten(-1, (self.heads, -1)) for each in (torch.sigmoid(self.key(h)), self.value(h)))
        out, total = over_all_nodes(g, k, k, v)
        return self.norm((out / total).flatten(1).to(h.dtype)) * (self.gate(h) + self.bounded(self.number))


class PolynormerNet(GNN):
    def __init__(self, config: Polynormer, in_dim: int, out_dim: int, *, cached_first_layer: bool) -> None:
        super().__init__(config, in_dim, out_dim, cached_first_layer=cached_first_layer)
        for layer in (each for each in self.layers if isinstance(each, Layer) and each.index):
            layer.p = 0.0  # the previous layer applies dropout
        self.source, self.norm, self.mix = config, nn.LayerNorm(config.hidden), Linear(config.hidden, config.hidden)
        self.attention = nn.ModuleList(GlobalConv(config, config.hidden) for _ in range(config.global_layers))
        self.local_decoder = Linear(config.hidden, out_dim)

    def forward(self, g: Graph, x: Tensor) -> Tensor:
        rows, near = self.begin(g, x), torch.zeros((), dtype=x.dtype, device=x.device)
        for i in range(self.num_layers):
            rows = self.run_layer(i, g, rows)
            near = near + rows[0]
        g = g.at(self.num_layers - 1)
        assert self.decoder is not None
        with mixed(x):
            h = self.norm(near).to(x.dtype)
            for i, conv in enumerate(self.attention):
                h = g.dropout(F.relu(self.mix(conv(g, h))), self.source.global_dropout, tag=GLOBAL_MASK + i)
            return widened(self.decoder(h) + self.local_decoder(near))


@dataclass(frozen=True, kw_only=True)
class Polynormer(ReadsAllNodes):
    """Configuration of Polynormer. hidden: width of all heads together. beta: initial b; null: a sigmoid of learned
    numbers. pre_norm: LayerNorm before every local layer."""

    heads: Annotated[int, Ge(1), Le(1024)] = 8
    global_layers: Annotated[int, Ge(1)] = 2
    global_dropout: Probability = 0.5
    beta: Annotated[float, Ge(0.0), Le(1.0)] | None = None
    pre_norm: bool = False
    net = PolynormerNet
    activation = nn.Identity()

    @property
    def square_matrices(self) -> float:
        return 2.0 + (1 + 3 * self.global_layers) / self.num_layers

    def conv(self, in_dim: int, out_dim: int, *, index: int, aggregate_first: bool) -> nn.Module:
        self.only_order("transform_first", "attention scores read the transformed rows")
        if self.hidden % self.heads:
            raise ValueError(f"model.hidden={self.hidden}: must be a multiple of model.heads={self.heads}.")
        return LocalConv(self, in_dim)
