"""Seconds of each layer, forward and backward, measured on one rank: what a balanced cut into stages is made of.

They decide who computes what and when, never a number: a pipeline's results do not depend on its stages.
"""

from __future__ import annotations

import copy
import time

import torch
from torch import Tensor

from gnnpar.data.dataset import Dataset
from gnnpar.folds.block import Rows
from gnnpar.models.gnn import GNN
from gnnpar.parallel.local import Pass
from gnnpar.parallel.whole import WholeGraph
from gnnpar.partition.shard import cut

_REPEATS = 3


def layer_seconds(
    model: GNN, dataset: Dataset, *, device: torch.device, dtype: torch.dtype = torch.float32
) -> list[float]:
    """Of the whole graph, the fastest of three; the encoder counts for the first layer, the decoder for the last."""
    model = copy.deepcopy(model).to(device, dtype)
    shard = cut(dataset, torch.zeros(dataset.num_nodes, dtype=torch.int64), 1, edge_ids=model.needs_edge_ids)[0]
    shard = shard.to(device, dtype)
    graph = WholeGraph(shard, Pass(0, training=True))
    carry, seconds = model.begin(graph, shard.x), []
    for i in range(model.num_layers):
        entering = tuple(t.detach() for t in carry)
        runs = [_run(model, graph, i, shard.x, entering) for _ in range(_REPEATS)]
        carry = runs[-1][0]
        seconds.append(min(each for _, each in runs))
    return seconds


def _run(model: GNN, graph: WholeGraph, i: int, x: Tensor, entering: Rows) -> tuple[Rows, float]:
    """(carry, seconds) of one layer."""
    leaves = tuple(t.clone().requires_grad_() for t in entering)
    _synchronize(x)
    began = time.perf_counter()
    carry = model.layers[i](graph.at(i), model.begin(graph, x) if i == 0 else leaves)
    ends = (model.end(graph, carry),) if i == model.num_layers - 1 else carry
    torch.autograd.backward(ends, [torch.ones_like(t) for t in ends])
    _synchronize(x)
    return carry, time.perf_counter() - began


def _synchronize(x: Tensor) -> None:
    if x.is_cuda:
        torch.cuda.synchronize(x.device)
