"""Before several ranks train a user's model: one whose rows depend on each other is refused, a harmless one is not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch_geometric.data import Data
from torch_geometric.nn import LINKX, GINEConv, JumpingKnowledge, MessagePassing, SAGEConv, global_mean_pool

import gnnpar
from gnnpar.codecs.codec import BFloat16, Exactness
from gnnpar.data.dataset import Dataset
from gnnpar.data.preprocess import prepare
from gnnpar.data.saved import PT, raw_graph
from gnnpar.models.gcn import GCN
from gnnpar.models.pyg.model import PyG, PyGNet
from gnnpar.parallel.halo.strategy import GraphParallel
from gnnpar.parallel.local import Pass
from gnnpar.parallel.whole import WholeGraph
from gnnpar.partition.shard import cut
from gnnpar.report.runs import exactness_of
from gnnpar.settings import ConfigError
from gnnpar.verify.conformance import AS_CONFIGURED, check, small_graph
from gnnpar.verify.pyg_reference import difference

NODES = 60


def graph(*, categories: bool = False, attr: bool = False) -> Data:
    draw = torch.Generator().manual_seed(0)
    edges = torch.randint(0, NODES, (2, 240), generator=draw).unique(dim=1)
    edges = edges[:, edges[1].argsort(stable=True)]
    x = torch.randn(NODES, 8, generator=draw)
    data = Data(
        x=torch.randint(0, 5, (NODES, 8), generator=draw).float() if categories else x,
        y=torch.randint(0, 3, (NODES,), generator=draw),
        edge_index=edges,
        train_mask=torch.arange(NODES) < 40,
    )
    if attr:
        data.edge_attr = torch.rand(edges.shape[1], 4, generator=draw)
    return data


def _top(h: torch.Tensor) -> torch.Tensor:
    return h * torch.zeros(len(h)).index_fill(0, h.sum(1).topk(min(5, len(h))).indices, 1.0)[:, None].to(h.dtype)


MIXING: dict[str, Any] = {
    "topk": _top,
    "median": lambda h: h - h.median(0).values,
    "cumsum": lambda h: h.cumsum(0) / 10,
    "flip": lambda h: h + h.flip(0),
    "roll": lambda h: h + h.roll(1, 0),
    "sort": lambda h: h + h.sort(0).values,
    "number of rows": lambda h: h / h.size(0),
    "positions": lambda h: h + torch.sin(torch.arange(len(h), dtype=h.dtype))[:, None],
    "first row": lambda h: h + h[0],
    "attention": lambda h: h + F.scaled_dot_product_attention(h[None], h[None], h[None])[0],
    "scaled gradient": lambda h: _Scaled.apply(h),
}


class _Scaled(torch.autograd.Function):
    """The forward is local to rows, the backward is not."""

    @staticmethod
    def forward(ctx: Any, h: torch.Tensor) -> torch.Tensor:
        return h.clone()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> torch.Tensor:
        return grads[0] / grads[0].norm()


class Between(nn.Module):
    """Something between two convolutions."""

    def __init__(self, in_channels: int, out_channels: int, how: str) -> None:
        super().__init__()
        self.how, self.a, self.b = {**MIXING, **HARMLESS}[how], SAGEConv(in_channels, 8), SAGEConv(8, out_channels)

    def forward(self, x, edge_index):
        h = F.dropout(self.a(x, edge_index).tanh(), training=self.training)
        return self.b(self.how(h), edge_index)


class ByPosition(nn.Module):
    """nn.Embedding looked up by arange."""

    def __init__(self, in_channels: int, out_channels: int) -> None:
        super().__init__()
        self.emb, self.conv = nn.Embedding(NODES, in_channels), SAGEConv(in_channels, out_channels)

    def forward(self, x, edge_index):
        return self.conv(x + self.emb(torch.arange(x.size(0))), edge_index)


class LargestMessage(MessagePassing):
    def __init__(self) -> None:
        super().__init__("add")

    def forward(self, x, edge_index):
        return self.propagate(edge_index, x=x)

    def message(self, x_j):
        return x_j / x_j.abs().max()


class ByLargestMessage(nn.Module):
    def __init__(self, in_channels: int, out_channels: int) -> None:
        super().__init__()
        self.conv, self.head = LargestMessage(), nn.Linear(in_channels, out_channels)

    def forward(self, x, edge_index):
        return self.head(self.conv(x, edge_index))


class ByLargestAttribute(nn.Module):
    """Features of edges divided by their maximum over all edges."""

    def __init__(self, in_channels: int, out_channels: int, edge_dim: int) -> None:
        super().__init__()
        self.conv = GINEConv(nn.Linear(in_channels, out_channels), edge_dim=edge_dim)

    def forward(self, x, edge_index, edge_attr):
        return self.conv(x, edge_index, edge_attr / edge_attr.amax(0))


CARRIED: dict[str, Any] = {
    "centred": lambda h: h - h.mean(0),
    "virtual node": lambda h: h + h.mean(0, keepdim=True),
    "sum": lambda h: h + 0.01 * h.sum(0),
    "largest of a column": lambda h: h / (1 + h.amax(0)),
    "pooled": lambda h: h + global_mean_pool(h, None),
    "PairNorm by hand": lambda h: (h - h.mean(0)) / (1e-6 + (h - h.mean(0)).pow(2).sum(1).mean()).sqrt(),
    "softmax of rows": lambda h: h.softmax(0),
    "deviation": lambda h: h / (1 + h.std(0)),
    "norm of all": lambda h: h / h.norm(),
}
"""Reductions over all nodes that are sums over ranks; more in whole_nets.py."""

HARMLESS: dict[str, Any] = {
    "nothing": lambda h: h,
    "normalized rows": lambda h: F.normalize(h, dim=1),
    "softmax of columns": lambda h: h.softmax(1),
    "heads of one node": lambda h: (h.view(len(h), 2, 4).softmax(1) * h.view(len(h), 2, 4)).flatten(1),
    "largest of a row": lambda h: h / (1 + h.abs().amax(1, keepdim=True)),
    **CARRIED,
}


class Modules(nn.Module):
    """Modules that treat each row alone, or whose moments are taken over all ranks."""

    def __init__(self, in_channels: int, out_channels: int) -> None:
        super().__init__()
        self.a, self.b, self.head = SAGEConv(in_channels, 8), SAGEConv(8, 8), nn.Linear(8, out_channels)
        self.norm, self.batch_norm, self.cell = nn.LayerNorm(8), nn.BatchNorm1d(8), nn.GRUCell(8, 8)
        self.jump = JumpingKnowledge("max")

    def forward(self, x, edge_index):
        h = self.batch_norm(self.norm(self.a(x, edge_index)))
        return self.head(self.jump([h, self.cell(self.b(h, edge_index), h)]))


class Categories(nn.Module):
    """The first column of features is a category."""

    def __init__(self, in_channels: int, out_channels: int) -> None:
        super().__init__()
        self.emb, self.conv = nn.Embedding(5, 6), SAGEConv(6, out_channels)

    def forward(self, x, edge_index):
        return self.conv(self.emb(x[:, 0].long()), edge_index)


class Fixed(nn.Module):
    """Its widths are written in."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = SAGEConv(8, 3)

    def forward(self, x, edge_index):
        return self.conv(x, edge_index)


def train(net: Any, data: Data, ranks: int, **further: Any) -> dict[str, Any]:
    settings: dict[str, Any] = {"comm": "threads", "epochs": 1, "partition": "random", "precision": "fp64"}
    settings |= {"strategy": "graph_parallel", "tracker": "jsonl", "dataset": {"self_loops": "keep"}}
    return gnnpar.train(net, data, world_size=ranks, **{**settings, **further}).result


def kwargs(**given: Any) -> dict[str, Any]:
    return {"model.kwargs": given}


@pytest.fixture(autouse=True)
def _in_a_folder(tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.mark.quick(2)
@pytest.mark.parametrize("how", MIXING)
def test_rows_that_depend_on_others_are_refused_on_two_ranks_and_train_on_one(how):
    with pytest.raises(ConfigError, match=r"^model=between: (net\S*|the model) .*set world_size=1") as caught:
        train(Between, graph(), 2, **kwargs(how=how))
    assert "\n" not in str(caught.value)
    if how in ("topk", "scaled gradient"):  # on one rank, no model is probed
        assert train(Between, graph(), 1, **kwargs(how=how))["status"] == "completed"


@pytest.mark.quick(1)
@pytest.mark.parametrize(
    ("net", "given"),
    [
        (ByPosition, {}),
        (ByLargestMessage, {}),
        (ByLargestAttribute, {}),
        (LINKX, {"num_nodes": NODES, "hidden_channels": 8, "num_layers": 2}),
    ],
)
def test_other_models_that_depend_on_all_rows_are_refused_on_two_ranks(net, given):
    data = graph(attr=net is ByLargestAttribute)
    with pytest.raises(ConfigError, match=r"(net|the model)\S* .*set world_size=1.*features=learned"):
        train(net, data, 2, **kwargs(**given))
    assert train(net, data, 1, **kwargs(**given))["status"] == "completed"


@pytest.mark.quick(2)
@pytest.mark.parametrize("how", HARMLESS)
def test_rows_that_stand_alone_or_are_reduced_train_on_two_ranks(how):
    found = train(Between, graph(), 2, **kwargs(how=how))
    assert (found["status"], found["verified"], exactness_of(found)) == ("completed", "probed", "exact")


@pytest.mark.quick(1)
@pytest.mark.parametrize(("net", "categories"), [(Modules, False), (Categories, True), (Fixed, False)])
def test_harmless_models_train_on_two_ranks(net, categories):
    found = train(net, graph(categories=categories), 2, **kwargs())
    assert (found["status"], found["verified"]) == ("completed", "probed")


class Lying(GraphParallel):
    """It rounds what it sends, and says that it is exact."""

    @property
    def exactness(self) -> frozenset[Exactness]:
        return frozenset({"exact"})

    def exact_limit(self) -> GraphParallel:
        return GraphParallel()


def test_a_strategy_that_says_exact_and_rounds_is_refused_and_fails_its_check(tmp_path):
    limit, configured = check(Lying(codec=BFloat16()), {"gcn": GCN(hidden=8)}, worlds=(2,))
    assert (limit.reference, limit.passed) == ("single device", True)
    assert (configured.reference, configured.passed, configured.error) == (AS_CONFIGURED, False, None)
    (tmp_path / "strategy").mkdir()
    codec = "codec: {_target_: gnnpar.codecs.codec.BFloat16}"
    for name, kind in (
        ("lying", f"_target_: {__name__}.Lying\n{codec}\n"),
        ("honest", f"_target_: {__name__}.Lying\n"),
    ):
        (tmp_path / "strategy" / f"{name}.yaml").write_text(kind)
    with pytest.raises(ConfigError, match=r"^strategy=lying: claims to be exact, .*gnnpar check strategy=lying"):
        train("gcn", graph(), 2, strategy="lying", dataset={})
    assert train("gcn", graph(), 2, strategy="honest", dataset={})["verified"] == "probed"


def test_own_models_are_not_probed_and_one_rank_is_the_single_device():
    assert train("gcn", graph(), 2, dataset={})["verified"] == "checked"
    assert train(Fixed, graph(), 1, **kwargs())["verified"] == "checked"


def test_exact_by_its_own_word_is_said_so():
    own = {"model": {"_target_": "gnnpar.models.gcn.GCN"}, "strategy": {"_target_": "gnnpar.X"}}
    wrapped = {**own, "model": {"_target_": "gnnpar.models.pyg.model.PyG", "target": "mine.Net"}}
    assert exactness_of({"exactness": ["exact"], "settings": own}) == "exact"
    assert exactness_of({"exactness": ["exact"], "settings": wrapped}) == "exact (not checked)"
    assert exactness_of({"exactness": ["exact"], "settings": own, "verified": "no"}) == "exact (not checked)"
    assert exactness_of({"exactness": ["exact"], "settings": wrapped, "verified": "probed"}) == "exact"
    assert exactness_of({"exactness": ["stale"], "settings": wrapped, "verified": "no"}) == "stale"


def test_rows_that_are_not_one_a_node_are_refused_where_neighbours_read_them():
    data = small_graph()
    view = WholeGraph(cut(data, torch.zeros(data.num_nodes).long(), 1)[0], Pass(0))
    with pytest.raises(ValueError, match=r"neighbours read rows of shape \[61, 4\], and there are 60 nodes here"):
        view.source(lambda local, rows: (rows,), torch.zeros(61, 4))


def _after(monkeypatch: pytest.MonkeyPatch, change: Callable[[nn.Module], object]) -> None:
    """A defect of gnnpar's: something happens to the user's module in each forward."""
    forward = PyGNet.forward

    def changed(self, g, x):
        out = forward(self, g, x)
        if len(x) > 8:  # not where it is looked at
            change(self.net)
        return out

    monkeypatch.setattr(PyGNet, "forward", changed)


def test_a_weight_that_a_forward_replaces_is_found(monkeypatch):
    def replace(net: nn.Module) -> None:
        lin = net.get_submodule("conv.lin_l")
        lin.register_parameter("weight", nn.Parameter(lin.get_parameter("weight").detach().clone()))

    _after(monkeypatch, replace)
    found = difference(PyG(target=f"{__name__}.Fixed", self_loops="keep"), small_like_graph(), 1e-9)
    assert found.replaced == "net.conv.lin_l.weight"
    assert found.state["net.conv.lin_l.weight"] > 1e-3


def test_running_statistics_that_move_otherwise_are_found(monkeypatch):
    model = PyG(target=f"{__name__}.Modules", self_loops="keep")
    sound = difference(model, small_like_graph(), 1e-9)
    assert max(sound.loss, sound.logits, *sound.gradients.values(), *sound.state.values()) < 1e-9
    _after(monkeypatch, lambda net: net.get_buffer("batch_norm.running_mean").add_(0.1))
    found = difference(model, small_like_graph(), 1e-9)
    assert max(found.state, key=lambda name: found.state[name]) == "net.batch_norm.running_mean"
    assert found.logits > 1e-3 > found.loss


def small_like_graph() -> Dataset:
    """Edges more than once, loops on some nodes."""
    return prepare(raw_graph("given", graph()), PT(self_loops="keep", drop_duplicates=False), seed=0)


def test_a_graph_that_preprocessing_changes_is_compared_as_it_was_given():
    cases = gnnpar.check(Fixed, graph(), worlds=(1,), dataset={"self_loops": True})
    assert (cases[0].reference, cases[0].passed) == ("PyG", False)
    assert "first module that differs; PyG runs on" in str(cases[0].error)
    assert "set dataset.self_loops=keep" in str(cases[0].error)


def test_a_model_with_its_widths_written_in_is_checked_on_its_data():
    cases = gnnpar.check(Fixed, graph(), worlds=(2,), dataset={"self_loops": "keep"})
    assert [(case.reference, case.passed) for case in cases] == [("PyG", True), ("single device", True)]
