"""PyG models as their users write them, and some that cannot run on a part of a graph. Nothing here knows gnnpar."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn
from torch_geometric.nn import (
    GATConv,
    GATv2Conv,
    GCNConv,
    GINConv,
    GraphConv,
    JumpingKnowledge,
    MessagePassing,
    SAGEConv,
    TransformerConv,
)


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


class Normed(TwoLayers):
    def __init__(self, in_channels, out_channels):
        super().__init__(GCNConv(in_channels, 8), GCNConv(8, out_channels))
        self.norm = nn.BatchNorm1d(8)

    def forward(self, x, edge_index):
        return self.conv2(self.norm(self.conv1(x, edge_index)), edge_index)


class Centred(TwoLayers):
    def __init__(self, in_channels, out_channels):
        super().__init__(GCNConv(in_channels, 8), GCNConv(8, out_channels))

    def forward(self, x, edge_index):
        x = self.conv1(x, edge_index)
        return self.conv2(x - x.mean(0), edge_index)


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


def transformer(in_channels, out_channels):
    return TwoLayers(TransformerConv(in_channels, 8), TransformerConv(8, out_channels))
