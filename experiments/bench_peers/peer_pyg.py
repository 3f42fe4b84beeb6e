"""Run the models on PyG's layers, in one process: eager, compiled by torch.compile, or with iSpLib's sums.

GCN and GraphSAGE read torch CSR, GAT the edge list. Compiled, all read the edge list: torch.compile does not take CSR.
With iSpLib they read torch_sparse's matrix, which its plugin multiplies.
"""

from pyg_models import PyGModel, adjacency
from serve import Epoch, Job, fill, serve, training

NAMES = {  # parameters of a layer -> the initial weights
    "gcn": {"lin.weight": "weight", "bias": "bias"},
    "sage": {"lin_l.weight": "neighbours", "lin_l.bias": "own.bias", "lin_r.weight": "own.weight"},
    "gat": {"lin.weight": "weight", "att_src": "attend_src", "att_dst": "attend_dst", "bias": "bias"},
}
job = Job.of_command_line()


def make() -> Epoch:
    edges, x, y = job.array("edges"), job.array("x"), job.array("y")
    weights, names = job.weights(), NAMES[job.model]
    widths = [x.shape[1], *(layer[next(iter(names.values()))].shape[0] for layer in weights)]
    model = PyGModel(job.model, widths, heads=4, dropout=job.dropout).train()
    for layer, given in zip(model.layers, weights, strict=True):
        fill(layer, given, names)
    graph = edges if job.model == "gat" or job.kind == "pyg compiled" else adjacency(edges, len(x))
    if job.kind == "pyg compiled":
        model.compile(dynamic=False)
    elif job.kind == "isplib":
        from isplib import iSpLibPlugin
        from torch_sparse import SparseTensor

        iSpLibPlugin.patch_pyg()
        graph = SparseTensor(row=edges[1], col=edges[0], sparse_sizes=(len(x), len(x)))
    return training(model, lambda: model(x, graph), y, job.array("train").nonzero().flatten())


serve(job, make)
