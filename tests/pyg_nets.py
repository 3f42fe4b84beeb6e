"""PyG models as their users write them, and some that cannot run on a part of a graph. Nothing here knows gnnpar."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils.parametrizations import spectral_norm, weight_norm
from torch_geometric import nn as pyg
from torch_geometric.nn import (
    CGConv,
    GATConv,
    GATv2Conv,
    GCNConv,
    GINConv,
    GINEConv,
    GraphConv,
    JumpingKnowledge,
    MessagePassing,
    NNConv,
    PNAConv,
    SAGEConv,
    TransformerConv,
    models,
)
from torch_geometric.utils import softmax


class TwoLayers(nn.Module):
    def __init__(self, first, second, dropout=0.5):
        super().__init__()
        self.conv1, self.conv2, self.dropout = first, second, dropout

    def forward(self, x, edge_index):
        x = F.dropout(x, p=0.2, training=self.training)
        x = F.relu(self.conv1(x, edge_index))
        x = F.dropout(x, p=self.dropout, training=self.training)
        return self.conv2(x, edge_index)


def gcn(in_channels, out_channels, hidden=8, **options):
    return TwoLayers(GCNConv(in_channels, hidden, **options), GCNConv(hidden, out_channels, **options))


def sage(in_channels, out_channels, hidden=8, **options):
    return TwoLayers(SAGEConv(in_channels, hidden, **options), SAGEConv(hidden, out_channels, **options))


def graph(in_channels, out_channels, hidden=8, aggr="add"):
    return TwoLayers(GraphConv(in_channels, hidden, aggr=aggr), GraphConv(hidden, out_channels, aggr=aggr))


def gat(in_channels, out_channels, hidden=4, v2=False, **options):
    conv = GATv2Conv if v2 else GATConv
    return TwoLayers(
        conv(in_channels, hidden, heads=2, **options), conv(2 * hidden, out_channels, heads=3, concat=False, **options)
    )


def gin(in_channels, out_channels, hidden=8):
    def mlp(width):
        return nn.Sequential(nn.Linear(width, hidden), nn.LayerNorm(hidden), nn.ReLU(), nn.Linear(hidden, hidden))

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv1, self.conv2 = GINConv(mlp(in_channels), train_eps=True), GINConv(mlp(hidden), eps=0.3)
            self.head = nn.Linear(hidden, out_channels)

        def forward(self, x, edge_index):
            return self.head(self.conv2(self.conv1(x, edge_index).relu(), edge_index))

    return Net()


class Gated(MessagePassing):
    """A message of its own: a function of both ends, with parameters in it."""

    def __init__(self, in_channels, out_channels, aggr="mean"):
        super().__init__(aggr=aggr)
        self.lin, self.gate = nn.Linear(in_channels, out_channels), nn.Linear(2 * out_channels, out_channels)

    def forward(self, x, edge_index):
        x = self.lin(x)
        return self.propagate(edge_index, x=x, scale=(x.tanh(), x)) + x

    def message(self, x_i, x_j, scale_j):  # pyright: ignore[reportIncompatibleMethodOverride] - PyG reads the names
        return torch.sigmoid(self.gate(torch.cat([x_i, x_j], -1))) * scale_j


def gated(in_channels, out_channels, hidden=8, aggr="mean"):
    return TwoLayers(Gated(in_channels, hidden, aggr), Gated(hidden, out_channels, aggr))


class InPlace(MessagePassing):
    """Writes into what `propagate` gives, which is a sum of features in the first layer."""

    def __init__(self, in_channels, out_channels):
        super().__init__(aggr="add")
        self.lin = nn.Linear(in_channels, out_channels)

    def forward(self, x, edge_index):
        out = self.propagate(edge_index, x=x)
        out += x
        return self.lin(out)


class InPlaceNet(nn.Module):
    def __init__(self, in_channels, out_channels):
        super().__init__()
        self.conv1, self.conv2 = InPlace(in_channels, 8), InPlace(8, out_channels)

    def forward(self, x, edge_index):
        return self.conv2(self.conv1(x, edge_index).relu(), edge_index)


class Jumping(nn.Module):
    """JumpingKnowledge over four convolutions of different kinds."""

    def __init__(self, num_features, num_classes, hidden=8):
        super().__init__()
        self.encoder = nn.Linear(num_features, hidden)
        self.convs = nn.ModuleList(
            [GCNConv(hidden, hidden), SAGEConv(hidden, hidden), GATv2Conv(hidden, hidden), Gated(hidden, hidden)]
        )
        self.dropout, self.jump = nn.Dropout(0.3), JumpingKnowledge("cat")
        self.head = nn.Linear(4 * hidden, num_classes)

    def forward(self, x, edge_index):
        x, found = self.encoder(x), []
        for conv in self.convs:
            x = self.dropout(F.elu(conv(x, edge_index)))
            found.append(x)
        return self.head(self.jump(found))


class Weighted(nn.Module):
    """forward(x, edge_index, edge_weight)."""

    def __init__(self, first, second):
        super().__init__()
        self.conv1, self.conv2 = first, second

    def forward(self, x, edge_index, edge_weight):
        x = F.dropout(self.conv1(x, edge_index, edge_weight).relu(), p=0.4, training=self.training)
        return self.conv2(x, edge_index, edge_weight)


class Scaled(MessagePassing):
    """A message of its own that reads the weight of its edge."""

    def __init__(self, in_channels, out_channels, aggr="mean"):
        super().__init__(aggr=aggr)
        self.lin = nn.Linear(in_channels, out_channels)

    def forward(self, x, edge_index, edge_weight=None):
        return self.propagate(edge_index, x=self.lin(x), edge_weight=edge_weight)

    def message(self, x_i, x_j, edge_weight):  # pyright: ignore[reportIncompatibleMethodOverride] - PyG reads the names
        values = torch.tanh(x_i) + x_j
        return values if edge_weight is None else edge_weight[:, None] * values


def weighted(in_channels, out_channels, kind="GCNConv", **options):
    conv = Scaled if kind == "Scaled" else getattr(pyg, kind)
    return Weighted(conv(in_channels, 8, **options), conv(8, out_channels, **options))


class Smoothed(nn.Module):
    """Convolutions that normalise by degrees and are not GCNConv."""

    def __init__(self, in_channels, out_channels, alpha=0.1):
        super().__init__()
        self.first = pyg.SGConv(in_channels, 8, K=2)
        self.deep = pyg.GCN2Conv(8, alpha, theta=0.5, layer=1)
        self.tag, self.light = pyg.TAGConv(8, 8, K=2), pyg.LGConv()
        self.last, self.walk = nn.Linear(8, out_channels), pyg.APPNP(2, 0.2)

    def forward(self, x, edge_index, edge_weight=None):
        h = self.first(x, edge_index, edge_weight)
        h = self.deep(h.relu(), h, edge_index, edge_weight).relu()
        h = self.light(self.tag(h, edge_index, edge_weight), edge_index, edge_weight)
        return self.walk(self.last(h), edge_index, edge_weight)


class Inline(MessagePassing):
    """A softmax over in-edges in its message, and an update that reads rows."""

    def __init__(self, in_channels, out_channels):
        super().__init__(aggr="add")
        self.lin, self.score = nn.Linear(in_channels, out_channels), nn.Linear(2 * out_channels, 1, bias=False)

    def forward(self, x, edge_index):
        x = self.lin(x)
        return self.propagate(edge_index, x=x, own=x)

    def message(self, x_i, x_j, index):  # pyright: ignore[reportIncompatibleMethodOverride] - PyG reads names
        return x_j * softmax(self.score(torch.cat([x_i, x_j], -1)), index)

    def update(self, inputs, own):  # pyright: ignore[reportIncompatibleMethodOverride] - PyG reads the names
        return inputs + own


def inline(in_channels, out_channels):
    return TwoLayers(Inline(in_channels, 8), Inline(8, out_channels))


def edge(in_channels, out_channels, aggr="max"):
    def mlp(width, out):
        return nn.Sequential(nn.Linear(2 * width, 8), nn.ReLU(), nn.Linear(8, out))

    return TwoLayers(pyg.EdgeConv(mlp(in_channels, 8), aggr=aggr), pyg.EdgeConv(mlp(8, out_channels), aggr=aggr))


def pna(in_channels, out_channels):
    def conv(first, second):
        degrees = torch.tensor([0, 3, 9, 14, 11, 8, 4, 2])
        return pyg.PNAConv(first, second, ["mean", "max", "std"], ["identity", "amplification"], degrees)

    return TwoLayers(conv(in_channels, 8), conv(8, out_channels))


class Rescaled(Weighted):
    def forward(self, x, edge_index, edge_weight):
        return super().forward(x, edge_index, edge_weight * 2)


def rescaled(in_channels, out_channels):
    return Rescaled(GCNConv(in_channels, 8), GCNConv(8, out_channels))


class Normed(TwoLayers):
    def __init__(self, in_channels, out_channels, track_running_stats=True):
        super().__init__(GCNConv(in_channels, 8), GCNConv(8, out_channels))
        self.norm = nn.BatchNorm1d(8, track_running_stats=track_running_stats)

    def forward(self, x, edge_index):
        return self.conv2(self.norm(self.conv1(x, edge_index)), edge_index)


def normed_gin(in_channels, out_channels):
    """Norms between layers and inside of the networks of convolutions."""
    return models.GIN(in_channels, 8, 2, out_channels, norm="batch_norm", dropout=0.5)


def normed_messages(in_channels, out_channels):
    return models.EdgeCNN(in_channels, 8, 2, out_channels, norm="batch_norm")


class Summed(TwoLayers):
    def __init__(self, in_channels, out_channels):
        super().__init__(GCNConv(in_channels, 8), GCNConv(8, out_channels))

    def forward(self, x, edge_index):
        x = self.conv1(x, edge_index)
        return self.conv2(x - x.cumsum(0) / 9, edge_index)


class Counting(TwoLayers):
    def __init__(self, in_channels, out_channels):
        super().__init__(GCNConv(in_channels, 8), GCNConv(8, out_channels))

    def forward(self, x, edge_index):
        return super().forward(x, edge_index) / edge_index.shape[1]


class OfData(nn.Module):
    def forward(self, data):
        return data.x


class Dropping(Gated):
    def message(self, x_i, x_j, scale_j):  # pyright: ignore[reportIncompatibleMethodOverride] - PyG reads the names
        return F.dropout(scale_j, 0.5)


def dropping(in_channels, out_channels):
    return TwoLayers(Dropping(in_channels, 8), Dropping(8, out_channels))


class Noisy(TwoLayers):
    """Adds what `draw` makes of its rows."""

    def __init__(self, in_channels, out_channels, draw):
        super().__init__(GCNConv(in_channels, 8), GCNConv(8, out_channels))
        self.draw = draw

    def forward(self, x, edge_index):
        x = self.conv1(x, edge_index)
        return self.conv2(x + DRAWN[self.draw](x), edge_index)


DRAWN = {
    "rrelu": lambda x: F.rrelu(x, training=True),
    "randn_like": torch.randn_like,
    "rand": lambda x: torch.rand(x.shape, device=x.device),
    "bernoulli": lambda x: torch.bernoulli(torch.full_like(x, 0.5)),
    "normal_": lambda x: torch.empty_like(x).normal_(),
    "gumbel_softmax": F.gumbel_softmax,
}


def transformer(in_channels, out_channels, **options):
    return TwoLayers(
        TransformerConv(in_channels, 4, heads=2, **options), TransformerConv(8, out_channels, beta=True, **options)
    )


def _reads_rows(kind, width, edge_dim, **options):
    """A convolution of rows of nodes and of edges, [N, width] and [E, edge_dim] -> [N, width]."""
    if kind == "GINEConv":
        mlp = nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.Linear(width, width))
        return GINEConv(mlp, edge_dim=edge_dim, train_eps=True)
    if kind == "NNConv":
        return NNConv(width, width, nn.Linear(edge_dim, width * width), aggr="mean")
    if kind == "CGConv":
        return CGConv(width, edge_dim, **options)
    if kind == "PNAConv":
        histogram = torch.tensor([0, 2, 4, 6, 4, 2])
        return PNAConv(
            width, width, ["mean", "max", "std"], ["identity", "amplification"], histogram, edge_dim=edge_dim
        )
    more = {"add_self_loops": False} if kind in ("GATConv", "GATv2Conv") else {}
    return getattr(pyg, kind)(width, width, edge_dim=edge_dim, **more, **options)


class Rows(nn.Module):
    """forward(x, edge_index, edge_attr): an encoder of rows of edges, with dropout, in front of two convolutions."""

    def __init__(self, in_channels, out_channels, edge_dim, kind="GINEConv", hidden=6, **options):
        super().__init__()
        self.begin, self.end = nn.Linear(in_channels, hidden), nn.Linear(hidden, out_channels)
        self.encoder = nn.Sequential(nn.Linear(edge_dim, 4), nn.Tanh(), nn.Dropout(0.3))
        self.conv1 = _reads_rows(kind, hidden, 4, **options)
        self.conv2 = _reads_rows(kind, hidden, edge_dim, **options)

    def forward(self, x, edge_index, edge_attr):
        x = F.dropout(self.conv1(self.begin(x), edge_index, self.encoder(edge_attr)).relu(), 0.3, self.training)
        return self.end(self.conv2(x, edge_index, edge_attr))


class LearnedWeights(nn.Module):
    """Weights of edges that the model makes of their attributes."""

    def __init__(self, in_channels, out_channels, edge_dim, hidden=6, aggr="add", normalize=False):
        super().__init__()
        self.gate = nn.Linear(edge_dim, 1)
        self.conv1 = GraphConv(in_channels, hidden, aggr=aggr)
        self.conv2 = GCNConv(hidden, out_channels, normalize=normalize)

    def forward(self, x, edge_index, edge_attr):
        weight = self.gate(edge_attr).sigmoid().view(-1)
        return self.conv2(self.conv1(x, edge_index, weight).relu(), edge_index, weight)


class Optional(nn.Module):
    """edge_attr may be left out."""

    def __init__(self, in_channels, out_channels, edge_dim=None, dropout=0.2):
        super().__init__()
        options = {"heads": 2, "concat": False, "dropout": dropout}
        self.conv = TransformerConv(in_channels, out_channels, edge_dim=edge_dim, **options)

    def forward(self, x, edge_index, edge_attr=None):
        return self.conv(x, edge_index, edge_attr)


class AddsEdges(Rows):
    def forward(self, x, edge_index, edge_attr):
        return super().forward(x, edge_index, edge_attr) + self.encoder(edge_attr).mean()


class EdgesAsNodes(Rows):
    def forward(self, x, edge_index, edge_attr):
        return self.end(self.conv2(self.begin(x) + self.encoder(edge_attr).mean(), edge_index, edge_attr))


class Typed(nn.Module):
    """Two convolutions that read the types of edges."""

    def __init__(self, in_channels, out_channels, num_relations, kind="RGCNConv", hidden=6, **options):
        super().__init__()
        conv = {"Shifted": Shifted}.get(kind) or getattr(pyg, kind)
        self.conv1 = conv(in_channels, hidden, num_relations, **options)
        self.conv2 = conv(hidden, hidden, num_relations, **options)
        self.head = nn.Linear(hidden, out_channels)
        for each in (self.conv1, self.conv2):
            if isinstance(each, pyg.RGATConv):
                nn.init.ones_(each.l2)  # PyG leaves it without values

    def forward(self, x, edge_index, edge_type):
        x = F.dropout(self.conv1(x, edge_index, edge_type).relu(), p=0.3, training=self.training)
        return self.head(self.conv2(x, edge_index, edge_type))


class Shifted(MessagePassing):
    """A message of its own that reads the type of its edge."""

    def __init__(self, in_channels, out_channels, num_relations):
        super().__init__(aggr="mean")
        self.lin, self.shift = nn.Linear(in_channels, out_channels), nn.Embedding(num_relations, out_channels)

    def forward(self, x, edge_index, edge_type):
        return self.propagate(edge_index, x=self.lin(x), edge_type=edge_type)

    def message(self, x_j, edge_type):  # pyright: ignore[reportIncompatibleMethodOverride] - PyG reads the names
        return torch.tanh(x_j + self.shift(edge_type))


class ByMask(nn.Module):
    """Convolutions over the edges of one type, picked by the model."""

    def __init__(self, in_channels, out_channels):
        super().__init__()
        self.conv = SAGEConv(in_channels, out_channels)

    def forward(self, x, edge_index, edge_type):
        return self.conv(x, edge_index[:, edge_type == 0])


class ByDictionary(nn.Module):
    def __init__(self, in_channels, out_channels):
        super().__init__()
        self.conv = pyg.HeteroConv({("a", "to", "b"): SAGEConv(in_channels, out_channels)})

    def forward(self, x_dict, edge_index_dict):
        return self.conv(x_dict, edge_index_dict)


def to_hetero(in_channels, out_channels):
    kinds = (["a", "b"], [("a", "to", "b"), ("b", "of", "a")])
    return pyg.to_hetero(sage(in_channels, out_channels), kinds)


class Typed2(nn.Module):
    """Two layers of HeteroConv, with convolutions of several kinds."""

    def __init__(self, hidden, out_channels, metadata, kind="mixed", aggr="sum"):
        super().__init__()
        kinds = {
            "sage": lambda i, key: SAGEConv((-1, -1), hidden),
            "max": lambda i, key: SAGEConv((-1, -1), hidden, aggr="max"),
            "gat": lambda i, key: GATConv((-1, -1), hidden // 2, heads=2, add_self_loops=False),
            "gatv2": lambda i, key: GATv2Conv((-1, -1), hidden // 2, heads=2, add_self_loops=False),
            "graph": lambda i, key: GraphConv((-1, -1), hidden),
            "transformer": lambda i, key: TransformerConv((-1, -1), hidden // 2, heads=2),
            "median": lambda i, key: SAGEConv((-1, -1), hidden, aggr="median"),
        }
        names = ["sage", "gat", "graph", "gatv2", "max"]

        def conv(i, key):
            if kind == "mixed" and key[0] == key[2]:
                return GCNConv(-1, hidden)
            return kinds[names[i % len(names)] if kind == "mixed" else kind](i, key)

        self.convs = nn.ModuleList(
            pyg.HeteroConv({key: conv(i, key) for i, key in enumerate(metadata[1])}, aggr=aggr) for _ in range(2)
        )
        self.lin = pyg.Linear(-1, out_channels)

    def forward(self, x_dict, edge_index_dict):
        x_dict = {key: F.dropout(x, p=0.2, training=self.training) for key, x in x_dict.items()}
        for conv in self.convs:
            x_dict = {key: x.relu() for key, x in conv(x_dict, edge_index_dict).items()}
            x_dict = {key: F.dropout(x, p=0.3, training=self.training) for key, x in x_dict.items()}
        return self.lin(x_dict["a"])


class HGTNet(nn.Module):
    """PyG's example: a dense layer of each type, HGTConv, one head."""

    def __init__(self, hidden, out_channels, metadata, heads=2):
        super().__init__()
        self.lin_dict = nn.ModuleDict({kind: pyg.Linear(-1, hidden) for kind in metadata[0]})
        self.convs = nn.ModuleList(pyg.HGTConv(hidden, hidden, metadata, heads) for _ in range(2))
        self.lin = nn.Linear(hidden, out_channels)

    def forward(self, x_dict, edge_index_dict):
        x_dict = {kind: self.lin_dict[kind](x).relu() for kind, x in x_dict.items()}
        for conv in self.convs:
            x_dict = conv(x_dict, edge_index_dict)
        return self.lin(F.dropout(x_dict["a"], p=0.3, training=self.training))


def hgt(out_channels, metadata, hidden=8):
    """Lazy widths at once: HGTConv as the first layer."""

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv = pyg.HGTConv(-1, hidden, metadata, heads=2)
            self.out = pyg.HeteroDictLinear(-1, out_channels, types=metadata[0])

        def forward(self, x_dict, edge_index_dict):
            return self.out(self.conv(x_dict, edge_index_dict))

    return Net()


class NormedByType(nn.Module):
    """What to_hetero copies for each type: convolutions, batch norms, dense layers."""

    def __init__(self, hidden, out_channels, kind="sage"):
        super().__init__()
        conv = {"sage": SAGEConv, "gat": lambda a, b: GATConv(a, b // 2, heads=2, add_self_loops=False)}[kind]
        self.conv1, self.conv2 = conv((-1, -1), hidden), conv((-1, -1), hidden)
        self.norm, self.lin, self.drop = pyg.BatchNorm(hidden), pyg.Linear(-1, out_channels), nn.Dropout(0.3)

    def forward(self, x, edge_index):
        x = self.drop(self.norm(self.conv1(x, edge_index)).relu())
        return self.lin(self.conv2(x, edge_index) + x)


def hetero_of(out_channels, metadata, hidden=8, kind="sage"):
    return pyg.to_hetero(NormedByType(hidden, out_channels, kind), metadata, aggr="sum")


def always_dropping(out_channels, metadata):
    """to_hetero traces self.training of a forward as it is."""
    return pyg.to_hetero(TwoLayers(SAGEConv((-1, -1), 8), SAGEConv((-1, -1), out_channels)), metadata)


class TypedWeights(nn.Module):
    """Weights of the edges of each type."""

    def __init__(self, out_channels, metadata, hidden=8):
        super().__init__()
        self.conv = pyg.HeteroConv(
            {
                key: GCNConv(-1, hidden) if key[0] == key[2] else GraphConv((-1, -1), hidden, aggr="mean")
                for key in metadata[1]
            }
        )
        self.lin = pyg.HeteroDictLinear(hidden, out_channels, types=metadata[0])

    def forward(self, x_dict, edge_index_dict, edge_weight_dict):
        return self.lin(self.conv(x_dict, edge_index_dict, edge_weight_dict=edge_weight_dict))


class TypedAttributes(nn.Module):
    """Rows of the edges of each type, encoded by the model; a message of its own, and attention that reads them."""

    def __init__(self, out_channels, metadata, edge_dim, hidden=8):
        super().__init__()
        self.encoders = nn.ModuleDict({"__".join(key): nn.Linear(edge_dim, hidden) for key in metadata[1]})

        def conv(i):
            if i % 2:
                return GATConv((-1, -1), hidden, edge_dim=hidden, add_self_loops=False)
            return pyg.GeneralConv((-1, -1), hidden, in_edge_channels=hidden)

        self.conv = pyg.HeteroConv({key: conv(i) for i, key in enumerate(metadata[1])}, aggr="mean")
        self.lin = nn.Linear(hidden, out_channels)

    def forward(self, x_dict, edge_index_dict, edge_attr_dict):
        rows = {key: self.encoders["__".join(key)](attr) for key, attr in edge_attr_dict.items()}
        return self.lin(self.conv(x_dict, edge_index_dict, edge_attr_dict=rows)["b"])


class HardWired(nn.Module):
    """Types of one dataset, as PyG's examples write them; without metadata. Edges of one type are not read."""

    def __init__(self, hidden, out_channels):
        super().__init__()
        self.conv = pyg.HeteroConv(
            {
                ("paper", "cites", "paper"): GCNConv(-1, hidden),
                ("author", "writes", "paper"): SAGEConv((-1, -1), hidden),
                ("paper", "rev_writes", "author"): GATConv((-1, -1), hidden, add_self_loops=False),
            },
            aggr="mean",
        )
        self.lin = nn.Linear(hidden, out_channels)

    def forward(self, x_dict, edge_index_dict):
        x_dict = self.conv(x_dict, edge_index_dict)
        return self.lin(x_dict["author"].relu())


class PapersAndAuthors(nn.Module):
    """Of the types of a dataset, as PyG's examples are written, without metadata; edges of other types are not read."""

    def __init__(self, hidden, out_channels):
        super().__init__()
        self.conv1, self.conv2 = (
            pyg.HeteroConv(
                {
                    ("author", "writes", "paper"): SAGEConv((-1, -1), hidden),
                    ("paper", "of", "author"): GATConv((-1, -1), hidden // 2, heads=2, add_self_loops=False),
                }
            )
            for _ in range(2)
        )
        self.lin = nn.Linear(hidden, out_channels)

    def forward(self, x_dict, edge_index_dict):
        x_dict = {key: F.dropout(x, p=0.2, training=self.training) for key, x in x_dict.items()}
        x_dict = {key: x.relu() for key, x in self.conv1(x_dict, edge_index_dict).items()}
        return self.lin(self.conv2(x_dict, edge_index_dict)["paper"])


class ByName(nn.Module):
    """Logits of a type that has no labels."""

    def __init__(self, out_channels):
        super().__init__()
        self.conv = pyg.HeteroConv({("paper", "of", "author"): SAGEConv((-1, -1), out_channels)})

    def forward(self, x_dict, edge_index_dict):
        return self.conv(x_dict, edge_index_dict)


class Mixing(nn.Module):
    """Rows of two types, added up."""

    def __init__(self, out_channels):
        super().__init__()
        self.lin = nn.ModuleDict({key: pyg.Linear(-1, out_channels) for key in ("paper", "author")})

    def forward(self, x_dict, edge_index_dict):
        return self.lin["paper"](x_dict["paper"]) + self.lin["author"](x_dict["author"])


class OfOther(nn.Module):
    """Edges between other types than the rows it gives with them."""

    def __init__(self, out_channels):
        super().__init__()
        self.conv = SAGEConv((-1, -1), out_channels)

    def forward(self, x_dict, edge_index_dict):
        return self.conv((x_dict["paper"], x_dict["paper"]), edge_index_dict["author", "writes", "paper"])


class CentredByType(nn.Module):
    """A mean over all rows of a type."""

    def __init__(self, hidden, out_channels, metadata):
        super().__init__()
        self.conv = pyg.HeteroConv({key: SAGEConv((-1, -1), hidden) for key in metadata[1]})
        self.lin = nn.Linear(hidden, out_channels)

    def forward(self, x_dict, edge_index_dict):
        x = self.conv(x_dict, edge_index_dict)["a"]
        return self.lin(x - x.mean(0))


class InitialResidual(nn.Module):
    """GCNII: the first rows are read by every convolution."""

    def __init__(self, in_channels, out_channels, hidden=8, num_layers=4):
        super().__init__()
        self.begin, self.end = nn.Linear(in_channels, hidden), nn.Linear(hidden, out_channels)
        self.convs = nn.ModuleList(pyg.GCN2Conv(hidden, 0.1, theta=0.5, layer=i + 1) for i in range(num_layers))

    def forward(self, x, edge_index):
        h = first = self.begin(F.dropout(x, 0.2, self.training)).relu()
        for conv in self.convs:
            h = conv(F.dropout(h, 0.3, training=self.training), first, edge_index).relu()
        return self.end(F.dropout(h, 0.3, training=self.training))


class Residual(nn.Module):
    """Blocks that add what they compute to their input, in modules of their own; the ReLU writes in place."""

    def __init__(self, in_channels, out_channels, hidden=8, num_layers=4, kind="sage"):
        super().__init__()
        self.begin, self.end = nn.Linear(in_channels, hidden), nn.Linear(hidden, out_channels)
        made = Gated if kind == "gated" else SAGEConv
        self.blocks = nn.ModuleList(Block(made(hidden, hidden), hidden) for _ in range(num_layers))

    def forward(self, x, edge_index):
        x = self.begin(x)
        for block in self.blocks:
            x = block(x, edge_index)
        return self.end(x)


class Block(nn.Module):
    def __init__(self, conv, hidden):
        super().__init__()
        self.conv, self.norm, self.act = conv, nn.LayerNorm(hidden), nn.ReLU(inplace=True)

    def forward(self, x, edge_index):
        return x + F.dropout(self.act(self.norm(self.conv(x, edge_index))), p=0.3, training=self.training)


class Branches(nn.Module):
    """Two convolutions of the same rows, shapes and types that are read from rows, a share that is learned, in-place
    writes, and another way in training than in evaluation."""

    def __init__(self, in_channels, out_channels, hidden=6):
        super().__init__()
        self.left, self.right = SAGEConv(in_channels, hidden), GCNConv(in_channels, hidden)
        self.last, self.share = GraphConv(hidden, out_channels), nn.Parameter(torch.tensor([0.3, -0.2]))
        self.register_buffer("scale", torch.tensor(0.7))

    def forward(self, x, edge_index):
        left, right = self.left(x, edge_index), self.right(x, edge_index)
        left, _ = torch.stack([left, -left], -1).view(x.size(0), -1, 2).max(dim=-1)
        parts = self.share.softmax(0)
        rows = parts[0] * left + parts[1] * right.to(x.dtype)
        rows[:, :2].mul_(self.scale)
        rows = rows + torch.ones(x.shape[0], 1, dtype=x.dtype, device=x.device)
        if self.training:
            rows = F.dropout(rows, 0.25)
        return self.last(rows, edge_index) + x[:, :1]


class Wavering(TwoLayers):
    """Its way depends on values."""

    def __init__(self, in_channels, out_channels):
        super().__init__(SAGEConv(in_channels, 8), SAGEConv(8, out_channels))

    def forward(self, x, edge_index):
        x = self.conv1(x, edge_index)
        return self.conv2(x.relu() if (x > 0).any() else x, edge_index)


class Repeated(nn.Module):
    """One convolution, several times."""

    def __init__(self, in_channels, out_channels, hidden=8):
        super().__init__()
        self.begin, self.conv, self.end = (
            nn.Linear(in_channels, hidden),
            SAGEConv(hidden, hidden),
            nn.Linear(hidden, out_channels),
        )

    def forward(self, x, edge_index):
        x = self.conv(self.begin(x), edge_index).relu()
        return self.end(self.conv(x, edge_index))


class Shared(TwoLayers):
    """One activation with a parameter in two layers."""

    def __init__(self, in_channels, out_channels):
        super().__init__(SAGEConv(in_channels, 8), SAGEConv(8, out_channels))
        self.act = nn.PReLU()

    def forward(self, x, edge_index):
        return self.conv2(self.act(self.conv1(self.act(x), edge_index)), edge_index)


class Outside(TwoLayers):
    """Reads a tensor that is neither a parameter nor a buffer."""

    def __init__(self, in_channels, out_channels):
        super().__init__(SAGEConv(in_channels, 8), SAGEConv(8, out_channels))
        self.scale = torch.tensor(2.0)

    def forward(self, x, edge_index):
        return self.conv2(self.conv1(x, edge_index) * self.scale, edge_index)


class Backwards(nn.Module):
    """Registered in another order than it runs."""

    def __init__(self, in_channels, out_channels):
        super().__init__()
        self.first, self.second = SAGEConv(8, 8), SAGEConv(in_channels, 8)
        self.head = nn.Linear(8, out_channels)

    def forward(self, x, edge_index):
        return self.head(self.first(self.second(x, edge_index).relu(), edge_index))


class Partly(nn.Module):
    """Two convolutions, of which some parts are frozen, unread, of two names, parametrized or more than parameters.

    `frozen`: beginnings of names. `spare`: a matrix that forward never reads.
    """

    def __init__(self, in_channels, out_channels, frozen=(), spare=False, kind="SAGEConv"):
        super().__init__()
        made = {
            "SAGEConv": lambda i, o: SAGEConv(i, o),
            "GCNConv": lambda i, o: GCNConv(i, o),
            "GATConv": lambda i, o: GATConv(i, o, add_self_loops=False),
            "GraphConv": lambda i, o: GraphConv(i, o),
            "GINConv": lambda i, o: GINConv(nn.Linear(i, o), train_eps=True),
        }[kind]
        self.first, self.second = made(in_channels, 8), made(8, out_channels)
        self.norm: nn.Module = nn.LayerNorm(8)
        if spare:
            self.spare = nn.Linear(3, 3)
        for name, parameter in self.named_parameters():
            parameter.requires_grad_(not name.startswith(tuple(frozen)))

    def forward(self, x, edge_index):
        return self.second(self.norm(self.first(x, edge_index)).relu(), edge_index)


class Told(nn.Module):
    """A module with an extra state and a buffer."""

    def __init__(self):
        super().__init__()
        self.register_buffer("scale", torch.tensor(2.0))
        self.told = {"times": 3}

    def get_extra_state(self):
        return self.told

    def set_extra_state(self, state):
        self.told = state

    def forward(self, x):
        return x * self.scale * self.told["times"]


def partly(in_channels, out_channels, of):
    """A model with weights of another kind than parameters of one name."""
    if of == "buffers":
        return models.GIN(in_channels, 8, 2, out_channels)
    if of == "batch_norm":
        return models.GraphSAGE(in_channels, 8, 2, out_channels, norm="batch_norm")
    net = Partly(in_channels, out_channels, kind="GraphConv")
    if of in ("frozen", "all"):
        net = Partly(in_channels, out_channels, frozen=("first.lin_root", "norm"), spare=True, kind="GraphConv")
    if of in ("shared", "all"):
        net.again = net.norm
        net.alias = net.second.lin_rel
    if of in ("tied", "all"):
        net.second.lin_root.weight = net.second.lin_rel.weight
    if of in ("weight_norm", "all"):
        weight_norm(net.first.lin_rel, "weight")
        net.norm = nn.Sequential(net.norm, weight_norm(nn.Linear(8, 8)))
    if of == "spectral_norm":
        spectral_norm(net.first.lin_rel, "weight")
    if of in ("extra_state", "all"):
        net.norm = nn.Sequential(net.norm, Told())
    return net
