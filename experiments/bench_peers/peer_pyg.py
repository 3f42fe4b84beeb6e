"""Worker: the models on PyG's layers, the way its examples write them, in one process on the whole graph.

kind is `pyg`, `pyg compiled` (by torch.compile) or `isplib` (with iSpLib's sums). GCN and GraphSAGE read torch CSR, GAT
the edge list. Compiled, all read the edge list: torch.compile does not take CSR. With iSpLib they read torch_sparse's
matrix, which its plugin multiplies.
"""

import itertools
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
import torch.nn.functional as F
from bench_peers.serve import Epoch, Job, fill, serve, training
from torch import Tensor, nn
from torch_geometric import nn as pyg

NAMES = {  # parameters of a layer -> the initial weights
    "gcn": {"lin.weight": "weight", "bias": "bias"},
    "sage": {"lin_l.weight": "neighbours", "lin_l.bias": "own.bias", "lin_r.weight": "own.weight"},
    "gat": {"lin.weight": "weight", "att_src": "attend_src", "att_dst": "attend_dst", "bias": "bias"},
}


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


def make(job: Job) -> Epoch:
    given, names = job.inputs, NAMES[job.model]
    edges, x, weights = given["edges"], given["x"], given[job.model]
    widths = [x.shape[1], *(layer[next(iter(names.values()))].shape[0] for layer in weights)]
    model = PyGModel(job.model, widths, heads=4, dropout=job.dropout).train()
    for layer, same in zip(model.layers, weights, strict=True):
        fill(layer, same, names)
    graph = edges if job.model == "gat" or job.kind == "pyg compiled" else adjacency(edges, len(x))
    if job.kind == "pyg compiled":
        model.compile(dynamic=False)
    elif job.kind == "isplib":
        from isplib import iSpLibPlugin
        from torch_sparse import SparseTensor

        iSpLibPlugin.patch_pyg()
        graph = SparseTensor(row=edges[1], col=edges[0], sparse_sizes=(len(x), len(x)))
    return training(model, lambda: model(x, graph), given["y"], given["train"].nonzero().flatten())


if __name__ == "__main__":
    serve(make)
