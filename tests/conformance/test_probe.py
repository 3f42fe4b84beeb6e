"""A user's model is probed before several ranks train it; what its forward makes of all rows is in test_totals.py."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch_geometric.data import Data
from torch_geometric.nn import LINKX, GINEConv, JumpingKnowledge, MessagePassing, SAGEConv

import gnnpar
from conformance.plain_loop import graph as plain_graph
from gnnpar.codecs.codec import BFloat16, Exactness
from gnnpar.data.dataset import Dataset
from gnnpar.data.preprocess import prepare
from gnnpar.data.saved import PT, raw_graph
from gnnpar.models.gcn import GCN
from gnnpar.models.pyg.model import PyG, PyGNet
from gnnpar.parallel.blocks import WholeGraph
from gnnpar.parallel.halo.strategy import GraphParallel
from gnnpar.parallel.local import Pass
from gnnpar.partition.shard import cut
from gnnpar.report.runs import exactness_of
from gnnpar.settings import ConfigError
from gnnpar.verify.conformance import AS_CONFIGURED, check, small_graph
from gnnpar.verify.pyg_reference import difference

NODES = 60


def graph(*, categories: bool = False, attr: bool = False) -> Data:
    data = plain_graph(dirty=False, edges=("edge_attr",) if attr else (), nodes=NODES)
    if categories:
        data.x = torch.randint(0, 5, (NODES, 8)).float()
    return data


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
def test_models_that_depend_on_all_rows_are_refused_on_two_ranks(net, given):
    data = graph(attr=net is ByLargestAttribute)
    with pytest.raises(ConfigError, match=r"(net|the model)\S* .*set world_size=1.*features=learned"):
        train(net, data, 2, **kwargs(**given))
    assert train(net, data, 1, **kwargs(**given))["status"] == "completed"


@pytest.mark.quick(1)
@pytest.mark.parametrize(("net", "categories"), [(Modules, False), (Categories, True), (Fixed, False)])
def test_harmless_models_train_on_two_ranks(net, categories):
    found = train(net, graph(categories=categories), 2, **kwargs())
    assert (found["status"], found["verified"], exactness_of(found)) == ("completed", "probed", "exact")


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
