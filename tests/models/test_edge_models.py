"""gnnpar's own models that read edge_attr: PyG's layers with the same weights, and themselves under strategies."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch_geometric import nn as pyg

from composing import configured
from gnnpar.models.gine import GINEConv
from gnnpar.models.initial import draw_glorot
from gnnpar.models.transformer import TransformerConv
from gnnpar.parallel.local import Pass
from gnnpar.parallel.whole import WholeGraph
from gnnpar.partition.shard import cut
from gnnpar.planner.extract import record
from gnnpar.verify.conformance import check, small_graph
from gnnpar.verify.edges import WIDTH, with_edge_data

IN, OUT, HEADS = 6, 8, 2


def gine(edge_dim: int) -> tuple[nn.Module, Any]:
    network = nn.Sequential(nn.Linear(IN, 7), nn.ReLU(), nn.Linear(7, OUT))
    return GINEConv(IN, OUT, hidden=7, edge_dim=edge_dim), pyg.GINEConv(network, train_eps=True, edge_dim=edge_dim)


def transformer(edge_dim: int, *, average: bool, gated: bool) -> tuple[nn.Module, Any]:
    ours = TransformerConv(IN, OUT, heads=HEADS, average=average, attention_dropout=0.0, gated=gated, edge_dim=edge_dim)
    width = OUT if average else OUT // HEADS
    dim = edge_dim or None
    return ours, pyg.TransformerConv(IN, width, heads=HEADS, concat=not average, beta=gated, edge_dim=dim)


LAYERS = {
    "gine": lambda dim: gine(dim),
    "transformer": lambda dim: transformer(dim, average=False, gated=False),
    "transformer, gated": lambda dim: transformer(dim, average=False, gated=True),
    "transformer, averaged": lambda dim: transformer(dim, average=True, gated=True),
}
NAMES = {
    "inside": "nn.0",
    "outside": "nn.2",
    "query": "lin_query",
    "key": "lin_key",
    "value": "lin_value",
    "skip": "lin_skip",
    "gate": "lin_beta",
}


def pairs(ours: nn.Module, theirs: nn.Module) -> Iterator[tuple[Tensor, Tensor]]:
    """Parameters of ours and PyG's, by name."""
    others = dict(theirs.named_parameters())
    for name, mine in ours.named_parameters():
        head, _, leaf = name.partition(".")
        to = {**NAMES, "edges": "lin" if isinstance(theirs, pyg.GINEConv) else "lin_edge"}
        yield mine, others.pop("eps" if head == "eps" else f"{to[head]}.{leaf}")
    for name, other in others.items():
        assert name == "lin_key.bias", "which no result depends on"
        nn.init.zeros_(other)


@pytest.mark.parametrize(("layer", "edge_dim"), [*((layer, WIDTH) for layer in LAYERS), ("transformer, gated", 0)])
def test_equals_pyg(layer: str, edge_dim: int) -> None:
    data = with_edge_data(small_graph(), {"attr"} if edge_dim else set())
    shard = cut(data, torch.zeros(data.num_nodes).long(), 1, edge_ids=True)[0]
    view = WholeGraph(shard.to(torch.device("cpu"), torch.float64), Pass(0))
    ours, theirs = (each.double() for each in LAYERS[layer](edge_dim))
    draw_glorot(ours, 5)
    matched = list(pairs(ours, theirs))
    with torch.no_grad():
        for mine, other in matched:
            if mine.ndim < 2:
                mine.copy_(torch.linspace(-0.5, 0.5, mine.numel(), dtype=torch.float64).view_as(mine))
            other.copy_(mine.view_as(other))
    x = torch.randn(data.num_nodes, IN, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    x.requires_grad_()
    attr = () if not edge_dim else (view.edge_attr,)
    got, want = ours(view, x), theirs(x, data.edge_index, *attr)
    assert torch.allclose(got, want, rtol=1e-9, atol=1e-12)
    mine = torch.autograd.grad(got.square().sum(), [x, *(a for a, _ in matched)])
    wanted = torch.autograd.grad(want.square().sum(), [x, *(b for _, b in matched)])
    for a, b in zip(mine, wanted, strict=True):
        assert torch.allclose(a, b.view_as(a), rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("model", ["gine", "transformer"])
def test_attributes_that_are_not_there_are_a_line(model: str) -> None:
    data = small_graph()
    config = configured("model", model, f"model.edge_dim={WIDTH}")
    with pytest.raises(ValueError, match=r"model\.edge_dim=3, but edge_attr of the dataset has width 0"):
        config.on(data.edge_sizes)
    shard = cut(data, torch.zeros(data.num_nodes).long(), 1, edge_ids=True)[0]
    with pytest.raises(ValueError, match="reads 3 attributes of each edge, and the graph has none"):
        config.build(6, 3, seed=0)(WholeGraph(shard, Pass(0)), shard.x)


@pytest.mark.parametrize("model", ["gine", "transformer"])
def test_the_planner_sees_what_edges_carry(model: str) -> None:
    plain, wide = (configured("model", model, f"model.edge_dim={dim}").build(6, 3, seed=0) for dim in (0, WIDTH))
    ir = record(wide, 6)
    assert [fold.edge for i in range(2) for fold in ir.folds(i)] == [(WIDTH,)] * 2
    assert [fold.edge for i in range(2) for fold in record(plain, 6).folds(i)] == [()] * 2


def test_attention_dropout_is_keyed_by_edge() -> None:
    config = configured("model", "transformer", "model.hidden=8", "model.attention_dropout=0.4")
    (case,) = check(configured("strategy", "graph_parallel"), {"transformer": config}, worlds=(3,))
    assert case.passed
