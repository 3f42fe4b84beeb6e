"""ResGCN+: X + mean-conv(dropout(relu(norm(X)))), pre-activated residual layers (Li et al. 2020, DeeperGCN)."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from gnnpar.models.gnn import ModelConfig
from gnnpar.models.sage import SAGEConv


@dataclass(frozen=True, kw_only=True)
class ResGCN(ModelConfig):
    """Configuration of ResGCN+, with GraphSAGE's mean convolution as in the deep-GNN experiments of GNNPipe."""

    pre_activation = True

    def conv(self, in_dim: int, out_dim: int, *, index: int, aggregate_first: bool) -> nn.Module:
        return SAGEConv(in_dim, out_dim, aggregator="mean", aggregate_first=aggregate_first)
