"""What `layer_speed` measures: races, each of two or more calls that compute the same."""

import itertools
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F
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
from gnnpar.parallel.local import Pass
from gnnpar.parallel.single.strategy import Single
from gnnpar.parallel.whole import WholeGraph
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
    """Calls that take turns, by name. Of layers, the first two tensors of each agree: an output and the gradient of the
    input."""

    part: str
    case: str
    graph: Dataset
    calls: Mapping[str, Call]


def with_edges(dataset: Dataset, draw: Callable[[int, torch.Generator], EdgeData]) -> Dataset:
    kept = {key: vars(dataset)[key] for key in ("x", "y", "edge_index", "num_classes", "task")}
    masks = (dataset.train_mask, dataset.val_mask, dataset.test_mask)
    edges = draw(dataset.num_edges, torch.Generator().manual_seed(0))
    return Dataset.of(dataset.name, **kept, masks=masks, edges=edges)


def view_of(dataset: Dataset) -> WholeGraph:
    return WholeGraph(Shard.open(dataset, torch.zeros(dataset.num_nodes).long(), alone()), Pass(0, training=True))


def races(nodes: int, parts: Collection[str]) -> Iterator[Race]:
    """Those of these parts, each made when it is asked for."""
    dataset, plain = block_model(nodes, features=WIDE), block_model(nodes, features=NARROW, loops=False)
    relational = with_edges(plain, lambda n, seed: EdgeData(type=torch.randint(RELATIONS, (n,), generator=seed)))
    if "layers" in parts:
        yield relational_layer(relational)
        yield attention_layer(dataset)
        yield dot_product_layer(dataset)
    if "sums" in parts:
        weighted = with_edges(dataset, lambda n, seed: EdgeData(weight=0.5 + torch.rand(n, generator=seed)))
        yield from (sums(weighted, width) for width in SUMS)
    if "models" in parts:
        yield from models(dataset, relational)


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
    case: str, dataset: Dataset, ours: nn.Module, theirs: Mapping[str, nn.Module], width: int, *more: Tensor
) -> Race:
    """`more`: what theirs are called with behind rows and edges."""
    g = view_of(dataset)
    x, grad = rows_of(dataset, width)
    calls = {OURS: both_ways(lambda h: ours(g.at(0), h), ours, x, grad)}
    for name, layer in theirs.items():
        calls[name] = both_ways(lambda h, layer=layer: layer(h, dataset.edge_index, *more), layer, x, grad)
    return Race("layers", case, dataset, calls)


def relational_layer(dataset: Dataset) -> Race:
    ours = construct(lambda: RGCNConv(RGCN(num_relations=RELATIONS), NARROW, NARROW), 0)
    theirs = {kind.__name__: kind(NARROW, NARROW, RELATIONS) for kind in (pyg.RGCNConv, pyg.FastRGCNConv)}
    for layer in theirs.values():
        layer.load_state_dict({"weight": ours.neighbours, "root": ours.own.weight.T}, strict=False)
    return layer_race("R-GCN 32 to 32, 8 relations", dataset, ours, theirs, NARROW, dataset.edges.type)


def attention_layer(dataset: Dataset) -> Race:
    how = {"heads": HEADS, "average": False, "slope": 0.2, "attention_dropout": 0.0}
    ours = construct(lambda: GATv2Conv(WIDE, WIDE, **how), 0)
    theirs = pyg.GATv2Conv(WIDE, WIDE // HEADS, HEADS, add_self_loops=False)
    theirs.lin_l.load_state_dict(ours.left.state_dict())
    theirs.lin_r.load_state_dict(ours.right.state_dict())
    theirs.load_state_dict({"att": ours.attention[None]}, strict=False)
    return layer_race("GATv2 128 to 4 x 32", dataset, ours, {"GATv2Conv": theirs}, WIDE)


def dot_product_layer(dataset: Dataset) -> Race:
    how = {"heads": HEADS, "average": False, "attention_dropout": 0.0, "gated": True, "edge_dim": 0}
    ours = construct(lambda: TransformerConv(WIDE, WIDE, **how), 0)
    theirs = pyg.TransformerConv(WIDE, WIDE // HEADS, HEADS, beta=True)
    pairs = ((theirs.lin_key, ours.key), (theirs.lin_query, ours.query), (theirs.lin_value, ours.value))
    for linear, same in (*pairs, (theirs.lin_skip, ours.skip), (theirs.lin_beta, ours.gate)):
        none = {"bias": torch.zeros(linear.out_channels)}  # where ours has none
        linear.load_state_dict({**none, **same.state_dict()}, strict=False)
    return layer_race("transformer 128 to 4 x 32", dataset, ours, {"TransformerConv": theirs}, WIDE)


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


class Relational(nn.Module):
    """R-GCN as a user of PyG writes it.

    Shapes: x [N, in_channels], edge_index [2, E], edge_type [E] -> [N, out_channels].
    """

    def __init__(
        self, in_channels: int, hidden_channels: int, num_layers: int, out_channels: int, num_relations: int, p: float
    ) -> None:
        super().__init__()
        widths = [in_channels, *[hidden_channels] * (num_layers - 1), out_channels]
        self.convs = nn.ModuleList(pyg.RGCNConv(a, b, num_relations) for a, b in itertools.pairwise(widths))
        self.p = p

    def forward(self, x: Tensor, edge_index: Tensor, edge_type: Tensor) -> Tensor:
        for conv in self.convs[:-1]:
            x = F.dropout(conv(x, edge_index, edge_type).relu(), self.p, self.training)
        return self.convs[-1](x, edge_index, edge_type)


def models(dataset: Dataset, relational: Dataset) -> Iterator[Race]:
    """An epoch of `single` each: modules of PyG, mapped, beside gnnpar's of the same shape. A call returns its loss."""
    gcn, sage, gat, v2 = (
        PyG(target=f"torch_geometric.nn.models.{name}", kwargs={**THEIRS, **how})
        for name, how in (("GCN", {}), ("GraphSAGE", {}), ("GAT", HEADED), ("GAT", {**HEADED, "v2": True}))
    )
    narrow = {"num_layers": 3, "hidden_channels": NARROW, "p": 0.5}
    rgcn = PyG(target="layer_speed.contenders.Relational", kwargs=narrow, self_loops=False)
    sources: dict[str, dict[str, ModelSource]] = {
        "GCN": {MAPPED: gcn, OWN: GCN(**SHAPE), SAME_ORDER: GCN(**SHAPE, order="transform_first")},
        "GraphSAGE": {MAPPED: sage, OWN: SAGE(**SHAPE), SAME_ORDER: SAGE(**SHAPE, order="aggregate_first")},
        "GAT": {MAPPED: gat, OWN: GAT(**ATTENTION)},
        "GATv2": {MAPPED: v2, OWN: GATv2(**ATTENTION)},
        "R-GCN": {MAPPED: rgcn, OWN: RGCN(num_layers=3, hidden=NARROW, dropout=0.5)},
    }
    for case, each in sources.items():
        graph = relational if case == "R-GCN" else dataset
        epochs = {name: gnnpar_epoch(graph, Single(), source, alone()) for name, source in each.items()}
        yield Race("models", case, graph, {name: lambda e=e: (torch.tensor(e()),) for name, e in epochs.items()})
