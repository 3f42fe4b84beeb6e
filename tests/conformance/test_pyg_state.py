"""State, hooks, noise and autograd functions in a PyG model: trained as in PyG's own loop, or refused in one line."""

# modules and objects hold what a user puts there
# pyright: reportAttributeAccessIssue=false, reportArgumentType=false, reportIncompatibleMethodOverride=false

from __future__ import annotations

import random

import pytest
import torch
from torch import nn
from torch_geometric.nn import GATConv, GraphConv, MessagePassing, ResGatedGraphConv, SAGEConv, SGConv, SuperGATConv

from conformance.plain_loop import drawing, graph, plain, verdict
from gnnpar.models.pyg.nested import python_state


class Held:
    def __init__(self):
        self.value = 1.0


class Reversed(torch.autograd.Function):
    @staticmethod
    def forward(ctx, h):
        return h.view_as(h)

    @staticmethod
    def backward(ctx, grad):
        return -grad


class Rounded(torch.autograd.Function):
    @staticmethod
    def forward(ctx, h):
        return (2 * h).round() / 2

    @staticmethod
    def backward(ctx, grad):
        return grad


class Aside(MessagePassing):
    """Keep a tensor of every message, and read it in forward."""

    def __init__(self, kept):
        super().__init__(aggr="add")
        self.lin, self.kept = nn.Linear(8, 8), kept

    def forward(self, x, edge_index):
        if isinstance(self.kept, list):
            self.kept.clear()
        out = self.propagate(edge_index, x=self.lin(x))
        return out * (1 + (self.kept.value if isinstance(self.kept, Held) else sum(self.kept)))

    def message(self, x_j):
        if isinstance(self.kept, Held):
            self.kept.value = x_j.square().mean()
        else:
            self.kept.append(x_j.square().mean())
        return x_j.tanh()


def cooled_dictionary(net, h):
    net.state["tau"] *= 0.8 if net.training else 1.0
    return (h / net.state["tau"]).tanh()


def cooled_list(net, h):
    if net.training:
        net.state.pop()
    return h * net.state[-1]


def cooled_iterator(net, h):
    return h * next(net.state)


def cooled_object(net, h):
    net.state.value *= 0.8 if net.training else 1.0
    return (h / net.state.value).tanh()


def cooled_buffer(net, h):
    net.tau = net.tau * 0.8 if net.training else net.tau
    return (h / net.tau).tanh()


def clamped_data(net, h):
    if net.training:
        net.state.weight.data.clamp_(0, 0.2)
    return net.state(h)


def clamped_detached(net, h):
    if net.training:
        net.state.weight.detach().clamp_(0, 0.2)
    return net.state(h)


def attended(net, h):
    pair = torch.stack([h, h.tanh()], 1)
    return net.state(pair, pair, pair)[0].mean(1)


def chosen_rows(net, h):
    chosen, out = h[:, 0] > 0, h.clone()
    out[chosen] = net.state(h[chosen])
    return out


STEPS = {
    "reversed gradient": (lambda net, h: Reversed.apply(h), None),
    "rounded": (lambda net, h: Rounded.apply(h), None),
    "dictionary": (cooled_dictionary, lambda: {"tau": 1.0}),
    "list": (cooled_list, lambda: [0.5, 0.6, 0.7, 0.8, 0.9, 1.0]),
    "iterator": (cooled_iterator, lambda: iter([i / 100 for i in range(100, 0, -1)])),
    "object": (cooled_object, Held),
    "buffer": (cooled_buffer, None),
    "clamped data": (clamped_data, lambda: nn.Linear(8, 8)),
    "clamped detached": (clamped_detached, lambda: nn.Linear(8, 8)),
    "attention dropout": (attended, lambda: nn.MultiheadAttention(8, 2, dropout=0.5, batch_first=True)),
    "python noise": (lambda net, h: h if random.random() < 0.01 else h.tanh(), None),
    "moved rows": (lambda net, h: h + h.unfold(0, len(h), 1).mean(-1), None),
    "norm of chosen rows": (chosen_rows, lambda: nn.BatchNorm1d(8)),
    "noise beside sampling": (lambda net, h: h if random.random() < 0.01 else h.tanh(), lambda: SuperGATConv(8, 8)),
}


class Net(nn.Module):
    def __init__(self, step: str) -> None:
        super().__init__()
        make = {
            "message list": lambda: Aside([]),
            "message object": lambda: Aside(Held()),
            "lift": lambda: Lifting(None),
        }
        self.a, self.b = (make.get(step, lambda: SAGEConv(8, 8))() for _ in range(2))
        self.head, self.step = nn.Linear(8, 3), STEPS.get(step, (lambda net, h: h, None))[0]
        if state := STEPS.get(step, (None, None))[1]:
            self.state = state()
        if step == "cached rows":
            self.b = SGConv(8, 8, K=2, cached=True)
        if step == "buffer":
            self.register_buffer("tau", torch.tensor(1.0))
        if step == "clamped gradient":
            self.head.weight.register_hook(lambda grad: grad.clamp(-0.01, 0.01))
        if step == "hook after gradients":
            self.head.weight.register_post_accumulate_grad_hook(lambda weight: None)

    def forward(self, x, edge_index):
        return self.head(self.b(self.step(self, self.a(x, edge_index)), edge_index))


class Lifting(Aside):
    """Gather other rows than PyG."""

    def _lift(self, src, edge_index, dim):
        return super()._lift(src, edge_index, dim).tanh()

    def forward(self, x, edge_index):
        return self.propagate(edge_index, x=self.lin(x))

    def message(self, x_j):
        return x_j


class Weighted(nn.Module):
    """Write into the weights of edges."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = GraphConv(8, 3)

    def forward(self, x, edge_index, edge_weight):
        edge_weight.clamp_(0.7, 1.2)
        return self.conv(x, edge_index, edge_weight)


class OfFeatures(nn.Module):
    """Rows that are reshaped, edge weights of one convolution that another reads, features that are written into."""

    def __init__(self, step: str) -> None:
        super().__init__()
        self.a, self.b, self.step = GATConv(8, 8, add_self_loops=False), GraphConv(8, 3), step

    def forward(self, x, edge_index):
        if self.step == "doubled features":
            x *= 2
        h, (_, weights) = self.a(x, edge_index, return_attention_weights=True)
        if self.step == "reshaped rows":
            h = h.reshape(2, -1, 8).transpose(0, 1).reshape(-1, 8)
        return self.b(h, edge_index, weights.view(-1) if self.step == "attention of edges" else None)


class Penalised(nn.Module):
    """Read the gradient of a convolution's output."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.conv, self.head = nn.Linear(8, 8), ResGatedGraphConv(8, 8), nn.Linear(8, 3)

    def forward(self, x, edge_index):
        with torch.enable_grad():
            begun = self.first(x)
            h = self.conv(begun, edge_index)
            (grad,) = torch.autograd.grad(h.tanh().sum(), begun, create_graph=True)
        return self.head(h + grad)


def of(step: str) -> nn.Module:
    with drawing(1):
        if step in ("doubled features", "reshaped rows", "attention of edges"):
            return OfFeatures(step)
        return {"penalised": Penalised, "weights": Weighted}.get(step, lambda: Net(step))()


FUNCTION = "itself or in a torch.autograd.Function"
NOISE = "its noise is not keyed"


@pytest.mark.parametrize(
    ("step", "strategy", "world", "line"),
    [
        *(("reversed gradient", *place) for place in (("graph_parallel", 2, ""), ("gnnpipe", 1, FUNCTION))),
        ("rounded", "gnnpipe", 2, FUNCTION),
        ("dictionary", "graph_parallel", 2, ""),
        *((step, "gnnpipe", 1, "its forward changes state") for step in ("dictionary", "list", "object")),
        ("buffer", "gnnpipe", 1, "its forward writes into tau"),
        *(
            (step, "gnnpipe", 1, "its forward writes into state.weight")
            for step in ("clamped data", "clamped detached")
        ),
        ("clamped data", "graph_parallel", 2, ""),
        ("lift", "graph_parallel", 2, ""),
        ("cached rows", "graph_parallel", 2, ""),
        *(
            (step, "gnnpipe", 1, "its forward gives other values the second time")
            for step in ("iterator", "cached rows")
        ),
        ("doubled features", "gnnpipe", 1, "its forward writes into the features"),
        ("reshaped rows", "graph_parallel", 2, "cannot run on a graph of another size"),
        ("attention of edges", "graph_parallel", 2, ""),
        ("attention of edges", "gnnpipe", 1, "does not have one row per node"),
        ("moved rows", "graph_parallel", 3, "unfold of the model gives [1, 8, 8]"),  # each rank has 8 rows of 8 columns
        ("norm of chosen rows", "single", 1, ""),
        ("norm of chosen rows", "graph_parallel", 3, "batch norm of chosen rows"),
        ("weights", "single", 1, "the model writes into edge_weight (clamp); write into a copy"),
        ("penalised", "single", 1, "differentiates a gradient again (create_graph=True)"),
        *((step, "single", 1, "") for step in ("message list", "message object")),
        *((step, "single", 1, NOISE) for step in ("attention dropout", "python noise", "noise beside sampling")),
        (
            "clamped gradient",
            "graph_parallel",
            2,
            "a hook of head.weight's gradient (register_hook) would see the share",
        ),
        ("hook after gradients", "single", 1, "head.weight has a hook of register_post_accumulate_grad_hook"),
    ],
)
def test_models_with_state_hooks_and_noise_train_as_in_pyg_or_are_refused(step, strategy, world, line):
    data = graph(seed=3, edges=("edge_weight",) if step == "weights" else ())
    due = plain(lambda: of(step), data)
    found = verdict(f"{__name__}.of", {"step": step}, data, strategy, world, due)
    assert found.good, str(found)
    assert (found.kind == "equal") == (not line), str(found)
    assert line in found.why


def test_state_of_modules_has_numbers_in_containers_and_objects():
    net = of("dictionary")
    net.kept, net.rates = Held(), [0.5, {"deep": 2}]
    assert {name: value for name, value in python_state(net).items() if "." not in name} == {
        "state": [1.0],
        "kept": [1.0],
        "rates": [0.5, 2],
    }
