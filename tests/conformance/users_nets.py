"""Models that users brought, and forwards as in PyG's examples, without dropout; `of(name)` makes one."""

# attributes of torch and PyG, and JSON, have no types here
# pyright: reportCallIssue=false, reportIncompatibleMethodOverride=false

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint
from torch_geometric import nn as pyg
from torch_geometric.nn import models
from torch_geometric.nn.attention import PolynormerAttention

from conformance.plain_loop import drawing

TARGET = "conformance.users_nets.of"
NETS: dict[str, type[nn.Module]] = {}
EXAMPLES: dict[str, type[nn.Module]] = {}


def of(name: str) -> nn.Module:
    with drawing(1):
        return (NETS | EXAMPLES)[name]()


def net(forward: Callable[..., torch.Tensor], **parts: Callable[[], nn.Module]) -> type[nn.Module]:
    """A model of `parts` with this forward: by default a convolution, and a dense layer."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            for name, make in ({"a": lambda: pyg.SAGEConv(8, 8), "head": lambda: nn.Linear(8, 3)} | parts).items():
                self.add_module(name, make())

    return type("Net", (Net,), {"forward": forward})


def _frozen() -> nn.Module:
    return pyg.SAGEConv(8, 8).requires_grad_(False)


def _checkpointed(self, x, edge_index, reentrant):
    return self.head(checkpoint(self.a, x.requires_grad_(), edge_index, use_reentrant=reentrant).relu())


def _plain(self, x, edge_index):
    return self.head(self.a(x, edge_index))


class CallsBase(pyg.MixHopConv):
    def forward(self, x, edge_index):
        return super().forward(x, edge_index).relu()


class CallsLoops(pyg.AGNNConv):
    def forward(self, x, edge_index):
        return super().forward(x, edge_index)


class NamesOfOurs(pyg.MessagePassing):
    def forward(self, x, edge_index):
        return self.propagate(edge_index, x=x, conv=2.0, local=0.5, own=3.0)

    def message(self, x_j, conv, local, own):
        return x_j * conv * local * own


def _branched(h):
    return h.relu() if h.sum() > 0 else h.tanh()


class Deep(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.head, self.first = pyg.GENConv(8, 8, norm="layer"), nn.Linear(8, 3), nn.Linear(8, 8)
        self.layer = pyg.DeepGCNLayer(self.a, nn.LayerNorm(8), nn.ReLU(), block="res+", ckpt_grad=True)

    def forward(self, x, edge_index):
        return self.head(self.layer(self.first(x), edge_index))


class KeepsAttention(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.head = pyg.GATConv(8, 4, heads=2), nn.Linear(8, 3)

    def forward(self, x, edge_index):
        h, (_, self.alpha) = self.a(x, edge_index, return_attention_weights=True)
        return self.head(h)


class AttentionLoss(KeepsAttention):
    """The weights of attention are read again, as rows of edges."""

    def forward(self, x, edge_index):
        out = super().forward(x, edge_index)
        return out * self.alpha.mean()


ROWS = {"rows": lambda: nn.Embedding(24, 8)}
NETS |= {
    f"learned rows into {name}": net(
        lambda self, x, edge_index: self.head(self.a(self.rows.weight, edge_index)), a=make, **ROWS
    )
    for name, make in {
        "LGConv": pyg.LGConv,
        "SAGEConv without root": lambda: pyg.SAGEConv(8, 8, root_weight=False),
        "GATConv": lambda: pyg.GATConv(8, 8, add_self_loops=False),
        "SAGEConv": lambda: pyg.SAGEConv(8, 8),
    }.items()
}
NETS |= {
    "Beside": net(
        lambda self, x, edge_index: self.a(torch.cat([x, self.rows.weight], 1), edge_index),
        a=lambda: pyg.SAGEConv(16, 3),
        head=nn.Identity,
        **ROWS,
    ),
    "Frozen": net(lambda self, x, edge_index: self.head(self.a(x, edge_index).relu()), a=_frozen),
    "Reversible": net(_plain, a=lambda: pyg.GroupAddRev(pyg.SAGEConv(4, 4), num_groups=2)),
    "Deep": Deep,
    "NormOfHeads": net(
        lambda self, x, edge_index: self.head(self.norm(self.a(x, edge_index).view(len(x), 2, -1)).flatten(1)),
        a=lambda: pyg.GATConv(8, 3, heads=2),
        norm=lambda: nn.BatchNorm1d(2),
        head=lambda: nn.Linear(6, 3),
    ),
    "KeepsAttention": KeepsAttention,
    "AttentionLoss": AttentionLoss,
    "Polynormer": net(
        lambda self, x, edge_index: self.head(self.mix(x[None])[0] + self.a(x, edge_index)),
        mix=lambda: PolynormerAttention(8, heads=2, head_channels=4),
    ),
    "Positions": net(  # a part of the forward runs in evaluation alone
        lambda self, x, edge_index: self.head(self.a(x, edge_index) if self.training else self.a(x, edge_index).relu())
    ),
    "Branching": net(lambda self, x, edge_index: self.head(_branched(self.a(x, edge_index)))),
    "checkpoint": net(lambda self, x, edge_index: _checkpointed(self, x, edge_index, False)),
    "reentrant checkpoint": net(lambda self, x, edge_index: _checkpointed(self, x, edge_index, True)),
    "super().forward of MixHopConv": net(_plain, a=lambda: CallsBase(8, 4, powers=[0, 1])),
    "super().forward of AGNNConv": net(_plain, a=CallsLoops),
    "arguments of a message named conv, local, own": net(_plain, a=NamesOfOurs),
}
NETS |= {"LINKX": lambda: models.LINKX(24, 8, 8, 3, num_layers=2)}  # pyright: ignore[reportAssignmentType]
NETS |= {f"jk={jk}": lambda jk=jk: models.GraphSAGE(8, 8, 2, 3, jk=jk) for jk in ("lstm", "cat")}  # pyright: ignore[reportAssignmentType]
NETS |= {"GIN": lambda: models.GIN(8, 8, 2, 3)}  # pyright: ignore[reportAssignmentType]


class Stack(nn.Module):
    """Two convolutions, as most examples have them."""

    def __init__(self, first: nn.Module, second: nn.Module, act=F.relu) -> None:
        super().__init__()
        self.conv1, self.conv2, self.act = first, second, act

    def forward(self, x, edge_index):
        x = F.dropout(x, p=0.0, training=self.training)
        x = self.act(self.conv1(x, edge_index))
        x = F.dropout(x, p=0.0, training=self.training)
        return F.log_softmax(self.conv2(x, edge_index), dim=1)


class WeightedGCN(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1, self.conv2 = pyg.GCNConv(8, 8, cached=True), pyg.GCNConv(8, 3, cached=True)

    def forward(self, x, edge_index, edge_weight=None):
        x = self.conv1(F.dropout(x, p=0.0, training=self.training), edge_index, edge_weight).relu()
        return self.conv2(F.dropout(x, p=0.0, training=self.training), edge_index, edge_weight)


class Sampled(nn.Module):
    def __init__(self):
        super().__init__()
        self.convs = nn.ModuleList([pyg.SAGEConv(8, 8), pyg.SAGEConv(8, 8), pyg.SAGEConv(8, 3)])

    def forward(self, x, edge_index):
        for i, conv in enumerate(self.convs):
            x = conv(x, edge_index)
            if i < len(self.convs) - 1:
                x = F.dropout(x.relu_(), p=0.0, training=self.training)
        return x


class Isomorphism(nn.Module):
    def __init__(self):
        super().__init__()
        self.convs = nn.ModuleList(pyg.GINConv(pyg.MLP([8, 8, 8]), train_eps=False) for _ in range(2))
        self.mlp = pyg.MLP([8, 8, 3], norm=None)

    def forward(self, x, edge_index):
        for conv in self.convs:
            x = conv(x, edge_index).relu()
        return self.mlp(x)


class Neighbours(nn.Module):
    def __init__(self):
        super().__init__()
        self.lin1, self.lin2 = nn.Linear(8, 8), nn.Linear(8, 3)
        self.convs = nn.ModuleList(pyg.DNAConv(8, heads=2, groups=2, cached=True) for _ in range(2))

    def forward(self, x, edge_index):
        x_all = F.relu(self.lin1(x)).view(-1, 1, 8)
        for conv in self.convs:
            x = F.relu(conv(x_all, edge_index)).view(-1, 1, 8)
            x_all = torch.cat([x_all, x], dim=1)
        return torch.log_softmax(self.lin2(x_all[:, -1]), dim=1)


class Initial(nn.Module):
    def __init__(self):
        super().__init__()
        self.lins = nn.ModuleList([nn.Linear(8, 8), nn.Linear(8, 3)])
        self.convs = nn.ModuleList(pyg.GCN2Conv(8, 0.1, 0.5, layer + 1, normalize=True) for layer in range(3))

    def forward(self, x, edge_index):
        x = x_0 = self.lins[0](x).relu()
        for conv in self.convs:
            x = conv(x, x_0, edge_index).relu()
        return self.lins[1](x).log_softmax(dim=-1)


class SelfSupervised(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1 = pyg.SuperGATConv(8, 4, heads=2, attention_type="MX")
        self.conv2 = pyg.SuperGATConv(8, 3, heads=2, concat=False, attention_type="MX")

    def forward(self, x, edge_index):
        x = F.elu(self.conv1(x, edge_index))
        loss = self.conv1.get_attention_loss()
        x = self.conv2(x, edge_index)
        return F.log_softmax(x, dim=-1), loss + self.conv2.get_attention_loss()


class Proteins(nn.Module):
    """Deep residual layers over encoded rows of edges."""

    def __init__(self):
        super().__init__()
        self.node_encoder, self.edge_encoder, self.lin = nn.Linear(8, 8), nn.Linear(4, 8), nn.Linear(8, 3)
        self.layers = nn.ModuleList(
            pyg.DeepGCNLayer(
                pyg.GENConv(8, 8, aggr="softmax", t=1.0, learn_t=True, num_layers=2, norm="layer"),
                pyg.LayerNorm(8, mode="node"), nn.ReLU(inplace=True), block="res+", dropout=0.0, ckpt_grad=i % 2 == 1,
            )
            for i in range(3)
        )  # fmt: skip

    def forward(self, x, edge_index, edge_attr):
        x, edge_attr = self.node_encoder(x), self.edge_encoder(edge_attr)
        x = self.layers[0].conv(x, edge_index, edge_attr)
        for layer in self.layers[1:]:
            x = layer(x, edge_index, edge_attr)
        return self.lin(self.layers[0].act(self.layers[0].norm(x)))


def _stack(make):
    return lambda: Stack(make(8, 8), make(8, 3))


EXAMPLES |= {
    "WeightedGCN": WeightedGCN,
    "Sampled": Sampled,
    "Isomorphism": Isomorphism,
    "Predicts": net(
        lambda self, x, edge_index: self.prop1(self.head(self.a(x).relu()), edge_index).log_softmax(1),
        a=lambda: nn.Linear(8, 8),
        prop1=lambda: pyg.APPNP(K=4, alpha=0.1),
    ),
    "Simple": net(
        lambda self, x, edge_index: self.a(x, edge_index).log_softmax(1),
        a=lambda: pyg.SGConv(8, 3, K=2, cached=True),
        head=nn.Identity,
    ),
    "Neighbours": Neighbours,
    "Initial": Initial,
    "SelfSupervised": SelfSupervised,
    "Proteins": Proteins,
}
EXAMPLES |= {  # pyright: ignore[reportAssignmentType]
    "GAT": lambda: Stack(pyg.GATConv(8, 4, heads=2), pyg.GATConv(8, 3, heads=2, concat=False), F.elu),
    "ARMA": _stack(lambda i, o: pyg.ARMAConv(i, o, num_stacks=3, num_layers=2, shared_weights=True, dropout=0.0)),
    "TAG": _stack(pyg.TAGConv),
    "GraphUNet": lambda: models.GraphUNet(8, 8, 3, depth=2, pool_ratios=[0.7, 0.5]),
    "PMLP": lambda: models.PMLP(8, 8, 3, 2, dropout=0.0),
}
