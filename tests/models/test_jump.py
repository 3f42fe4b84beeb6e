"""Jumping knowledge: PyG's JumpingKnowledge on one device, and what it reads travels through pipelines."""

from typing import Any

import pytest
import torch
from torch_geometric.nn import models

from composing import configured
from gnnpar.comm import ThreadWorld
from gnnpar.parallel.local import Pass
from gnnpar.parallel.whole import WholeGraph
from gnnpar.partition.shard import Shard
from gnnpar.verify.conformance import small_graph

DATA = small_graph()
FIELDS = ("model.hidden=8", "model.num_layers=3", "model.decoder=linear")


@pytest.mark.parametrize("jump", ["last", "cat", "max"])
def test_it_is_pygs(jump):
    """GraphSAGE of PyG with the same weights, in fp64."""
    ours = configured("model", "sage", *FIELDS, f"model.jump={jump}").build(6, 3, seed=0).double()
    theirs: Any = models.GraphSAGE(6, 8, 3, 3, jk=jump).double()
    with torch.no_grad():
        for layer, conv in zip(ours.layers, theirs.convs, strict=True):
            conv.lin_l.weight.copy_(layer.conv.neighbours)
            conv.lin_l.bias.copy_(layer.conv.own.bias)
            conv.lin_r.weight.copy_(layer.conv.own.weight)
        theirs.lin.weight.copy_(ours.decoder.weight)
        theirs.lin.bias.copy_(ours.decoder.bias)
    (comm,) = ThreadWorld(1).communicators()
    shard = Shard.open(DATA, torch.zeros(DATA.num_nodes).long(), comm).to(torch.device("cpu"), torch.float64)
    mine, wanted = ours(WholeGraph(shard, Pass(0)), shard.x), theirs(shard.x, DATA.edge_index)
    assert torch.allclose(mine, wanted, rtol=1e-9, atol=1e-12)
    (gradient,) = torch.autograd.grad(mine.square().sum(), [ours.layers[0].conv.neighbours])
    (theirs_too,) = torch.autograd.grad(wanted.square().sum(), [theirs.convs[0].lin_l.weight])
    assert torch.allclose(gradient, theirs_too, rtol=1e-9, atol=1e-12)


def test_widths_of_the_carry():
    cat, largest = (configured("model", "gcnii", "model.hidden=8", f"model.jump={each}") for each in ("cat", "max"))
    assert [len(cat.build(6, 3, seed=0).activation_widths(i)) for i in range(4)] == [2, 2, 3, 4]
    assert [len(largest.build(6, 3, seed=0).activation_widths(i)) for i in range(4)] == [2, 2, 3, 3]


def test_without_a_decoder_it_is_refused():
    with pytest.raises(ValueError, match=r"model\.jump=cat gives rows of model\.hidden to a decoder"):
        configured("model", "gcn", "model.jump=cat").build(6, 3, seed=0)
