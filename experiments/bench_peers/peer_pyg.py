"""Run the models on PyG's layers, in one process: eager, compiled by torch.compile, or with iSpLib's sums.

GCN and GraphSAGE read torch CSR, GAT the edge list. Compiled, all read the edge list: torch.compile does not take CSR.
With iSpLib they read torch_sparse's matrix, which its plugin multiplies.
"""

import sys
from pathlib import Path

import torch
import torch.nn.functional as F

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent / "epoch_speed")]

from pyg_models import PyGModel, adjacency
from serve import Epoch, Job, serve

job = Job.of_command_line()


def make() -> Epoch:
    edges, x, y = job.array("edges"), job.array("x"), job.array("y")
    weights = job.weights()
    first = {"gcn": "weight", "sage": "neighbours", "gat": "weight"}[job.model]
    widths = [x.shape[1], *(layer[first].shape[0] for layer in weights)]
    model = PyGModel(job.model, widths, heads=4, dropout=0.0).train()
    with torch.no_grad():
        for layer, given in zip(model.layers, weights, strict=True):
            if job.model == "gcn":
                layer.lin.weight.copy_(given["weight"])
                layer.bias.copy_(given["bias"])
            elif job.model == "sage":  # the bias is that of lin_l
                layer.lin_l.weight.copy_(given["neighbours"])
                layer.lin_l.bias.copy_(given["own.bias"])
                layer.lin_r.weight.copy_(given["own.weight"])
            else:
                layer.lin.weight.copy_(given["weight"])
                layer.att_src.copy_(given["attend_src"][None])
                layer.att_dst.copy_(given["attend_dst"][None])
                layer.bias.copy_(given["bias"])
    graph = edges if job.model == "gat" or job.kind == "pyg compiled" else adjacency(edges, len(x))
    if job.kind == "pyg compiled":
        model.compile(dynamic=False)
    elif job.kind == "isplib":
        from isplib import iSpLibPlugin
        from torch_sparse import SparseTensor

        iSpLibPlugin.patch_pyg()
        graph = SparseTensor(row=edges[1], col=edges[0], sparse_sizes=(len(x), len(x)))
    train = job.array("train").nonzero().flatten()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)

    def epoch() -> float:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x, graph)[train], y[train])
        loss.backward()
        optimizer.step()
        return loss.item()

    return epoch


serve(job, make)
