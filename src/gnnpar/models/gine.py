"""GINE: Y = MLP((1 + eps) X + sum_j relu(x_j + W e_ij + b)), with edge attributes e_ij (Hu et al. 2020, section 5).
Without edge attributes, the sum is over relu(x_j)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gnnpar.folds.block import Rows
from gnnpar.folds.generic import Generic
from gnnpar.graph import Graph, Local
from gnnpar.models.gin import GINConv
from gnnpar.models.gnn import ReadsAttributes


def rectified(src: Rows, dst: Rows, edge: Rows, shared: Rows) -> Tensor:
    """Return relu(x_j + W e_ij + b). Called per chunk of edges, so the encoded rows of all edges never exist."""
    return torch.relu(src[0] + F.linear(edge[0], *shared))


class GINEConv(GINConv):
    def message(self, g: Local, h: Tensor) -> Rows:
        return (h if self.edges is not None else torch.relu(h),)

    def total(self, g: Graph, src: Rows, edge: Rows) -> Tensor:
        if self.edges is None:
            return super().total(g, src, edge)
        return g.aggregate(Generic(value=rectified), src, (), edge, (self.edges.weight, self.edges.bias))


@dataclass(frozen=True, kw_only=True)
class GINE(ReadsAttributes):
    """Configuration of GINE: the fields of GIN, and edge_dim."""

    def conv(self, in_dim: int, out_dim: int, *, index: int, aggregate_first: bool) -> nn.Module:
        self.only_order("aggregate_first", "GINE transforms the sum")
        return GINEConv(in_dim, out_dim, hidden=self.hidden, edge_dim=self.edge_dim or 0)
