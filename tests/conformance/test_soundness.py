"""`gnnpar check` certifies no dead model: each sabotage is found, and the module that has it is named.

A user's model is probed before several ranks train it; what its forward makes of all rows is in test_totals.py."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import pytest
import torch
from torch import nn
from torch_geometric import nn as pyg
from torch_geometric.data import Data
from torch_geometric.nn import LINKX, GINEConv, JumpingKnowledge, MessagePassing, SAGEConv

import gnnpar
from composing import configured, names
from conformance.plain_loop import graph as plain_graph
from conftest import Run
from gnnpar.codecs.codec import BFloat16, Exactness
from gnnpar.data.dataset import Dataset
from gnnpar.data.preprocess import prepare
from gnnpar.data.saved import PT, raw_graph
from gnnpar.folds.sum import Sum
from gnnpar.models.gcn import GCN
from gnnpar.models.gnn import ModelConfig
from gnnpar.models.pyg.model import PyG, PyGNet
from gnnpar.parallel.blocks import WholeGraph
from gnnpar.parallel.halo.strategy import GraphParallel
from gnnpar.parallel.local import Pass
from gnnpar.partition.shard import cut
from gnnpar.report.runs import exactness_of
from gnnpar.settings import ConfigError
from gnnpar.verify.conformance import AS_CONFIGURED, check, small_graph
from gnnpar.verify.pyg_reference import difference
from gnnpar.verify.soundness import find_fault


class Sound(nn.Module):
    """W A x + V x; a sabotage changes `message`, `finish` or the modules."""

    def __init__(self, in_dim: int, out_dim: int) -> None:
        super().__init__()
        self.neighbours, self.own = nn.Linear(in_dim, out_dim), nn.Linear(in_dim, out_dim)

    def forward(self, g, h):
        return self.finish(g, h, self.neighbours(g.aggregate(Sum(), g.source(self.message, h))) + self.own(h))

    @staticmethod
    def message(g, h):
        return (h,)

    def finish(self, g, h, out):
        return out


class DeadNorm(Sound):
    def __init__(self, in_dim, out_dim):
        super().__init__(in_dim, out_dim)
        self.norm = nn.LayerNorm(out_dim)
        nn.init.zeros_(self.norm.weight)

    def finish(self, g, h, out):
        return self.norm(out)


class RunningMean(Sound):
    def __init__(self, in_dim, out_dim):
        super().__init__(in_dim, out_dim)
        self.register_buffer("running", torch.zeros(out_dim))

    def finish(self, g, h, out):
        with torch.no_grad():
            self.get_buffer("running").lerp_(out.mean(0), 0.1)
        return out - self.get_buffer("running")


class Counter(Sound):
    calls = 0

    def finish(self, g, h, out):
        self.calls += 1
        return out / self.calls


class Unused(Sound):
    def __init__(self, in_dim, out_dim):
        super().__init__(in_dim, out_dim)
        self.spare = nn.Linear(in_dim, out_dim)


class Frozen(Sound):
    def __init__(self, in_dim, out_dim):
        super().__init__(in_dim, out_dim)
        self.own.weight.requires_grad_(False)


def finishing(change: Callable[..., torch.Tensor]) -> type[Sound]:
    """A layer that ends in change(layer, input, output)."""
    return type("Finishing", (Sound,), {"finish": lambda self, g, h, out: change(self, h, out)})


class Detached(Sound):
    def forward(self, g, h):
        return self.neighbours(g.aggregate(Sum(), (h.detach(),))) + self.own(h)


class InPlace(Sound):
    def forward(self, g, h):
        with torch.no_grad():
            h.mul_(0.5)
        return super().forward(g, h)


@dataclass(frozen=True, kw_only=True)
class Of(ModelConfig):
    """Two layers of a convolution."""

    kind: type[nn.Module] = Sound
    activation: ClassVar = torch.tanh

    def conv(self, in_dim: int, out_dim: int, *, index: int, aggregate_first: bool) -> nn.Module:
        return self.kind(in_dim, out_dim)


TWO_RUNS = "layers.0.conv gives other values in the second of two equal runs"
MIXES = "layers.0.conv mixes rows: the features of node 0 change 40 rows"
POSITION = "layers.0.conv depends on how many rows there are"
SABOTAGES = {
    "dead norm": (DeadNorm, "layers.0.conv.norm gives nothing but zeros"),
    "mean": (finishing(lambda layer, h, out: out - out.mean(0)), f"{MIXES} that it has no edge to"),
    "first row": (finishing(lambda layer, h, out: out + h[0].sum()), MIXES),
    "running mean": (RunningMean, "layers.0.conv changes its buffer running in forward"),
    "counter": (Counter, TWO_RUNS),
    "noise": (
        finishing(lambda layer, h, out: out + 0.1 * torch.randn_like(out)),
        f"{TWO_RUNS}: its noise is not keyed",
    ),
    "dropout": (
        finishing(lambda layer, h, out: nn.functional.dropout(out, 0.5)),
        f"{TWO_RUNS}: its noise is not keyed",
    ),
    "constant": (
        finishing(lambda layer, h, out: layer.own.bias.expand(len(h), -1)),
        "layers.0.conv gives the same output for another input",
    ),
    "zeros": (finishing(lambda layer, h, out: torch.relu(-out.abs())), "layers.0.conv gives nothing but zeros"),
    "detached": (Detached, "layers.0.conv.neighbours.weight has a gradient that its loss does not have"),
    "in place": (InPlace, "layers.0.conv writes into its input in place"),
    "unused": (Unused, "layers.0.conv.spare.weight has no gradient: the loss does not depend on it"),
    "position": (
        finishing(lambda layer, h, out: out + torch.arange(len(h), dtype=h.dtype)[:, None]),
        f"{POSITION}, or on where a row stands",
    ),
    "number of rows": (finishing(lambda layer, h, out: out / len(h)), POSITION),
    "not finite": (
        finishing(lambda layer, h, out: (out - 1e3).log()),
        "layers.0.conv gives values that are not finite",
    ),
}


@pytest.mark.parametrize("name", SABOTAGES)
def test_a_sabotage_is_named(name):
    kind, line = SABOTAGES[name]
    assert str(find_fault(Of(kind=kind, hidden=8))).startswith(line)


def test_logits_of_another_shape_are_named():
    assert str(
        find_fault(Of(kind=finishing(lambda layer, h, out: torch.cat([out, out], 1)), hidden=8, num_layers=1))
    ) == ("the model gives [41, 6] instead of one row of logits a node, [41, 3]")


@pytest.mark.quick(2)
@pytest.mark.parametrize("model", names("model"))
def test_models_of_gnnpar_are_sound(model):
    assert find_fault(configured("model", model, "model.hidden=8")) is None
    overrides = ("norm=layer", "residual=true", "encoder=linear", "decoder=linear", "num_layers=3", "hidden=8")
    assert find_fault(configured("model", model, *(f"model.{each}" for each in overrides))) is None


def test_a_frozen_parameter_is_sound():
    assert find_fault(Of(kind=Frozen, hidden=8)) is None


def test_a_sound_layer_of_ones_own_passes_and_an_unsound_one_has_one_failed_case():
    assert find_fault(Of(hidden=8)) is None
    dead, sound = check(GraphParallel(), {"sound": Of(hidden=8), "dead": Of(kind=DeadNorm, hidden=8)}, worlds=(2,))
    assert sound.passed
    assert not dead.passed
    assert dead.error is not None and dead.error.startswith("layers.0.conv.norm gives nothing but zeros")


@pytest.mark.parametrize(
    ("module", "why"),
    [
        (lambda width: nn.BatchNorm1d(width), "BatchNorm1d, which mixes the rows of all nodes"),
        (lambda width: nn.Dropout(0.5), "Dropout, which draws other numbers on every rank: call g.dropout"),
        (lambda width: nn.Softmax(dim=0), "Softmax, which mixes the rows of all nodes"),
        (lambda width: nn.GRU(width, width), "GRU, which mixes the rows of all nodes"),
        (lambda width: pyg.BatchNorm(width), "BatchNorm, which mixes the rows of all nodes"),
        (lambda width: pyg.GraphNorm(width), "GraphNorm, which mixes the rows of all nodes"),
        (lambda width: pyg.PairNorm(), "PairNorm, which mixes the rows of all nodes"),
        (lambda width: pyg.LayerNorm(width), "LayerNorm, which mixes the rows of all nodes"),
        (lambda width: pyg.MeanAggregation(), "MeanAggregation, which mixes the rows of all nodes"),
    ],
)
def test_modules_that_are_not_row_local_are_refused_by_name(module, why):
    class Normed(Sound):
        def __init__(self, in_dim, out_dim):
            super().__init__(in_dim, out_dim)
            self.norm = module(out_dim)

    with pytest.raises(ValueError, match=r"layers\.0\.conv\.norm of the model is a " + why) as caught:
        Of(kind=Normed, hidden=8).build(6, 3, seed=0)
    assert "\n" not in str(caught.value)
    assert pyg.LayerNorm(4, mode="node") is not None


def test_modules_keep_the_initial_weights_that_they_make():
    class Scaled(Sound):
        def __init__(self, in_dim, out_dim):
            super().__init__(in_dim, out_dim)
            self.scale = nn.Parameter(torch.full((out_dim,), 0.7))
            self.norm = nn.LayerNorm(out_dim)
            nn.init.constant_(self.norm.weight, 0.3)

    torch.manual_seed(0)
    model, state = Of(kind=Scaled, hidden=8).build(6, 3, seed=1), torch.random.get_rng_state()
    conv = model.layers[0].get_submodule("conv")
    assert conv.get_parameter("scale").eq(0.7).all()
    assert conv.get_parameter("norm.weight").eq(0.3).all()
    assert conv.get_parameter("own.bias").any(), "nn.Linear's own"
    torch.manual_seed(0)
    assert torch.equal(state, torch.random.get_rng_state()), "torch's generator is left as it was"
    again, other = (Of(kind=Scaled, hidden=8).build(6, 3, seed=s) for s in (1, 2))
    for (name, a), (_, b) in zip(model.named_parameters(), again.named_parameters(), strict=True):
        assert torch.equal(a, b), name
    weights = [m.layers[0].get_parameter("conv.own.weight") for m in (model, other)]
    assert not torch.equal(*weights)


def test_a_parameter_without_values_is_named():
    class Empty(Sound):
        def __init__(self, in_dim, out_dim):
            super().__init__(in_dim, out_dim)
            self.scale = nn.Parameter(torch.empty(out_dim))

    line = r'layers\.0\.conv\.scale of the model has no initial values: let Empty set them .* glorot = \("scale",\)'
    with pytest.raises(ValueError, match=line):
        Of(kind=Empty, hidden=8).build(6, 3, seed=0)


DEAD = """
from collections.abc import Callable
from dataclasses import dataclass
from torch import nn
from gnnpar.models.gcn import GCN, GCNConv

class Conv(GCNConv):
    def __init__(self, in_dim, out_dim, *, aggregate_first):
        super().__init__(in_dim, out_dim, aggregate_first=aggregate_first)
        self.norm = nn.LayerNorm(out_dim)
        nn.init.zeros_(self.norm.weight)

    def forward(self, g, h):
        return self.norm(super().forward(g, h))

@dataclass(frozen=True, kw_only=True)
class Dead(GCN):
    def conv(self, in_dim, out_dim, *, index, aggregate_first):
        return Conv(in_dim, out_dim, aggregate_first=aggregate_first)
"""


def test_the_command_fails_and_names_the_module(run_here: Run, tmp_path) -> None:
    (tmp_path / "deadnorm.py").write_text(DEAD)
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "dead.yaml").write_text("_target_: deadnorm.Dead\nhidden: 8\n")
    done = run_here("check", "strategy=graph_parallel", "model=dead", "--worlds=1,2")
    assert done.returncode == 1
    assert "layers.0.conv.norm gives nothing but zeros" in " ".join(done.stdout.split())
    assert "0 of 1 cases pass" in done.stdout + done.stderr


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
