"""PyG models, unchanged: equal to themselves as PyG runs them, and under strategies; or refused in one line."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils.parametrizations import spectral_norm
from torch_geometric import nn as pyg
from torch_geometric.data import HeteroData
from torch_geometric.nn import MessagePassing

import gnnpar
import pyg_nets
from composing import WORLDS, configured
from conftest import Run
from data.samples import hetero
from gnnpar.data.dataset import Dataset
from gnnpar.data.preprocess import prepare
from gnnpar.data.saved import PT, raw_graph
from gnnpar.folds.edge_data import EdgeSizes, Schema
from gnnpar.models.pyg.marks import Edges, LocalEdges
from gnnpar.models.pyg.model import PyG
from gnnpar.models.pyg.probe_graph import ProbeGraph
from gnnpar.models.pyg.propagate import lowering_of
from gnnpar.parallel.blocks import WholeGraph
from gnnpar.parallel.halo.strategy import GraphParallel
from gnnpar.parallel.local import Pass
from gnnpar.parallel.needs import refuse
from gnnpar.partition.shard import cut
from gnnpar.verify import pyg_reference
from gnnpar.verify.conformance import check, small_graph, train_in_threads
from gnnpar.verify.pyg_reference import Dictionaries, dictionaries, difference, prepared, typed_dataset, typed_graph
from gnnpar.verify.soundness import find_fault
from graphs import with_edge_data
from outcomes import assert_passed, assert_shards_train_alike, refused

DEGREES: dict[str, Any] = {"aggregators": ["mean", "max", "std"], "scalers": ["identity", "amplification"]}
TYPED = with_edge_data(small_graph(), types=3, width=0)
PAPERS = prepare(raw_graph("given", hetero()), PT(self_loops="keep", drop_duplicates=False), seed=0)


def net(target: str, *, loops: Any = "auto", **kwargs: Any) -> PyG:
    return PyG(target=f"pyg_nets.{target}", kwargs=kwargs, self_loops=loops)


def of_pyg(name: str, *, loops: Any = "auto", **kwargs: Any) -> PyG:
    kwargs = {"hidden_channels": 8, "num_layers": 2, **kwargs}
    return PyG(target=f"torch_geometric.nn.models.{name}", kwargs=kwargs, self_loops=loops)


typed = partial(net, loops=False)
MAPPED = ["GINEConv", "NNConv", "CGConv", "ResGatedGraphConv", "TransformerConv"]  # convolutions that read attributes
WHOLE = ["GATConv", "GATv2Conv", "GENConv", "PNAConv"]
ON_HALOS = [
    *(net("gcn", **o) for o in ({}, {"add_self_loops": False}, {"improved": True, "bias": False})),
    net("gcn", normalize=False),
    *(net("sage", **o) for o in ({}, {"aggr": "sum", "root_weight": False}, {"aggr": "std"})),
    net("sage", aggr="max", project=True, normalize=True),
    *(net("graph", aggr=aggr) for aggr in ("add", "mean")),
    *(net("gat", **o) for o in ({}, {"negative_slope": 0.4, "residual": True}, {"v2": True, "share_weights": True})),
    net("gat", v2=True),
    *(net("gated", aggr=aggr) for aggr in ("mean", "sum", "max")),
    *(net("weighted", **o) for o in ({}, {"improved": True, "normalize": False})),
    *(net("weighted", kind="GraphConv", aggr=aggr) for aggr in ("add", "mean", "max")),
    *(net("weighted", kind="Scaled", aggr=aggr) for aggr in ("mean", "max")),
    *map(net, ("gin", "Jumping", "InPlaceNet", "Smoothed", "transformer", "inline", "edge", "pna", "Optional")),
    *map(net, ("Normed", "normed_gin")),  # norms of all ranks
    *(net(target, loops="keep") for target in ("sage", "gin", "graph", "gated", "edge", "inline", "gcn", "gat")),
    of_pyg("EdgeCNN"),
    of_pyg("GCN", num_layers=3, dropout=0.4),
    of_pyg("GraphSAGE", jk="max"),
    of_pyg("GAT", heads=2),
    of_pyg("GAT", edge_dim=3, add_self_loops=False),
    of_pyg("GIN"),
    of_pyg("PNA", **DEGREES | {"scalers": ["identity", "amplification", "linear"]}),
    *(typed("Rows", kind=kind) for kind in (*MAPPED, "GATConv", "GATv2Conv", "PNAConv")),
    typed("Rows", kind="GENConv", norm="layer"),
    *(typed("LearnedWeights", aggr=aggr, hidden=6) for aggr in ("add", "mean", "max")),
    # both sums change places with their matrices
    *(typed("LearnedWeights", aggr=aggr, hidden=2) for aggr in ("add", "mean")),
    *(typed("Typed", kind="RGCNConv", **o) for o in ({}, {"num_bases": 2, "aggr": "sum"}, {"num_blocks": 2})),
    typed("Typed", kind="FastRGCNConv", root_weight=False, bias=False),
    typed("Typed", kind="Shifted"),
]
DICTIONARIES = [
    typed("Typed2", hidden=8),  # SAGE, GAT and GCN in one layer
    typed("Typed2", hidden=8, kind="gatv2", aggr="cat"),
    typed("Typed2", hidden=8, kind="graph", aggr="max"),
    typed("Typed2", hidden=8, kind="max", aggr="mean"),
    typed("Typed2", hidden=8, kind="transformer"),
    typed("HGTNet", hidden=8),
    typed("hgt"),
    typed("hetero_of"),
    typed("hetero_of", kind="gat"),
    typed("TypedWeights"),
    typed("TypedAttributes"),
    typed("HardWired", hidden=8),
    *(
        PyG(target=f"conformance.whole_nets.{name}", kwargs={"hidden": 8}, self_loops=False)
        for name in ("Han", "NormsByType")
    ),
]
WITHOUT_LOOPS = [typed("gcn", **o) for o in ({}, {"add_self_loops": False}, {"improved": True, "bias": False})]
WITHOUT_LOOPS += [typed("gcn", normalize=False), typed("sage"), typed("weighted", improved=True), typed("Smoothed")]

THREE: dict[str, Any] = {"num_layers": 3, "dropout": 0.3}
LAYERED: dict[str, PyG] = {  # models that can be cut between convolutions
    "GCN": of_pyg("GCN", **THREE, norm="layer_norm", norm_kwargs={"mode": "node"}),
    "GraphSAGE": of_pyg("GraphSAGE", **THREE, jk="max"),
    "GAT": of_pyg("GAT", **THREE, heads=2, jk="cat", act="elu"),
    "GIN": of_pyg("GIN", **THREE, jk="last"),
    "PNA": of_pyg("PNA", **THREE, **DEGREES),
    "EdgeCNN": of_pyg("EdgeCNN", **THREE, act_first=True),
    **{name: net(name) for name in ("Jumping", "InitialResidual", "Residual", "Branches", "Smoothed")},
    "gated": net("Residual", kind="gated"),
}
EDGES = {"weighted": net("weighted", kind="Scaled"), "typed": net("Typed", kind="Shifted"), "relational": net("Typed")}


def folded(strategy: str, target: str) -> PyG:
    drops = target == "gat" or (target == "transformer" and strategy != "feature")
    return net(target, dropout=0.3) if drops else net(target)


FOLDS = ("gcn", "gat", "gated", "transformer")
HALOS = [("adaqp", "edge"), ("bns", "inline"), ("pipegcn", "inline"), ("digest", "edge"), ("cofree", "edge")]
HALOS += [("pipegcn", "gcn"), ("pipegcn", "gat")]
ROWS = [("adaqp", "TransformerConv"), ("digest", "GINEConv"), ("pipegcn", "GATv2Conv"), ("sar", "GINEConv")]
ROWS += [("bns", "GINEConv"), ("bns", "TransformerConv"), ("sar", "TransformerConv"), ("cagnet", "TransformerConv")]
ROWS += [("sancus", "GINEConv"), ("cagnet", "GINEConv")]
BY_TYPE = ["sar", "adaqp", "bns", "pipegcn", "digest", "cofree", "feature", "cagnet", "sancus"]
CASES: list[tuple[str, PyG, tuple[int, ...]]] = [
    *(("graph_parallel", config, (3,)) for config in ON_HALOS),
    *(("graph_parallel", config, WORLDS) for config in DICTIONARIES),
    *(("single", config, (1,)) for config in WITHOUT_LOOPS),
    *((s, folded(s, t), (2,)) for s, t in product(["sar", "feature", "adaqp", "bns", "cofree"], FOLDS)),
    *((s, net(t), (2,)) for s, t in HALOS),
    *((s, net("weighted", kind="Scaled"), (2,)) for s in ("sar", "bns")),
    ("feature", net("weighted", kind="GCNConv"), (2,)),
    ("sar", net("Typed"), (2,)),
    *((s, typed("Rows", kind=kind), (2,)) for s, kind in ROWS),
    *((s, typed("Typed2", hidden=8), (2,)) for s in BY_TYPE),
    *((s, typed("HGTNet", hidden=8), (2,)) for s in ("sar", "bns", "feature", "sancus")),
    *((s, typed("Typed2", hidden=8, kind="transformer"), (2,)) for s in ("sar", "sancus")),
    ("sar", typed("hetero_of"), (2,)),
    *(("gnnpipe", config, (2 + i % 2,)) for i, config in enumerate(LAYERED.values())),
    *(("gnnpipe", config, (2,)) for config in EDGES.values()),
    *(("hybrid", LAYERED[name], (4,)) for name in ("GCN", "PNA", "Jumping", "InitialResidual")),
    *(("minibatch", config, (3,)) for config in LAYERED.values()),
]
CASES.remove(("feature", net("gated"), (2,)))  # a fold that feature does not divide


def id_of(value: Any) -> str:
    if not isinstance(value, PyG):
        return "" if callable(value) else str(value)
    return "-".join([str(value.target).rpartition(".")[2], *map(str, value.kwargs.values()), str(value.self_loops)])


@pytest.mark.quick(26)
@pytest.mark.parametrize(("strategy", "config", "worlds"), CASES, ids=id_of)
def test_models_of_pyg_equal_pyg_and_the_single_device(strategy: str, config: PyG, worlds: tuple[int, ...]) -> None:
    """In the exact limit, and where there is an oracle, that. With one chunk, or all neighbours."""
    cases = check(configured("strategy", strategy), {"pyg": config}, worlds=worlds)
    assert cases[0].reference == "PyG"
    assert len(cases) > (0 if strategy == "cofree" else len(worlds))
    assert_passed(cases)


def test_a_softmax_by_type_equals_itself_untouched() -> None:
    """RGATConv, on whole neighbourhoods. It has parameters that it never uses, which `gnnpar check` reports."""
    from gnnpar.verify.pyg_reference import difference

    config = typed("Typed", kind="RGATConv")
    found = difference(config, prepared(small_graph(), config), 1e-9)
    unused = ("w", "l1", "b1", "l2", "b2")
    used = [error for name, error in found.gradients.items() if name.rpartition(".")[2] not in unused]
    assert max(found.loss, found.logits, *used) < 1e-9
    assert len(used) == 10
    two, one = (train_in_threads(GraphParallel(), config, TYPED, world=world) for world in (2, 1))
    assert two.losses == pytest.approx(one.losses, rel=1e-12)


@pytest.mark.parametrize("config", [net("gcn", hidden=4), net("sage", hidden=4), net("InPlaceNet")], ids=id_of)
def test_a_cached_first_layer_is_exact(config: PyG) -> None:
    assert_passed(check(GraphParallel(), {"pyg": config}, worlds=(2,), first_layer="cached"))


@pytest.mark.parametrize(
    ("config", "reads", "whole"),
    [
        (net("gcn"), set(), ()),
        *((net(name), {"weight"}, ()) for name in ("weighted", "Smoothed")),
        (net("weighted", kind="GraphConv"), {"weight"}, ()),
        *((typed("Rows", kind=kind), {"attr"}, ()) for kind in MAPPED),
        *((typed("Rows", kind=kind), {"attr"}, ("conv1", "conv2")) for kind in ("GATConv", "GATv2Conv", "PNAConv")),
        (typed("Rows", kind="GENConv", norm="layer"), {"attr"}, ("conv1", "conv2")),
        *((of_pyg(name), reads, ()) for name, reads in (("GCN", {"weight"}), ("GAT", set()), ("GIN", set()))),
        (of_pyg("GAT", edge_dim=3, add_self_loops=False), {"attr"}, None),
        (net("Typed"), {"type"}, ()),
        (net("Typed", kind="Shifted"), {"type"}, ("conv1", "conv2")),
    ],
    ids=id_of,
)
def test_what_a_model_reads_of_edges_is_what_its_convolutions_read(config: PyG, reads: set[str], whole: Any) -> None:
    config = PyG(target=config.target, kwargs=config.kwargs, self_loops=config.self_loops, edge_types=3)
    assert config.edge_data == reads
    assert whole is None or tuple(config.whole_neighborhoods) == whole
    if reads == {"weight"}:
        assert config.takes_root == ("GraphConv" not in config.kwargs.values()), "it normalises, or it sums"


def test_paths_name_what_a_convolution_is_mapped_to() -> None:
    paths = PyG(target="pyg_nets.Typed", kwargs={}, edge_types=3).aggregation_paths()
    assert paths[0] == "conv1: RGCNConv, mapped to a sum by type of edge"


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


READS = {
    "[]": lambda rows, at: rows[at],
    "index_select": lambda rows, at: rows.index_select(0, at),
    "gather": lambda rows, at: rows.gather(0, at),
    "take": lambda rows, at: rows.take(at),
    "take_along_dim": lambda rows, at: torch.take_along_dim(rows, at, 0),
    "embedding": lambda rows, at: torch.nn.functional.embedding(at, rows[:, None])[:, 0],
}


class ByNode(pyg.GraphConv):
    """Reads weights of edges at the numbers of nodes, as a hypergraph convolution of weights of hyperedges does. Ranks
    sort edges, so number 3 is another edge there."""

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


def built(config: PyG) -> object:
    return config.build(6, 3, seed=0)


def on_papers(config: PyG) -> object:
    return config.on(PAPERS.edge_sizes).build(PAPERS.num_features, 3, seed=0)


def on_types(config: PyG) -> object:
    return train_in_threads(GraphParallel(), config, TYPED, world=2)


DICTIONARY_LINE = "reads dictionaries by type (HeteroConv, HGTConv, to_hetero)"
CANNOT: list[tuple[Callable[[PyG], object], PyG, str]] = [
    (lambda _: PyG(target=None), net("gcn"), "model.target is not set"),
    (lambda _: of_pyg("GAT", num_layers=10**8), net("gcn"), "num_layers=100000000 is more than 10000; lower it"),
    (built, PyG(target="no_such_module.Net"), "model.target=no_such_module.Net cannot be imported"),
    (built, net("gcn", hiden=8), "cannot be made with hiden=8, in_channels=6"),
    (built, net("OfData"), "has forward(data); gnnpar calls forward(x, edge_index)"),
    (built, PyG(target="torch.nn.Identity"), "gnnpar calls forward(x, edge_index)"),
    (built, of_pyg("GCN", out_channels=5), "gives [5] for each node, and the task needs 3 logits"),
    (built, of_pyg("GAT", heads=0), "heads=0, in_channels=6, out_channels=3: ZeroDivisionError: "),
    (built, of_pyg("GAT", jk=True), "jk=True, in_channels=6, out_channels=3: AttributeError: "),
    (built, of_pyg("GAT", in_channels=[]), "in_channels=[], out_channels=3: IndexError: "),
    (built, of_pyg("GAT", hidden_channels=-1), "num_layers=2, in_channels=6, out_channels=3: RuntimeError: "),
    (built, net("Normed", track_running_stats=False), "no running statistics (track_running_stats=False)"),
    (built, net("Rows", edge_dim=3), "forward needs edge_attr, and the edges of the dataset have no"),
    (built, PyG(target="pyg_nets.AddsEdges", edge_dim=3), "the model adds rows of edges to rows of nodes"),
    (built, PyG(target="pyg_nets.EdgesAsNodes", edge_dim=3), "reads rows of edges by numbers of nodes"),
    *(
        (built, PyG(target=f"{__name__}.ReadsByNode", kwargs={"read": read, "end": end}), "conv (ByNode) reads rows of")
        for read, end in product(READS, (0, 1))
    ),
    (
        built,
        PyG(target="pyg_nets.Typed", edge_types=0),
        "forward needs edge_type, and the edges of the dataset have no",
    ),
    (on_types, net("Typed", num_relations=2), "the graph has 3 types of edges, and the model reads 2 relations"),
    (on_types, net("ByMask"), "the model reads edge_type outside of a convolution"),
    (on_types, net("ByDictionary"), DICTIONARY_LINE),
    (on_types, net("to_hetero"), DICTIONARY_LINE),
    (on_papers, typed("ByName"), "forward gives author [3], and the task needs rows of 3 logits of type paper"),
    (on_papers, typed("always_dropping"), "drops entries in evaluation, too"),
    (on_papers, typed("Mixing"), "cannot run on 8 features: TypeError"),
    (on_papers, typed("OfOther"), "is given rows of type"),
    (on_papers, typed("HardWired", hidden=8), "KeyError"),
    (
        lambda config: config.on(small_graph().edge_sizes),
        typed("HGTNet", hidden=8),
        "does not say of which types its nodes are; give a HeteroData",
    ),
    (
        lambda config: config.on(EdgeSizes(attr=5)),
        PyG(target="pyg_nets.Rows", edge_dim=4),
        "model.edge_dim=4, and the dataset's edge_attr has width 5",
    ),
    (find_fault, net("dropping"), "the model drops entries in evaluation, too"),
    *((find_fault, net("Noisy", draw=draw), f"{draw}: its noise is not keyed") for draw in pyg_nets.DRAWN),
]


@pytest.mark.parametrize(("run", "config", "line"), CANNOT, ids=id_of)
def test_what_cannot_run_is_refused_in_one_line(run: Callable[[PyG], object], config: PyG, line: str) -> None:
    with refused(re.escape(line)):
        run(config)


def test_the_width_of_attributes_is_that_of_the_dataset() -> None:
    assert net("Rows").on(EdgeSizes(attr=5)).edge_dim == 5


IN_ONE_PIECE = "runs in one piece: it reads dictionaries by type"
IN_PIECES = "folds neighbourhoods in pieces, and conv1 of model=pyg reads whole ones"
NO_LAYERS = {
    "Wavering": r"reads values of tensors \(bool\)",
    "Repeated": "its forward calls conv more than once",
    "Shared": "act.weight is read in two layers, 0 and 1",
    "Outside": "reads a tensor that is made neither of x nor of parameters and buffers; register_buffer it",
}
OUT_OF_CORE = r"^strategy=sar with strategy\.logical_parts=3 lets parts take turns within a module, which model=pyg"


@pytest.mark.parametrize(
    ("strategy", "config", "line"),
    [
        *((s, net("edge"), IN_PIECES) for s in ("sar", "feature", "cagnet", "sancus")),
        *((s, typed("HGTNet", hidden=8), IN_ONE_PIECE) for s in ("gnnpipe", "minibatch")),
        (
            "sar",
            typed("Typed2", hidden=8, kind="median"),
            "folds neighbourhoods in pieces, and convs.0.convs.<a___to___b> of",
        ),
        ("cofree", typed("hetero_of"), "never holds all rows of a layer at once, and norm.a.module of"),
        *((s, net("Normed"), "norm of model=pyg normalises by their mean") for s in ("gnnpipe", "minibatch")),
        *(
            (s, net(target), f"strategy={s} runs a model layer by layer.*{line}")
            for target, line in NO_LAYERS.items()
            for s in ("gnnpipe", "hybrid", "minibatch")
        ),
        ("sar strategy.logical_parts=3", net("gcn"), OUT_OF_CORE),
    ],
    ids=id_of,
)
def test_strategies_that_cannot_say_so_in_one_line(strategy: str, config: PyG, line: str) -> None:
    name, *options = strategy.split()
    with refused(line):
        refuse(configured("strategy", name, *options), config, {"strategy": name, "model": "pyg"})
    if str(config.target).rpartition(".")[2] in NO_LAYERS:
        refuse(configured("strategy", "graph_parallel"), config, {})


def test_a_running_sum_over_rows_is_found() -> None:
    assert str(find_fault(net("Summed"))).startswith("net mixes rows")


@pytest.mark.parametrize("target", ["Counting", "rescaled"])
def test_edges_are_read_outside_of_a_convolution_where_all_are_there(target):
    untouched, one, two = check(GraphParallel(), {"pyg": net(target)}, worlds=(1, 2))
    assert untouched.passed and one.passed
    assert two.error is not None and "outside of a convolution" in two.error


def test_weights_depend_on_the_seed_alone_and_load_into_the_users_class():
    torch.manual_seed(1)
    first = net("gcn").build(6, 3, seed=5)
    torch.manual_seed(2)
    again, other = (net("gcn").build(6, 3, seed=seed) for seed in (5, 6))
    for a, b, c in zip(first.parameters(), again.parameters(), other.parameters(), strict=True):
        assert torch.equal(a, b)
        assert a.ndim < 2 or not torch.equal(a, c)
    pyg_nets.gcn(6, 3).load_state_dict(first.net.state_dict())


def test_the_command_trains_it_and_the_trained_model_is_the_users(run_here: Run, tmp_path: Path, monkeypatch):
    (tmp_path / "mynet.py").write_text(Path(pyg_nets.__file__).read_text())
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


def test_the_prepared_graph_has_one_loop_a_node_or_none_or_its_own():
    for loops, count in ((True, 60), (False, 0)):
        src, dst = prepared(small_graph(), net("gcn", loops=loops)).edge_index
        assert int((src == dst).sum()) == count
    src, dst = prepared(small_graph(), net("sage", loops="keep")).edge_index
    assert 0 < int((src == dst).sum()) < 60


OF_PAPERS = typed("PapersAndAuthors", hidden=8)


@pytest.mark.quick(1)
@pytest.mark.parametrize("model", [typed("Typed2", hidden=8), typed("HGTNet", hidden=8), typed("hetero_of")], ids=id_of)
def test_a_relation_that_is_left_out_is_found(model, monkeypatch):
    """PyG without the edges of one type is another model, of which the comparison tells."""
    data = typed_dataset(model)
    assert data is not None
    sound = difference(model, data, 1e-9)
    assert max(sound.loss, sound.logits, *sound.gradients.values()) < 1e-9

    def without(data: Dataset, x: torch.Tensor) -> Dictionaries:
        found = dictionaries(data, x)
        return found._replace(edge_index=found.edge_index | {("b", "of", "a"): torch.zeros(2, 0, dtype=torch.int64)})

    monkeypatch.setattr(pyg_reference, "dictionaries", without)
    found = difference(model, data, 1e-9)
    assert found.logits > 1e-3
    assert found.module


@pytest.mark.slow
def test_a_type_without_features_is_that_of_pyg() -> None:
    found = difference(OF_PAPERS, PAPERS, 1e-9)
    assert max(found.loss, found.logits, *found.gradients.values()) < 1e-9


ONE_TYPE = Schema((("a", 4),), (("a", "to", "a"), ("a", "by", "a")), "a")


@pytest.mark.parametrize(
    ("model", "data", "worlds"),
    [
        (OF_PAPERS, PAPERS, (16,)),  # of 21 nodes: ranks without nodes of a type, and without edges of a relation
        pytest.param(OF_PAPERS, PAPERS, (2, 4), marks=pytest.mark.slow),
        pytest.param(
            typed("Typed2", hidden=8, kind="sage"),
            typed_graph(ONE_TYPE, (), labelled=("a",)),
            (2,),
            marks=pytest.mark.slow,
        ),
    ],
)
def test_ranks_of_graphs_with_types_equal_the_single_device(model, data, worlds) -> None:
    assert_passed(check(GraphParallel(), {"pyg": model}, worlds=worlds, dataset=data))


def test_a_mean_over_the_rows_of_a_type_is_no_fault() -> None:
    assert find_fault(typed("CentredByType", hidden=8)) is None


def test_running_statistics_are_those_of_the_rows_of_a_type() -> None:
    """After a pass of training, and the state dict loads into the user's own class, whose widths are not known yet."""
    model = typed("hetero_of")
    data = prepared(small_graph(), model)
    ours = model.on(data.edge_sizes).build(data.num_features, 3, seed=3).double()
    for each in ours.modules():
        if isinstance(each, nn.Dropout):
            each.p = 0.0
    theirs = pyg_nets.hetero_of(3, data_of(data.edge_sizes.schema).metadata())
    theirs.load_state_dict(ours.net.state_dict())  # type: ignore[attr-defined]
    theirs = theirs.double().train()
    for each in theirs.modules():
        if isinstance(each, nn.Dropout):
            each.p = 0.0
    shard = cut(data, torch.zeros(data.num_nodes, dtype=torch.int64), 1)[0].to(torch.device("cpu"), torch.float64)
    found = dictionaries(data, shard.x)
    ours(WholeGraph(shard, Pass(3, training=True)), shard.x)
    theirs(found.x, found.edge_index)
    mine, expected = ours.net.state_dict(), theirs.state_dict()  # type: ignore[attr-defined]
    moved = [name for name in expected if "running_" in name]
    assert len(moved) == 4
    for name in moved:
        assert torch.allclose(mine[name], expected[name], rtol=0, atol=1e-12), name
        assert float((expected[name] - float("var" in name)).abs().max()) > 1e-3


def data_of(schema: Schema | None) -> HeteroData:
    """Empty, of these types."""
    assert schema is not None
    data = HeteroData()
    for name, width in schema.nodes:
        data[name].x = torch.zeros(2, width)
    for key in schema.edges:
        data[key].edge_index = torch.zeros(2, 0, dtype=torch.int64)
    return data


@pytest.mark.slow
def test_the_trained_weights_give_the_same_logits_in_plain_pyg(tmp_path: Path, run_here: Run) -> None:
    """From a file, on two ranks; loaded into the user's own class, as any PyG script does."""
    data = hetero()
    data["venue"].x = torch.randn(4, 4, generator=torch.Generator().manual_seed(2))
    torch.save(data, tmp_path / "my.pt")
    (tmp_path / "mynet.py").write_text(Path(pyg_nets.__file__).read_text())
    model = ("model=pyg", "model.target=mynet.PapersAndAuthors", "model.kwargs.hidden=8", "precision=fp64")
    graph = ("dataset=pt", "dataset.path=my.pt", "dataset.self_loops=keep", "dataset.drop_duplicates=false")
    command = ("strategy=graph_parallel", *model, "world_size=2", "comm=threads", "epochs=3")
    done = run_here("train", *command, *graph, "hydra.run.dir=run")
    assert done.returncode == 0, done.stderr
    result = json.loads((tmp_path / "run" / "result.json").read_text())
    assert result["settings"]["model"]["kwargs"] == {"hidden": 8}
    trained = gnnpar.load(tmp_path / "run", trust=True)
    net = pyg_nets.PapersAndAuthors(8, 3).double().eval()
    net.load_state_dict(trained.model.net.state_dict())  # type: ignore[attr-defined]
    rows = {key: x.double() for key, x in data.x_dict.items()}
    with torch.no_grad():
        expected, got = net(rows, data.edge_index_dict), trained(data)
    assert got.shape == (21, 3)
    assert torch.allclose(got[:12], expected, rtol=0, atol=1e-12)
    assert not got[12:].any()
    other = hetero()
    with pytest.raises(ValueError, match=r"the HeteroData has nodes .*'venue': 0.* and the model was trained on"):
        trained(other)


@pytest.mark.slow
def test_shards_hold_the_types_of_nodes(tmp_path: Path, run_here: Run) -> None:
    """Trained from shards, the loss is that of the graph in memory."""
    torch.save(hetero(), tmp_path / "my.pt")
    (tmp_path / "mynet.py").write_text(Path(pyg_nets.__file__).read_text())
    graph = ("dataset=pt", "dataset.path=my.pt", "dataset.self_loops=keep", "dataset.drop_duplicates=false")
    model = ("model=pyg", "model.target=mynet.PapersAndAuthors", "model.kwargs.hidden=8", "precision=fp64")
    assert_shards_train_alike(run_here, tmp_path, (*graph, "partition=random"), *model)
