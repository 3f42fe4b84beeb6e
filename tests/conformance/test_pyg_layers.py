"""Every convolution of gnnpar equals PyG's own on the whole graph: output and gradients, weights copied over (fp64)."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import product
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch_geometric import nn as pyg

from conformance.test_edge_data import HETERO
from data.samples import hetero
from gnnpar.data.dataset import Dataset
from gnnpar.models.gat import GATConv
from gnnpar.models.gatv2 import GATv2Conv
from gnnpar.models.gcn import GCNConv
from gnnpar.models.gcnii import GCNIIConv
from gnnpar.models.gin import GINConv
from gnnpar.models.gine import GINEConv
from gnnpar.models.hgt import HGT, HGTConv
from gnnpar.models.initial import draw_glorot
from gnnpar.models.rgat import RGAT, RGATConv
from gnnpar.models.rgcn import RGCN, RGCNConv
from gnnpar.models.sage import SAGEConv
from gnnpar.models.transformer import TransformerConv
from gnnpar.parallel.blocks import WholeGraph
from gnnpar.parallel.local import Pass
from gnnpar.partition.shard import cut
from gnnpar.verify.conformance import small_graph
from graphs import dataset_of, with_edge_data, with_weights

IN, OUT, HEADS, WIDTH, TYPES, KINDS, RELATIONS = 6, 8, 2, 3, 3, 3, 5
PLAIN, WEIGHTED = small_graph(), with_weights(small_graph())
TYPED, ATTRIBUTED = (with_edge_data(small_graph(), types=t, width=w) for t, w in ((TYPES, 0), (0, WIDTH)))
SIMPLE = dataset_of(*PLAIN.edge_index.unique(dim=1), num_nodes=PLAIN.num_nodes, features=IN)
RAW = hetero()  # drawn with the usual default type
SHARES: dict[str, dict[str, Any]] = {"free": {}, "bases": {"num_bases": 2}, "blocks": {"num_blocks": 2}}
Pair = tuple[nn.Module, Any]


@pytest.fixture(autouse=True)
def _default_of_64_bits() -> Iterator[None]:
    """RGCNConv adds to zeros of the default type."""
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


class Layer(NamedTuple):
    """`make`: ours and PyG's. `names`: of PyG's parameters or modules by ours; `.T`: the transposed matrix."""

    make: Callable[[], Pair]
    names: dict[str, str]
    data: Dataset = PLAIN


def sage(aggregator: Any, first: bool) -> Pair:
    return SAGEConv(IN, OUT, aggregator=aggregator, aggregate_first=first), pyg.SAGEConv(IN, OUT, aggr=aggregator)


def gat(kind: Any, theirs: Any, average: bool) -> Pair:
    ours = kind(IN, OUT, heads=HEADS, average=average, slope=0.2, attention_dropout=0.0)
    return ours, theirs(IN, OUT if average else OUT // HEADS, heads=HEADS, concat=not average, add_self_loops=False)


def gcnii() -> Pair:
    """beta = ln(theta / layer + 1) = 0.3."""
    theirs = pyg.GCN2Conv(IN, alpha=0.1, theta=math.expm1(0.3), layer=1, add_self_loops=False)
    return GCNIIConv(IN, alpha=0.1, beta=0.3), theirs


def gin(*, edges: bool) -> Pair:
    network = nn.Sequential(nn.Linear(IN, 7), nn.ReLU(), nn.Linear(7, OUT))
    if edges:
        ours = GINEConv(IN, OUT, hidden=7, edge_dim=WIDTH)
        return ours, pyg.GINEConv(network, train_eps=True, edge_dim=WIDTH)
    return GINConv(IN, OUT, hidden=7), pyg.GINConv(network, train_eps=True)


def transformer(edge_dim: int, average: bool, gated: bool) -> Pair:
    how: dict[str, Any] = {"heads": HEADS, "average": average, "attention_dropout": 0.0}
    width = OUT if average else OUT // HEADS
    theirs = pyg.TransformerConv(IN, width, HEADS, concat=not average, beta=gated, edge_dim=edge_dim or None)
    nn.init.zeros_(theirs.lin_key.bias)  # which no result depends on
    return TransformerConv(IN, OUT, gated=gated, edge_dim=edge_dim, **how), theirs


def rgcn(share: str, theirs: Any) -> Pair:
    config = RGCN(num_relations=TYPES, **SHARES[share])
    return RGCNConv(config, IN, OUT), theirs(IN, OUT, TYPES, **SHARES[share])


def rgat(share: str, how: Any, average: bool) -> Pair:
    """The last layer averages its heads."""
    config = RGAT(hidden=8, heads=HEADS, out_heads=HEADS, slope=0.3, attention=how)
    ours = RGATConv(replace(config, num_relations=TYPES, **SHARES[share]), IN, OUT, index=1 if average else 0)
    options = {"heads": HEADS, "concat": not average, "negative_slope": 0.3, **SHARES[share]}
    width = OUT if average else OUT // HEADS
    return ours, pyg.RGATConv(IN, width, TYPES, attention_mechanism=f"{how}-relation", **options)


OF_GCN = {"weight": "lin.weight", "bias": "bias"}
OF_SAGE = {"neighbours": "lin_l.weight", "own.weight": "lin_r.weight", "own.bias": "lin_l.bias"}
OF_GAT = {"weight": "lin.weight", "attend_src": "att_src", "attend_dst": "att_dst", "bias": "bias"}
OF_GATV2 = {"left": "lin_l", "right": "lin_r", "attention": "att", "bias": "bias"}
OF_GIN = {"inside": "nn.0", "outside": "nn.2", "eps": "eps", "edges": "lin"}
OF_TRANSFORMER = {"query": "lin_query", "key": "lin_key", "value": "lin_value", "skip": "lin_skip", "gate": "lin_beta"}
OF_TRANSFORMER |= {"edges": "lin_edge"}
OF_RGCN = {"neighbours": "weight", "own.weight": "root.T", "own.bias": "bias", "mixing": "comp"}
OF_RGAT = {"query": "q", "key": "k", "bias": "bias", "mixing": "att"}
LAYERS = {
    **{
        f"gcn, {'aggregate' if first else 'transform'} first, {data.edges.weight is not None}": Layer(
            lambda first=first: (GCNConv(IN, OUT, aggregate_first=first), pyg.GCNConv(IN, OUT, add_self_loops=False)),
            OF_GCN,
            data,
        )
        for first, data in product((False, True), (PLAIN, WEIGHTED))
    },
    "sage, transform first": Layer(lambda: sage("mean", False), OF_SAGE),
    "sage, aggregate first": Layer(lambda: sage("mean", True), OF_SAGE),
    # PyG shares the gradient among equal maxima, one winner takes it here
    "sage, max": Layer(lambda: sage("max", True), OF_SAGE, SIMPLE),
    "gat": Layer(lambda: gat(GATConv, pyg.GATConv, False), OF_GAT),
    "gat, average": Layer(lambda: gat(GATConv, pyg.GATConv, True), OF_GAT),
    "gatv2": Layer(lambda: gat(GATv2Conv, pyg.GATv2Conv, False), OF_GATV2),
    "gatv2, average": Layer(lambda: gat(GATv2Conv, pyg.GATv2Conv, True), OF_GATV2),
    "gcnii": Layer(gcnii, {"weight": "weight1.T"}),
    "gcnii, weighted": Layer(gcnii, {"weight": "weight1.T"}, WEIGHTED),
    "gin": Layer(lambda: gin(edges=False), OF_GIN),
    "gine": Layer(lambda: gin(edges=True), OF_GIN, ATTRIBUTED),
    "transformer": Layer(lambda: transformer(WIDTH, False, False), OF_TRANSFORMER, ATTRIBUTED),
    "transformer, gated": Layer(lambda: transformer(WIDTH, False, True), OF_TRANSFORMER, ATTRIBUTED),
    "transformer, average": Layer(lambda: transformer(WIDTH, True, True), OF_TRANSFORMER, ATTRIBUTED),
    "transformer without edges": Layer(lambda: transformer(0, False, True), OF_TRANSFORMER),
    **{
        f"rgcn, {share}, {theirs.__name__}": Layer(lambda s=share, t=theirs: rgcn(s, t), OF_RGCN, TYPED)
        for share, theirs in product(SHARES, (pyg.RGCNConv, pyg.FastRGCNConv))
    },
    **{
        f"rgat, {share}, {how}, average={average}": Layer(
            lambda given=(share, how, average): rgat(*given),
            OF_RGAT | {"neighbours": "basis" if share == "bases" else "weight"},
            TYPED,
        )
        for share, how, average in product(SHARES, ("within", "across"), (False, True))
    },
}


def view_of(data: Dataset) -> WholeGraph:
    shard = cut(data, torch.zeros(data.num_nodes, dtype=torch.long), 1, edge_ids=True)[0]
    return WholeGraph(shard.to(torch.device("cpu"), torch.float64), Pass(0))


def counterpart(theirs: nn.Module, names: dict[str, str], name: str, like: Tensor) -> tuple[nn.Parameter, Any]:
    """PyG's parameter of ours, and how it is seen in our shape."""
    head, _, leaf = name.partition(".")
    path = names.get(name) or f"{names[head]}.{leaf}"
    seen = (lambda t: t.T) if path.endswith(".T") else (lambda t: t.view_as(like))
    return theirs.get_parameter(path.removesuffix(".T")), seen


@pytest.mark.parametrize("case", LAYERS)
def test_layer_equals_pyg(case: str) -> None:
    make, names, data = LAYERS[case]
    ours, theirs = (each.double() for each in make())
    draw_glorot(ours, 5)
    mine = dict(ours.named_parameters())
    others = {name: counterpart(theirs, names, name, p) for name, p in mine.items()}
    with torch.no_grad():
        for name, (other, seen) in others.items():
            if mine[name].ndim < 2:
                mine[name].copy_(torch.linspace(-0.5, 0.5, mine[name].numel()).view_as(mine[name]))
            seen(other).copy_(mine[name])
    x, *first = (torch.randn(data.num_nodes, IN, requires_grad=True) for _ in range(2 if "gcnii" in case else 1))
    carried = [each for each in (data.edges.weight, data.edges.type, data.edges.attr) if each is not None]
    got = ours(view_of(data), x, *first)
    want = theirs(x, *first, data.edge_index, *(t.double() if t.is_floating_point() else t for t in carried))
    torch.testing.assert_close(got, want, rtol=1e-10, atol=1e-12)
    pull = torch.randn_like(got)
    of_ours = torch.autograd.grad(got, [x, *first, *mine.values()], pull)
    of_theirs = torch.autograd.grad(want, [x, *first, *(other for other, _ in others.values())], pull)
    shapes = [lambda t: t] * (1 + len(first)) + [seen for _, seen in others.values()]
    for a, b, seen in zip(of_ours, of_theirs, shapes, strict=True):
        torch.testing.assert_close(a, seen(b), rtol=1e-9, atol=1e-11)


def test_hgt_equals_pyg() -> None:
    """A matrix of ours holds those of all types of nodes, or of edges."""
    gen, data, width = torch.Generator().manual_seed(1), RAW, 8
    data["venue"].x = torch.zeros(4, 0)
    theirs: Any = pyg.HGTConv(width, width, data.metadata(), heads=HEADS).double()
    config = HGT(hidden=width, heads=HEADS, num_node_types=KINDS, num_relations=RELATIONS)
    ours = HGTConv(config, width, width).double()
    assert ours.skip is not None
    kqv, outs = ([lin.lins[kind] for kind in data.node_types] for lin in (theirs.kqv_lin, theirs.out_lin))
    priors = [theirs.p_rel["__".join(kind)] for kind in data.edge_types]
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter.uniform_(-0.6, 0.6, generator=gen)
        for i, layer in enumerate((ours.key, ours.query, ours.value)):
            layer.weight.copy_(torch.stack([each.weight.chunk(3)[i].t() for each in kqv]))
            layer.bias.copy_(torch.stack([each.bias.chunk(3)[i] for each in kqv]))
        ours.out.weight.copy_(torch.stack([each.weight.t() for each in outs]))
        ours.out.bias.copy_(torch.stack([each.bias for each in outs]))
        ours.attend.copy_(theirs.k_rel.weight.view_as(ours.attend))
        ours.pass_on.copy_(theirs.v_rel.weight.view_as(ours.pass_on))
        ours.prior.copy_(torch.cat(priors).t())
        ours.skip.copy_(torch.stack([theirs.skip[kind] for kind in data.node_types]).flatten())
    x = torch.randn(HETERO.num_nodes, width, generator=gen).requires_grad_()
    counts = [data[kind].num_nodes for kind in data.node_types]
    kinds = nn.functional.one_hot(torch.repeat_interleave(torch.arange(KINDS), torch.tensor(counts))).double()
    mine = ours(view_of(HETERO), x, kinds)
    found = theirs(dict(zip(data.node_types, x.split(counts), strict=True)), data.edge_index_dict)
    other = torch.cat([found[kind] for kind in data.node_types])
    torch.testing.assert_close(mine, other, rtol=1e-9, atol=1e-12)
    of_ours = torch.autograd.grad(mine.square().sum(), [x, ours.attend, ours.pass_on, ours.prior, ours.key.weight])
    wanted = [x, theirs.k_rel.weight, theirs.v_rel.weight, *priors, *(each.weight for each in kqv)]
    of_x, *rest = torch.autograd.grad(other.square().sum(), wanted)
    of_keys = torch.stack([each.chunk(3)[0].t() for each in rest[2 + RELATIONS :]])
    expected = [of_x, *rest[:2], torch.cat(rest[2 : 2 + RELATIONS]).t(), of_keys]
    for a, b in zip(of_ours, expected, strict=True):
        torch.testing.assert_close(a, b.view_as(a), rtol=1e-9, atol=1e-10)
