"""Weights, types and attributes of edges: strategies equal the single device, which equals PyG's own, in fp64."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn.functional import one_hot
from torch_geometric.data import Data

import gnnpar
import pyg_nets
from composing import configured, names, rest_slow
from conftest import Run
from data.samples import hetero
from gnnpar.data.dataset import Dataset
from gnnpar.data.preprocess import prepare
from gnnpar.data.saved import PT, raw_graph
from gnnpar.folds.edge_data import EdgeKind
from gnnpar.models.gcn import GCN
from gnnpar.models.gnn import ModelConfig, ModelSource
from gnnpar.models.hgt import HGT
from gnnpar.models.pyg.model import PyG
from gnnpar.models.rgat import RGAT
from gnnpar.models.rgcn import RGCN
from gnnpar.parallel.bns.strategy import BoundarySampling
from gnnpar.parallel.cagnet.strategy import Cagnet
from gnnpar.parallel.halo.strategy import GraphParallel
from gnnpar.parallel.needs import refuse_edge_data
from gnnpar.parallel.pipeline.hybrid import Hybrid
from gnnpar.parallel.sequential.strategy import SAR
from gnnpar.parallel.single.strategy import Single
from gnnpar.parallel.strategy import Strategy
from gnnpar.training.result.export import export
from gnnpar.verify.conformance import check, make_job, small_graph, train_in_threads
from graphs import with_edge_data, with_weights
from outcomes import assert_equals_autograd, assert_passed, assert_shards_train_alike, refused

DATA = with_weights(small_graph())
TYPED = with_edge_data(small_graph(), types=3, width=0)
HETERO = prepare(raw_graph("typed", hetero()), PT(self_loops="keep", drop_duplicates=False), seed=0)
WITHIN = RGAT(hidden=8, heads=2, out_heads=2, num_bases=2, residual=True, attention="within")
ACROSS = replace(WITHIN, attention="across")
HGT_2 = HGT(hidden=8, heads=2, num_node_types=3, residual=True)
MODELS: dict[str, tuple[ModelSource, Dataset]] = {
    "gcn": (GCN(num_layers=3, hidden=8), DATA),
    "rgcn": (RGCN(num_layers=3, hidden=8, num_bases=2), TYPED),
    "rgat": (WITHIN, TYPED),  # across relations: test_strategies.py
    "hgt": (HGT_2, HETERO),
}
VARIANTS: dict[str, Any] = {
    "central": GraphParallel(overlap="central_marginal"),
    "out_of_core": SAR(logical_parts=3),
    "replicated": Cagnet(replication=2),
    "mix": Hybrid(stages=1, parts=2, chunks=4, gradient="mix"),
    "parts": Hybrid(stages=1, parts=2, chunks=4),
    "half": BoundarySampling(rate=0.5),
}
WORLDS = {"single": 1, "out_of_core": 1, "replicated": 4}
SAMPLING = {"minibatch", "tag"}  # refuse types and weights
LATE = ("digest", "bns", "sancus", "cagnet")  # messages of others: rows of halos late, or broadcast
OWN = [name for name in names("strategy") if name not in SAMPLING]
STRATEGIES: dict[str, list[Any]] = {
    "gcn": [*rest_slow(OWN, "adaqp"), "central", "out_of_core", "parts", "half"],
    "rgcn": ["central", "out_of_core", "replicated", "mix"],  # others: test_strategies.py
    "rgat": [*rest_slow((name for name in OWN if name != "feature"), *LATE), "central", "out_of_core"],
    "hgt": rest_slow(OWN, *LATE),
}


def strategy_of(name: str) -> Strategy:
    return VARIANTS[name] if name in VARIANTS else configured("strategy", name)


def _cases() -> list[Any]:
    found = []
    for model, strategies in STRATEGIES.items():
        for each in strategies:
            name, marks = (each, ()) if isinstance(each, str) else (each.values[0], each.marks)
            found.append(pytest.param(model, name, marks=marks, id=f"{model}-{name}"))
    return found


@pytest.mark.quick(6)
@pytest.mark.parametrize(("model", "name"), _cases())
def test_every_strategy_equals_the_single_device(model: str, name: str) -> None:
    """In its exact limit, and where it has an oracle, that; dropout on."""
    config, data = MODELS[model]
    assert_passed(check(strategy_of(name), {model: config}, worlds=(WORLDS.get(name, 2),), dataset=data))


def test_all_that_carry_weights_carry_types() -> None:
    carried = {name: strategy_of(name).capabilities.edge_data for name in (*names("strategy"), *VARIANTS)}
    del carried["tag"]
    assert {n for n, kinds in carried.items() if "weight" in kinds} == {n for n in carried if "type" in carried[n]}
    assert [n for n, kinds in carried.items() if "type" not in kinds] == ["minibatch"]


def two_kinds() -> Dataset:
    data = with_edge_data(small_graph(), types=3, width=0)
    data.x[:, -2:] = one_hot(torch.arange(data.num_nodes) % 2)
    return data


@pytest.mark.quick(1)
@pytest.mark.parametrize(
    ("config", "dataset", "rules"),
    [
        *((MODELS[model][0], MODELS[model][1], rules) for model in ("gcn", "rgcn") for rules in ({}, {"mixing": 0.3})),
        (ACROSS, TYPED, {}),
        (WITHIN, TYPED, {}),
        (HGT(hidden=8, heads=2, num_node_types=2), two_kinds(), {}),
    ],
)
def test_stale_chunks_equal_autograd(config: ModelConfig, dataset: Dataset, rules: dict[str, Any]) -> None:
    stale = rules.get("mixing", 0.0)
    more = {"gradient": "mix", **rules} if rules else {}
    strategy = Hybrid(stages=2, parts=2, chunks=8, refresh=2, **more)
    job = make_job(strategy, replace(config, num_layers=4), dataset, world=4, epochs=4)
    assert_equals_autograd(job, refresh=2, fresh=2.0 - stale, stale=stale)


@pytest.mark.parametrize("model", ["gcn", "rgcn", "rgat"])
def test_bytes_are_those_without_edge_data(model: str) -> None:
    """A halo row travels once for all relations, whose number is in the formula nowhere."""
    config, data = MODELS[model]
    halo = [train_in_threads(GraphParallel(), config, each, world=3).traffic[0] for each in (data, small_graph())]
    assert (halo[0]["forward"], halo[0]["backward"]) == (halo[1]["forward"], halo[1]["backward"])


@pytest.mark.parametrize(
    ("model", "kind", "strategy"),
    [
        *(
            (PyG(target="pyg_nets.Rows", edge_dim=3), "attr", strategy)
            for strategy in ("cofree", "gnnpipe", "minibatch")
        ),
        *((model, "weight", "minibatch") for model in (GCN(), PyG(target="pyg_nets.weighted"))),
        (WITHIN, "type", "minibatch"),
    ],
)
def test_a_strategy_that_does_not_carry_them_says_so(model: ModelSource, kind: EdgeKind, strategy: str) -> None:
    named = {"attr": "attributes", "type": "types", "weight": "weights"}[kind]
    weights = torch.ones(3) if kind == "weight" else None
    refuse_edge_data(Single(), model, {kind}, weights, "g", {})
    with pytest.raises(ValueError, match=f"g has {named} on edges, which strategy={strategy} does not carry"):
        refuse_edge_data(strategy_of(strategy), model, {kind}, weights, "g", {"strategy": strategy})


def test_a_root_of_a_negative_degree_is_refused() -> None:
    with refused(r"sum to less than 0 at 2 nodes \(the least is -3\), and model=gcn takes"):
        refuse_edge_data(Single(), GCN(), {"weight"}, torch.tensor([1.0, -3.0, -0.5]), "g", {"model": "gcn"})
    refuse_edge_data(Single(), GCN(), (), None, "g", {})


def arrays(**rows: object) -> dict[str, Any]:
    """The small graph in arrays of numpy, with rows of edges."""
    data = small_graph()
    masks = {"train_mask": data.train_mask, "val_mask": data.val_mask, "test_mask": data.test_mask}
    fields = {"x": data.x, "y": data.y, "edge_index": data.edge_index, **masks, **rows}
    return {key: np.asarray(value) for key, value in fields.items()}


def attributed() -> dict[str, Any]:
    edges = small_graph().edge_index
    edges = edges[:, edges[0] != edges[1]].unique(dim=1)
    attr = torch.randn(edges.shape[1], 3, generator=torch.Generator().manual_seed(1))
    return arrays(edge_attr=attr) | {"edge_index": edges.numpy()}


def by_ends() -> torch.Tensor:
    """Weights that are the same for an edge that comes twice."""
    src, dst = small_graph().edge_index
    return (7 * src + 3 * dst) % 11 / 4 + 0.5


NET = """
from torch import nn
from torch_geometric.nn import GINEConv

class Net(nn.Module):
    def __init__(self, in_channels, out_channels, edge_dim):
        super().__init__()
        self.conv = GINEConv(nn.Linear(in_channels, out_channels), edge_dim=edge_dim)

    def forward(self, x, edge_index, edge_attr):
        return self.conv(x, edge_index, edge_attr)
"""


def test_what_does_not_read_them_says_so_in_one_line(run_here: Run, tmp_path: Path) -> None:
    edges = small_graph().num_edges
    np.savez(tmp_path / "g.npz", **arrays(edge_weight=np.full(edges, 2.0)))
    common = ("train", "dataset=npz", "dataset.path=g.npz", "comm=threads", "epochs=1")
    for more, line in (
        (("model=sage", "strategy=single"), "dataset npz has weights on edges, which model=sage does not read"),
        (("model=gcn", "strategy=minibatch"), "which strategy=minibatch does not carry; use single"),
    ):
        done = run_here(*common, *more)
        assert done.returncode != 0
        assert line in done.stderr
        assert "Traceback" not in done.stderr
    done = run_here(*common, "model=gcn", "strategy=graph_parallel", "world_size=2")
    assert done.returncode == 0, done.stderr


NPZ = ("dataset=npz", "dataset.path=g.npz", "partition=range")


@pytest.mark.quick(1)
@pytest.mark.parametrize("kind", ["weight", "attr"])
def test_a_run_from_shards_has_the_losses_of_one_without(kind: str, run_here: Run, tmp_path: Path) -> None:
    np.savez(tmp_path / "g.npz", **(attributed() if kind == "attr" else arrays(edge_weight=by_ends())))
    (tmp_path / "net.py").write_text(NET)
    graph = (*NPZ, "dataset.self_loops=false") if kind == "attr" else NPZ
    model = ("model=pyg", "model.target=net.Net") if kind == "attr" else ("model=gcn",)
    assert_shards_train_alike(run_here, tmp_path, graph, *model)


@pytest.mark.parametrize(
    ("key", "line"),
    [("edge_weight", "trained on weighted edges"), ("edge_attr", "trained on edges with types or attributes")],
)
def test_the_trained_model_reads_rows_of_edges_and_has_no_program(key, line, tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    weighted = key == "edge_weight"
    fields = arrays(edge_weight=by_ends()) if weighted else attributed()
    data = Data(**{name: torch.from_numpy(value) for name, value in fields.items()})
    further: Any = {"comm": "threads", "epochs": 2} | ({} if weighted else {"dataset": {"self_loops": False}})
    given: Any = "gcn" if weighted else pyg_nets.Rows
    trained = gnnpar.train(given, data, strategy="graph_parallel", world_size=2, **further).model

    def read(rows: torch.Tensor) -> torch.Tensor:
        return trained(data.x, data.edge_index, *([rows] if weighted else []), **({} if weighted else {key: rows}))

    with torch.no_grad():
        logits = trained(data)
        assert torch.equal(logits, read(data[key]))
        assert not torch.allclose(logits, read(torch.ones_like(data[key])))
        if not weighted:
            net: Any = trained.model.net
            assert isinstance(net, pyg_nets.Rows)
            torch.testing.assert_close(logits, net.eval()(data.x, data.edge_index, data.edge_attr))
        with pytest.raises(ValueError, match=f"trained on edges with {key}, and these have none; give it"):
            trained(data.x, data.edge_index)
    assert trained.edges.weighted == weighted
    (problem,) = export(trained, tmp_path / "export")
    assert line in problem
    assert sorted(file.name for file in (tmp_path / "export").iterdir()) == ["model.json", "weights.pt"]
