"""Symmetric normalisation in the weights of edges: the same sums and gradients as rows scaled before and after."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from gnnpar.comm import ThreadWorld
from gnnpar.graph import SymmetricSums
from gnnpar.models.gcn import GCN
from gnnpar.models.gcnii import GCNII
from gnnpar.parallel.local import Pass
from gnnpar.parallel.single.view import SingleGraph
from gnnpar.parallel.view import FeatureCache
from gnnpar.parallel.whole import WholeGraph
from gnnpar.partition.shard import Shard
from gnnpar.verify.conformance import small_graph

MODELS = {
    "gcn": GCN(num_layers=3, hidden=16),
    "gcnii": GCNII(num_layers=3, hidden=16, encoder="linear", decoder="linear"),
}


def shard_of() -> Shard:
    (comm,) = ThreadWorld(1).communicators()
    data = small_graph()
    shard = Shard.open(data, torch.zeros(data.num_nodes, dtype=torch.int64), comm)
    return shard.to(torch.device("cpu"), torch.float64)


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("cached", [False, True])
def test_losses_and_gradients(model: str, cached: bool) -> None:
    shard, run = shard_of(), Pass(0, 1, training=True)
    net = MODELS[model].build(shard.x.shape[1], 3, seed=0).double()
    found = []
    for view in (
        WholeGraph(shard, run),
        SingleGraph(shard, run, cache=FeatureCache() if cached and model == "gcn" else None),
    ):
        out = net(view, shard.x)
        found.append((out, *torch.autograd.grad(out.square().sum(), list(net.parameters()))))
    for expected, got in zip(*found, strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-11, atol=1e-11)


class Widest(TorchDispatchMode):
    """Products by entry of two tensors with a row a node."""

    def __init__(self, rows: int) -> None:
        super().__init__()
        self.rows, self.count = rows, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if func is torch.ops.aten.mul.Tensor and out.ndim == 2 and out.shape[0] == self.rows and out.shape[1] > 1:
            self.count += 1
        return out


def test_no_pass_scales_rows() -> None:
    """Two a layer forward, two backward (layer 0: none) where rows are scaled; none where edges are."""
    shard, run = shard_of(), Pass(0, 1, training=True)
    net = GCN(num_layers=3, hidden=16, dropout=0.0).build(shard.x.shape[1], 3, seed=0).double()
    counts = []
    for view in (WholeGraph(shard, run), SingleGraph(shard, run)):
        with Widest(len(shard.x)) as passes:
            torch.autograd.grad(net(view, shard.x).sum(), list(net.parameters()))
        counts.append(passes.count)
    assert counts[0] >= 10
    assert counts[1] == 0
    assert isinstance(SingleGraph(shard, run), SymmetricSums)
    assert not isinstance(WholeGraph(shard, run), SymmetricSums)


def test_the_weights_are_counted_as_structure() -> None:
    shard = shard_of()
    before = shard.inner.nbytes
    block = shard.inner.scaled(torch.rand(len(shard.x), dtype=torch.float64))
    assert shard.inner.scaled(torch.rand(len(shard.x), dtype=torch.float64)) is block
    edges = shard.inner.num_edges
    assert shard.inner.nbytes >= before + 8 * edges
    middle = shard.inner.nbytes
    assert len(block.reverse.indices) == edges
    assert shard.inner.nbytes >= middle + 8 * edges
