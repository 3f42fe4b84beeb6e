"""Every convolution equals PyG's own layer on the whole graph: output and gradients, weights copied over (fp64)."""

import math

import pytest
import torch
from torch import nn
from torch_geometric import nn as pyg

from gnnpar.models.gat import GATConv
from gnnpar.models.gatv2 import GATv2Conv
from gnnpar.models.gcn import GCNConv
from gnnpar.models.gcnii import GCNIIConv
from gnnpar.models.gin import GINConv
from gnnpar.models.initial import draw_glorot
from gnnpar.models.sage import SAGEConv
from gnnpar.parallel.local import Pass
from gnnpar.parallel.whole import WholeGraph
from gnnpar.partition.shard import cut
from gnnpar.verify.conformance import small_graph
from graphs import dataset_of, with_weights

IN, OUT, HEADS = 6, 8, 2


def _pairs(ours, theirs, case):
    """(our parameter, PyG's parameter, how PyG's shape follows from ours)"""
    same = lambda t: t  # noqa: E731
    headed = lambda t: t[None]  # noqa: E731
    if case.startswith("gcn_"):
        return [(ours.weight, theirs.lin.weight, same), (ours.bias, theirs.bias, same)]
    if case.startswith("sage"):
        return [
            (ours.neighbours, theirs.lin_l.weight, same),
            (ours.own.weight, theirs.lin_r.weight, same),
            (ours.own.bias, theirs.lin_l.bias, same),
        ]
    if case.startswith("gatv2"):
        pairs = [(ours.left, theirs.lin_l), (ours.right, theirs.lin_r)]
        flat = [(getattr(a, n), getattr(b, n), same) for a, b in pairs for n in ("weight", "bias")]
        return [*flat, (ours.attention, theirs.att, headed), (ours.bias, theirs.bias, same)]
    if case.startswith("gat"):
        return [
            (ours.weight, theirs.lin.weight, same),
            (ours.attend_src, theirs.att_src, headed),
            (ours.attend_dst, theirs.att_dst, headed),
            (ours.bias, theirs.bias, same),
        ]
    if case == "gcnii":
        return [(ours.weight, theirs.weight1, lambda t: t.T)]
    inside, outside = theirs.nn[0], theirs.nn[2]
    pairs = [(ours.inside, inside), (ours.outside, outside)]
    return [(getattr(a, n), getattr(b, n), same) for a, b in pairs for n in ("weight", "bias")] + [
        (ours.eps, theirs.eps, lambda t: t.reshape(theirs.eps.shape))
    ]


def _gat(kind, theirs, average):
    ours = kind(IN, OUT, heads=HEADS, average=average, slope=0.2, attention_dropout=0.0)
    width = OUT if average else OUT // HEADS
    return ours, theirs(IN, width, heads=HEADS, concat=not average, add_self_loops=False)


CASES = {
    "gcn_transform": lambda: (GCNConv(IN, OUT, aggregate_first=False), pyg.GCNConv(IN, OUT, add_self_loops=False)),
    "gcn_aggregate": lambda: (GCNConv(IN, OUT, aggregate_first=True), pyg.GCNConv(IN, OUT, add_self_loops=False)),
    "sage_transform": lambda: (SAGEConv(IN, OUT, aggregator="mean", aggregate_first=False), pyg.SAGEConv(IN, OUT)),
    "sage_aggregate": lambda: (SAGEConv(IN, OUT, aggregator="mean", aggregate_first=True), pyg.SAGEConv(IN, OUT)),
    "sage_max": lambda: (SAGEConv(IN, OUT, aggregator="max", aggregate_first=True), pyg.SAGEConv(IN, OUT, aggr="max")),
    "gat_concat": lambda: _gat(GATConv, pyg.GATConv, False),
    "gat_average": lambda: _gat(GATConv, pyg.GATConv, True),
    "gatv2_concat": lambda: _gat(GATv2Conv, pyg.GATv2Conv, False),
    "gatv2_average": lambda: _gat(GATv2Conv, pyg.GATv2Conv, True),
    "gcnii": lambda: (
        GCNIIConv(IN, alpha=0.1, beta=0.3),
        # beta = ln(theta / layer + 1) = 0.3
        pyg.GCN2Conv(IN, alpha=0.1, theta=math.expm1(0.3), layer=1, add_self_loops=False),
    ),
    "gin": lambda: (
        GINConv(IN, OUT, hidden=7),
        pyg.GINConv(nn.Sequential(nn.Linear(IN, 7), nn.ReLU(), nn.Linear(7, OUT)), train_eps=True),
    ),
}


WEIGHTED = ("gcn_transform", "gcn_aggregate", "gcnii")


@pytest.mark.parametrize(
    ("case", "weighted"), [*((case, False) for case in CASES), *((case, True) for case in WEIGHTED)]
)
def test_equals_pyg(case, weighted):
    data = with_weights(small_graph()) if weighted else small_graph()
    if case == "sage_max":  # PyG shares the gradient among equal maxima, one winner takes it here
        data = dataset_of(*data.edge_index.unique(dim=1), num_nodes=data.num_nodes, features=IN)
    shard = cut(data, torch.zeros(data.num_nodes, dtype=torch.long), 1)[0]
    view = WholeGraph(shard.to(torch.device("cpu"), torch.float64), Pass(0))
    ours, theirs = (m.double() for m in CASES[case]())
    draw_glorot(ours, 5)
    for mine, other, reshape in _pairs(ours, theirs, case):
        with torch.no_grad():
            if mine.ndim < 2:
                mine.copy_(torch.linspace(-0.5, 0.5, mine.numel(), dtype=torch.float64).view_as(mine))
            other.copy_(reshape(mine))
    x, first = (torch.randn(data.num_nodes, IN, dtype=torch.float64, requires_grad=True) for _ in range(2))
    extra = (first,) if case == "gcnii" else ()
    got = ours(view, x, *extra)
    weights = () if data.edges.weight is None else (data.edges.weight.double(),)
    want = theirs(x, *extra, data.edge_index, *weights)
    torch.testing.assert_close(got, want, rtol=1e-10, atol=1e-12)
    seed = torch.randn_like(got)
    pairs = _pairs(ours, theirs, case)
    mine = torch.autograd.grad(got, [x, *extra, *(p for p, _, _ in pairs)], seed)
    other = torch.autograd.grad(want, [x, *extra, *(p for _, p, _ in pairs)], seed)
    shapes = [lambda t: t] * (1 + len(extra)) + [f for _, _, f in pairs]
    for a, b, reshape in zip(mine, other, shapes, strict=True):
        torch.testing.assert_close(reshape(a), b, rtol=1e-9, atol=1e-11)
