"""PyG models, unchanged: equal to themselves as PyG runs them, and under strategies on 1 to 3 ranks; or refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.utils.parametrizations import spectral_norm
from torch_geometric import nn as pyg
from torch_geometric.nn import MessagePassing

import gnnpar
from conftest import Run
from gnnpar.models.pyg.marks import Edges, LocalEdges
from gnnpar.models.pyg.model import PyG
from gnnpar.models.pyg.probe_graph import ProbeGraph
from gnnpar.models.pyg.propagate import lowering_of
from gnnpar.parallel.halo.strategy import GraphParallel
from gnnpar.parallel.single.strategy import Single
from gnnpar.verify.conformance import check, small_graph
from gnnpar.verify.pyg_reference import prepared
from gnnpar.verify.soundness import find_fault
from outcomes import assert_passed

NETS: list[tuple[str, dict[str, Any]]] = [
    ("pyg_nets.gcn", {}),
    ("pyg_nets.gcn", {"add_self_loops": False}),
    ("pyg_nets.gcn", {"improved": True, "bias": False}),
    ("pyg_nets.gcn", {"normalize": False}),
    ("pyg_nets.sage", {}),
    ("pyg_nets.sage", {"aggr": "max", "project": True, "normalize": True}),
    ("pyg_nets.sage", {"aggr": "sum", "root_weight": False}),
    ("pyg_nets.graph", {}),
    ("pyg_nets.graph", {"aggr": "mean"}),
    ("pyg_nets.gat", {}),
    ("pyg_nets.gat", {"negative_slope": 0.4, "residual": True}),
    ("pyg_nets.gat", {"v2": True}),
    ("pyg_nets.gat", {"v2": True, "share_weights": True}),
    ("pyg_nets.gin", {}),
    ("pyg_nets.gated", {}),
    ("pyg_nets.gated", {"aggr": "sum"}),
    ("pyg_nets.Jumping", {}),
    ("pyg_nets.InPlaceNet", {}),
    ("pyg_nets.weighted", {}),
    ("pyg_nets.weighted", {"improved": True, "normalize": False}),
    ("pyg_nets.weighted", {"kind": "GraphConv"}),
    ("pyg_nets.weighted", {"kind": "GraphConv", "aggr": "mean"}),
    ("pyg_nets.weighted", {"kind": "GraphConv", "aggr": "max"}),
    ("pyg_nets.weighted", {"kind": "Scaled"}),
    ("pyg_nets.weighted", {"kind": "Scaled", "aggr": "max"}),
    ("pyg_nets.Smoothed", {}),
    ("pyg_nets.transformer", {}),
    ("pyg_nets.inline", {}),
    ("pyg_nets.edge", {}),
    ("pyg_nets.pna", {}),
    ("pyg_nets.sage", {"aggr": "std"}),
    ("pyg_nets.gated", {"aggr": "max"}),
    ("torch_geometric.nn.models.EdgeCNN", {"hidden_channels": 8, "num_layers": 2}),
    ("torch_geometric.nn.models.GCN", {"hidden_channels": 8, "num_layers": 3, "dropout": 0.4}),
    ("torch_geometric.nn.models.GraphSAGE", {"hidden_channels": 8, "num_layers": 2, "jk": "max"}),
    ("torch_geometric.nn.models.GAT", {"hidden_channels": 8, "num_layers": 2, "heads": 2}),
    ("torch_geometric.nn.models.GIN", {"hidden_channels": 8, "num_layers": 2}),
    (
        "torch_geometric.nn.models.PNA",
        {
            "hidden_channels": 8,
            "num_layers": 2,
            "aggregators": ["mean", "max", "std"],
            "scalers": ["identity", "amplification", "linear"],
        },
    ),
]
IDS = [f"{target.rpartition('.')[2]}-{'-'.join(map(str, kwargs.values()))}" for target, kwargs in NETS]
LOOPLESS = [each for each in NETS if "gat" not in each[0].lower() and "Jumping" not in each[0]]
LOOPLESS = [*LOOPLESS[:5], ("pyg_nets.weighted", {"improved": True}), ("pyg_nets.Smoothed", {})]


@pytest.mark.quick(1)
@pytest.mark.parametrize("target", ["sage", "gin", "graph", "gated", "edge", "inline"])
def test_on_a_graph_with_self_loops_of_its_own(target):
    config = PyG(target=f"pyg_nets.{target}", self_loops="keep")
    edges = prepared(small_graph(), config).edge_index
    assert 0 < (edges[0] == edges[1]).sum() < small_graph().num_nodes
    cases = check(GraphParallel(), {"pyg": config}, worlds=(3,))
    assert cases[0].reference == "PyG"
    assert [case.passed for case in cases] == [True, True]


@pytest.mark.quick(1)
@pytest.mark.parametrize("target", ["gcn", "gat"])
def test_convolutions_that_add_self_loops_keep_those_of_the_graph(target):
    config = PyG(target=f"pyg_nets.{target}", self_loops="keep")
    cases = check(GraphParallel(), {"pyg": config}, worlds=(1, 3))
    assert [case.passed for case in cases] == [True, True, True]


@pytest.mark.quick(5)
@pytest.mark.parametrize(("target", "kwargs"), NETS, ids=IDS)
def test_equals_pyg_and_is_the_same_on_several_ranks(target, kwargs):
    cases = check(GraphParallel(), {"pyg": PyG(target=target, kwargs=kwargs)}, worlds=(3,))
    assert [(case.reference, case.world) for case in cases] == [("PyG", 1), ("single device", 3)]
    assert_passed(cases)


@pytest.mark.quick(1)
@pytest.mark.parametrize(("target", "kwargs"), LOOPLESS, ids=str)
def test_equals_pyg_on_a_graph_without_self_loops(target, kwargs):
    (case, _) = check(Single(), {"pyg": PyG(target=target, kwargs=kwargs, self_loops=False)}, worlds=(1,))
    assert case.passed, case


class Watched(ProbeGraph):
    """Notes the width of the rows that it aggregates."""

    width = 0

    def aggregate(self, agg, src, dst=(), edge=(), shared=()):
        self.width = src[0].shape[1]
        return super().aggregate(agg, src, dst, edge, shared)


def _changed(conv: MessagePassing, name: str) -> MessagePassing:
    spectral_norm(conv.get_submodule(name))
    return conv


class OfItsOwn(pyg.SAGEConv):
    def forward(self, x, edge_index, size=None):
        return self.lin_l(self.propagate(edge_index, x=(x, x), size=size).relu())


ORDERS = {
    "GCN widens": (pyg.GCNConv(3, 5), 3),
    "GCN keeps the width": (pyg.GCNConv(4, 4), 4),
    "GCN narrows": (pyg.GCNConv(5, 3), 3),
    "GCN that does not normalise": (pyg.GCNConv(3, 5, normalize=False), 3),
    "SAGE widens": (pyg.SAGEConv(3, 5), 3),
    "SAGE keeps the width": (pyg.SAGEConv(4, 4), 4),
    "SAGE narrows": (pyg.SAGEConv(5, 3), 3),
    "SAGE without bias": (pyg.SAGEConv(5, 3, bias=False), 3),
    "GraphConv narrows": (pyg.GraphConv(5, 3), 3),
    "a maximum": (pyg.SAGEConv(5, 3, aggr="max"), 5),
    "a forward of its own": (OfItsOwn(5, 3), 5),
    "a parametrized matrix": (_changed(pyg.SAGEConv(5, 3), "lin_l"), 5),
    "another module in the place of a matrix": (pyg.GCNConv(3, 5), 5),
}
ORDERS["another module in the place of a matrix"][0].lin = torch.nn.Linear(3, 5, bias=False)


@pytest.mark.parametrize("case", ORDERS)
def test_the_narrower_side_of_a_sum_and_its_matrix_is_summed(case):
    conv, width = ORDERS[case]
    conv = conv.double().eval()
    g, way = Watched(torch.ones(7, dtype=torch.float64)[:, None]), lowering_of(conv, self_loops=True)
    x, edges = torch.randn(7, conv.in_channels, dtype=torch.float64), torch.arange(7).repeat(2, 1)
    with torch.no_grad():
        expected = conv(x, edges)
        run = way.forward(conv, g, conv.forward)
        torch.testing.assert_close(run(x, Edges.of(LocalEdges(g))), expected, rtol=1e-12, atol=1e-14)
    assert g.width == width


@pytest.mark.parametrize("target", ["pyg_nets.gcn", "pyg_nets.sage", "pyg_nets.InPlaceNet"])
def test_a_cached_first_layer_is_exact(target):
    model = PyG(target=target, kwargs={"hidden": 4} if target.islower() else {})
    assert_passed(check(GraphParallel(), {"pyg": model}, worlds=(2,), first_layer="cached"))


def test_what_normalises_is_told_from_what_sums():
    assert not PyG(target="pyg_nets.gcn").edge_data
    for name in ("weighted", "Smoothed"):
        found = PyG(target=f"pyg_nets.{name}")
        assert found.edge_data == {"weight"} and found.takes_root
    summed = PyG(target="pyg_nets.weighted", kwargs={"kind": "GraphConv"})
    assert summed.edge_data == {"weight"} and not summed.takes_root


@pytest.mark.parametrize(
    ("fields", "line"),
    [
        ({"target": None}, "model.target is not set"),
        ({"target": "no_such_module.Net"}, "model.target=no_such_module.Net cannot be imported"),
        ({"target": "pyg_nets.gcn", "kwargs": {"hiden": 8}}, "cannot be made with hiden=8, in_channels=6"),
        ({"target": "pyg_nets.OfData"}, "has forward(data); gnnpar calls forward(x, edge_index)"),
        ({"target": "torch.nn.Identity"}, "gnnpar calls forward(x, edge_index)"),
        (
            {
                "target": "torch_geometric.nn.models.GCN",
                "kwargs": {"hidden_channels": 4, "num_layers": 1, "out_channels": 5},
            },
            "gives [5] for each node, and the task needs 3 logits",
        ),
        *(
            ({"target": "torch_geometric.nn.GAT", "kwargs": {"hidden_channels": 4, "num_layers": 2} | wrong}, line)
            for wrong, line in (
                ({"heads": 0}, "heads=0, in_channels=6, out_channels=3: ZeroDivisionError: "),
                ({"jk": True}, "jk=True, in_channels=6, out_channels=3: AttributeError: "),
                ({"in_channels": []}, "in_channels=[], out_channels=3: IndexError: "),
                (
                    {"hidden_channels": -1},
                    "hidden_channels=-1, num_layers=2, in_channels=6, out_channels=3: RuntimeError: ",
                ),
                ({"num_layers": 10**8}, "model.kwargs.num_layers=100000000 is more than 10000; lower it"),
            )
        ),
    ],
)
def test_what_cannot_run_is_one_line(fields, line):
    with pytest.raises(ValueError) as caught:  # noqa: PT011 - the line is compared below
        PyG(**fields).build(6, 3, seed=0)
    assert line in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_running_sum_over_rows_and_dropout_of_a_message_are_found():
    assert str(find_fault(PyG(target="pyg_nets.Summed"))).startswith("net mixes rows")
    with pytest.raises(ValueError, match="the model drops entries in evaluation, too"):
        find_fault(PyG(target="pyg_nets.dropping"))


@pytest.mark.parametrize("net", ["Counting", "rescaled"])
def test_edges_are_read_outside_of_a_convolution_where_all_are_there(net):
    untouched, one, two = check(GraphParallel(), {"pyg": PyG(target=f"pyg_nets.{net}")}, worlds=(1, 2))
    assert untouched.passed and one.passed
    assert two.error is not None and "outside of a convolution" in two.error


READS = {
    "[]": lambda rows, at: rows[at],
    "index_select": lambda rows, at: rows.index_select(0, at),
    "gather": lambda rows, at: rows.gather(0, at),
    "take": lambda rows, at: rows.take(at),
    "take_along_dim": lambda rows, at: torch.take_along_dim(rows, at, 0),
    "embedding": lambda rows, at: torch.nn.functional.embedding(at, rows[:, None])[:, 0],
}


class ByNode(pyg.GraphConv):
    """Reads weights of edges at the numbers of nodes, as a hypergraph convolution of weights of hyperedges does."""

    read, end = "[]", 1

    def forward(self, x, edge_index, edge_weight=None, size=None):
        nodes = edge_index[self.end]  # pyright: ignore[reportIndexIssue] - a tensor here
        return super().forward(x, edge_index, READS[self.read](edge_weight, nodes))


class ReadsByNode(torch.nn.Module):
    def __init__(self, in_channels, out_channels, read, end):
        super().__init__()
        self.conv = ByNode(in_channels, out_channels)
        self.conv.read, self.conv.end = read, end

    def forward(self, x, edge_index, edge_weight):
        return self.conv(x, edge_index, edge_weight)


@pytest.mark.parametrize("end", [0, 1])
@pytest.mark.parametrize("read", READS)
def test_rows_of_edges_are_not_read_by_numbers_of_nodes(read, end):
    """Ranks sort edges, so number 3 is another edge there: it trained on other weights."""
    config = PyG(target=f"{__name__}.ReadsByNode", kwargs={"read": read, "end": end})
    with pytest.raises(ValueError, match=r"conv \(ByNode\) reads (rows of|rows of edges by)"):
        config.build(6, 3, seed=0)


@pytest.mark.parametrize("draw", ["rrelu", "randn_like", "rand", "bernoulli", "normal_", "gumbel_softmax"])
def test_noise_that_no_key_says_again_is_refused(draw):
    """It was trained on as exact, with other losses on one rank and on two."""
    with pytest.raises(ValueError, match=rf"the model calls \w*{draw}\w*: its noise is not keyed"):
        find_fault(PyG(target="pyg_nets.Noisy", kwargs={"draw": draw}))


def test_weights_depend_on_the_seed_alone_and_load_into_the_users_class():
    torch.manual_seed(1)
    first = PyG(target="pyg_nets.gcn").build(6, 3, seed=5)
    torch.manual_seed(2)
    again, other = (PyG(target="pyg_nets.gcn").build(6, 3, seed=seed) for seed in (5, 6))
    for a, b, c in zip(first.parameters(), again.parameters(), other.parameters(), strict=True):
        assert torch.equal(a, b)
        assert a.ndim < 2 or not torch.equal(a, c)
    import pyg_nets

    pyg_nets.gcn(6, 3).load_state_dict(first.net.state_dict())


def test_the_command_trains_it_and_the_trained_model_is_the_users(run_here: Run, tmp_path: Path, monkeypatch):
    (tmp_path / "mynet.py").write_text((Path(__file__).parents[1] / "pyg_nets.py").read_text())
    command = ("strategy=graph_parallel", "model=pyg", "model.target=mynet.gcn", "model.kwargs.hidden=16")
    there = ("dataset=sbm", "world_size=2", "debug=tiny", "comm=threads")
    done = run_here("train", *command, *there, "hydra.run.dir=run")
    assert done.returncode == 0, done.stderr
    result = json.loads((tmp_path / "run" / "result.json").read_text())
    assert result["settings"]["model"]["kwargs"] == {"hidden": 16}
    assert gnnpar.load(tmp_path / "run").model.num_layers == 2
    monkeypatch.chdir("/")
    with pytest.raises(ValueError, match=r"names mynet\.gcn, which is no class of gnnpar"):
        gnnpar.load(tmp_path / "run")


def test_the_prepared_graph_has_one_loop_a_node_or_none():
    for loops in (True, False):
        src, dst = prepared(small_graph(), PyG(target="pyg_nets.gcn", self_loops=loops)).edge_index
        assert int((src == dst).sum()) == (60 if loops else 0)
