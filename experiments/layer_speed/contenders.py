"""What `layer_speed` measures: races, each of two or more calls that compute the same."""

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass

import torch
from epochs import alone, block_model, gnnpar_epoch
from torch import Tensor, nn
from torch_geometric import nn as pyg

from gnnpar.data.dataset import Dataset
from gnnpar.folds.edge_data import EdgeData
from gnnpar.folds.sum import Sum
from gnnpar.models.gat import GAT
from gnnpar.models.gatv2 import GATv2, GATv2Conv
from gnnpar.models.gcn import GCN
from gnnpar.models.gnn import ModelSource
from gnnpar.models.initial import construct
from gnnpar.models.pyg.model import PyG
from gnnpar.models.rgcn import RGCN, RGCNConv
from gnnpar.models.sage import SAGE
from gnnpar.models.transformer import TransformerConv
from gnnpar.parallel.blocks import WholeGraph
from gnnpar.parallel.local import Pass
from gnnpar.parallel.single.strategy import Single
from gnnpar.partition.shard import Shard

OURS = "gnnpar"
MAPPED, OWN, SAME_ORDER = "mapped", "own", "own, PyG's order"
RELATIONS, NARROW = 8, 32
HEADS, WIDE = 4, 128
SUMS = (32, 128)  # widths of rows
CLOSE = 1e-4  # RMS of a difference over RMS, fp32

Tensors = tuple[Tensor, ...]
Call = Callable[[], Tensors]


@dataclass(frozen=True)
class Race:
    """Calls that take turns, by name. `equal`: the first two tensors of each, an output and the gradient of the input,
    must agree."""

    part: str
    case: str
    graph: Dataset
    calls: Mapping[str, Call]
    equal: bool = False


def with_edges(dataset: Dataset, edges: EdgeData) -> Dataset:
    return Dataset.of(
        dataset.name,
        x=dataset.x,
        y=dataset.y,
        edge_index=dataset.edge_index,
        masks=(dataset.train_mask, dataset.val_mask, dataset.test_mask),
        num_classes=dataset.num_classes,
        task=dataset.task,
        edges=edges,
    )


def typed(nodes: int) -> Dataset:
    """Without self loops, types drawn evenly."""
    dataset = block_model(nodes, features=NARROW, loops=False)
    draw = torch.Generator().manual_seed(0)
    return with_edges(dataset, EdgeData(type=torch.randint(RELATIONS, (dataset.num_edges,), generator=draw)))


def weighted(dataset: Dataset) -> Dataset:
    draw = torch.Generator().manual_seed(0)
    return with_edges(dataset, EdgeData(weight=0.5 + torch.rand(dataset.num_edges, generator=draw)))


def view_of(dataset: Dataset) -> WholeGraph:
    return WholeGraph(Shard.open(dataset, torch.zeros(dataset.num_nodes).long(), alone()), Pass(0, training=True))


def races(nodes: int, parts: Collection[str]) -> Iterator[Race]:
    """Those of these parts, each made when it is asked for."""
    dataset, relational = block_model(nodes, features=WIDE, loops=True), typed(nodes)
    if "layers" in parts:
        yield relational_layer(relational)
        yield attention_layer(dataset)
        yield dot_product_layer(dataset)
    if "sums" in parts:
        for width in SUMS:
            yield sums(weighted(dataset), width)
    if "models" in parts:
        yield from models(dataset)
        yield relational_model(relational)


def both_ways(layer: Callable[[Tensor], Tensor], module: nn.Module, x: Tensor, grad: Tensor) -> Call:
    """Forward and backward, to the input and all parameters: -> output, gradients. Shapes: x [N, F], grad [N, F']."""
    wanted = (x, *module.parameters())

    def call() -> Tensors:
        out = layer(x)
        return out.detach(), *torch.autograd.grad(out, wanted, grad)

    return call


def rows_of(dataset: Dataset, width: int) -> tuple[Tensor, Tensor]:
    """An input and the gradient of an output. Shapes: -> [N, width] twice."""
    draw = torch.Generator().manual_seed(1)
    x, grad = (torch.randn(dataset.num_nodes, width, generator=draw) for _ in range(2))
    return x.requires_grad_(), grad


def layer_race(
    case: str,
    dataset: Dataset,
    ours: nn.Module,
    theirs: Mapping[str, Callable[..., Tensor]],
    *,
    width: int,
    edges: Tensors,
) -> Race:
    g = view_of(dataset)
    x, grad = rows_of(dataset, width)
    calls = {OURS: both_ways(lambda h: ours(g.at(0), h), ours, x, grad)}
    for name, layer in theirs.items():
        calls[name] = both_ways(lambda h, layer=layer: layer(h, *edges), layer, x, grad)
    return Race("layers", case, dataset, calls, equal=True)


def relational_layer(dataset: Dataset) -> Race:
    ours = construct(lambda: RGCNConv(RGCN(num_relations=RELATIONS), NARROW, NARROW), 0)
    theirs = {kind.__name__: kind(NARROW, NARROW, RELATIONS) for kind in (pyg.RGCNConv, pyg.FastRGCNConv)}
    with torch.no_grad():
        for layer in theirs.values():
            layer.weight.copy_(ours.neighbours)
            layer.root.copy_(ours.own.weight.T)
    edges = (dataset.edge_index, dataset.edges.type)
    return layer_race("R-GCN 32 to 32, 8 relations", dataset, ours, theirs, width=NARROW, edges=edges)


def attention_layer(dataset: Dataset) -> Race:
    how = {"heads": HEADS, "average": False, "slope": 0.2, "attention_dropout": 0.0}
    ours = construct(lambda: GATv2Conv(WIDE, WIDE, **how), 0)
    theirs = pyg.GATv2Conv(WIDE, WIDE // HEADS, HEADS, add_self_loops=False)
    with torch.no_grad():
        for linear, same in ((theirs.lin_l, ours.left), (theirs.lin_r, ours.right)):
            linear.weight.copy_(same.weight)
            linear.bias.copy_(same.bias)
        theirs.att.copy_(ours.attention[None])
    peers, edges = {"GATv2Conv": theirs}, (dataset.edge_index,)
    return layer_race("GATv2 128 to 4 x 32", dataset, ours, peers, width=WIDE, edges=edges)


def dot_product_layer(dataset: Dataset) -> Race:
    how = {"heads": HEADS, "average": False, "attention_dropout": 0.0, "gated": True, "edge_dim": 0}
    ours = construct(lambda: TransformerConv(WIDE, WIDE, **how), 0)
    theirs = pyg.TransformerConv(WIDE, WIDE // HEADS, HEADS, beta=True)
    pairs = ((theirs.lin_key, ours.key), (theirs.lin_query, ours.query), (theirs.lin_value, ours.value))
    with torch.no_grad():
        for linear, same in (*pairs, (theirs.lin_skip, ours.skip), (theirs.lin_beta, ours.gate)):
            linear.weight.copy_(same.weight)
            if linear.bias is not None:
                linear.bias.zero_() if same.bias is None else linear.bias.copy_(same.bias)
    peers, edges = {"TransformerConv": theirs}, (dataset.edge_index,)
    return layer_race("transformer 128 to 4 x 32", dataset, ours, peers, width=WIDE, edges=edges)


def sums(dataset: Dataset, width: int) -> Race:
    g, nothing = view_of(dataset), nn.Identity()
    x, grad = rows_of(dataset, width)
    calls = {
        name: both_ways(lambda h, fold=fold: g.at(0).aggregate(fold, (h,)), nothing, x, grad)
        for name, fold in {"unweighted": Sum(), "weighted": Sum(weighted=True)}.items()
    }
    return Race("sums", f"rows of {width}", dataset, calls)


SHAPE = {"num_layers": 3, "hidden": WIDE, "dropout": 0.5}
ATTENTION = {**SHAPE, "heads": HEADS, "out_heads": HEADS, "attention_dropout": 0.5}
THEIRS = {"num_layers": 3, "hidden_channels": WIDE, "dropout": 0.5}
HEADED = {"heads": HEADS, "act": "elu"}  # PyG's class gives `dropout` to attention, too


def models(dataset: Dataset) -> Iterator[Race]:
    """PyG's classes, mapped, beside gnnpar's of the same shape."""
    own: dict[str, tuple[PyG, dict[str, ModelSource]]] = {
        "GCN": (mapped("GCN"), {OWN: GCN(**SHAPE), SAME_ORDER: GCN(**SHAPE, order="transform_first")}),
        "GraphSAGE": (mapped("GraphSAGE"), {OWN: SAGE(**SHAPE), SAME_ORDER: SAGE(**SHAPE, order="aggregate_first")}),
        "GAT": (mapped("GAT", **HEADED), {OWN: GAT(**ATTENTION)}),
        "GATv2": (mapped("GAT", **HEADED, v2=True), {OWN: GATv2(**ATTENTION)}),
    }
    for case, (theirs, ours) in own.items():
        yield epochs(case, dataset, {MAPPED: theirs, **ours})


def mapped(name: str, **kwargs: object) -> PyG:
    return PyG(target=f"torch_geometric.nn.models.{name}", kwargs={**THEIRS, **kwargs})


def relational_model(dataset: Dataset) -> Race:
    theirs = {"num_layers": 3, "hidden_channels": NARROW, "p": 0.5}
    mapped, own = (
        PyG(target="layer_speed.nets.RGCN", kwargs=theirs, self_loops=False),
        RGCN(num_layers=3, hidden=NARROW, dropout=0.5),
    )
    return epochs("R-GCN", dataset, {MAPPED: mapped, OWN: own})


def epochs(case: str, dataset: Dataset, sources: Mapping[str, ModelSource]) -> Race:
    """A training epoch of `single` each; a call returns its loss."""
    calls = {name: gnnpar_epoch(dataset, Single(), source, alone()) for name, source in sources.items()}
    return Race("models", case, dataset, {name: lambda e=epoch: (torch.tensor(e()),) for name, epoch in calls.items()})
