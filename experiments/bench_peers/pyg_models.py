"""The same models written with PyG's layers, the way its examples do: one process, whole graph."""

import itertools

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch_geometric import nn as pyg


def adjacency(edge_index: Tensor, num_nodes: int) -> Tensor:
    """Transposed adjacency as torch CSR, the faster of the formats PyG's sum and mean layers take."""
    src, dst = edge_index
    ones = torch.ones(edge_index.shape[1], device=edge_index.device)
    return torch.sparse_coo_tensor(torch.stack([dst, src]), ones, (num_nodes, num_nodes)).coalesce().to_sparse_csr()


class PyGModel(nn.Module):
    """Layers with dropout and an activation between them."""

    def __init__(self, kind: str, widths: list[int], *, heads: int, dropout: float) -> None:
        super().__init__()
        pairs = list(itertools.pairwise(widths))
        if kind == "gcn":  # the graph holds its self loops; cached: the normalisation is computed once
            layers = [pyg.GCNConv(a, b, add_self_loops=False, cached=True) for a, b in pairs]
        elif kind == "sage":
            layers = [pyg.SAGEConv(a, b) for a, b in pairs]
        else:
            layers = [pyg.GATConv(a, b // heads, heads=heads, add_self_loops=False) for a, b in pairs[:-1]]
            layers.append(pyg.GATConv(*pairs[-1], heads=1, concat=False, add_self_loops=False))
        self.layers = nn.ModuleList(layers)
        self.activation, self.p = (F.elu if kind == "gat" else F.relu), dropout

    def forward(self, x: Tensor, edges: Tensor) -> Tensor:
        for layer in self.layers[:-1]:
            x = F.dropout(self.activation(layer(x, edges)), self.p, self.training)
        return self.layers[-1](x, edges)
