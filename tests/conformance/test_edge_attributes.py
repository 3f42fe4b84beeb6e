"""Attributes of edges: PyG convolutions that read them are themselves under strategies, with gradients of encoders."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch_geometric.data import Data

import gnnpar
import pyg_nets
from composing import configured, rest_slow
from conftest import Run
from gnnpar.models.pyg.model import PyG
from gnnpar.parallel.halo.strategy import GraphParallel
from gnnpar.parallel.single.strategy import Single
from gnnpar.training.result.export import export
from gnnpar.verify.conformance import check, small_graph

MAPPED = ["GINEConv", "NNConv", "CGConv", "ResGatedGraphConv", "TransformerConv"]
WHOLE = ["GATConv", "GATv2Conv", "GENConv", "PNAConv"]
ROWS = "pyg_nets.Rows"


@pytest.mark.parametrize("kind", rest_slow(MAPPED + WHOLE, "CGConv", "ResGatedGraphConv", "GATConv", "GENConv"))
def test_equals_pyg_and_is_the_same_on_four_ranks(kind: str) -> None:
    more = {"norm": "layer"} if kind == "GENConv" else {}
    model = PyG(target=ROWS, kwargs={"kind": kind, **more}, self_loops=False)
    cases = check(GraphParallel(), {"pyg": model}, worlds=(1, 4))
    assert [(case.reference, case.world) for case in cases] == [("PyG", 1), ("single device", 1), ("single device", 4)]
    for case in cases:
        assert case.passed, case
    assert model.edge_data == {"attr"}
    assert bool(model.whole_neighborhoods) == (kind in WHOLE)


@pytest.mark.parametrize(("aggr", "hidden"), [("add", 6), ("mean", 6), ("max", 6), ("add", 2), ("mean", 2)])
def test_weights_that_a_model_makes_of_attributes(aggr: str, hidden: int) -> None:
    """With hidden=2, both sums change places with their matrices."""
    model = PyG(target="pyg_nets.LearnedWeights", kwargs={"aggr": aggr, "hidden": hidden}, self_loops=False)
    for case in check(GraphParallel(), {"pyg": model}, worlds=(2,)):
        assert case.passed, case


PAIRS = [("adaqp", "TransformerConv"), ("digest", "GINEConv"), ("pipegcn", "GATv2Conv"), ("sar", "GINEConv")]
PAIRS += [
    ("bns", "GINEConv"),
    ("bns", "TransformerConv"),
    ("sar", "TransformerConv"),
    ("cagnet", "TransformerConv"),
    ("sancus", "GINEConv"),
    ("cagnet", "GINEConv"),
]


@pytest.mark.parametrize(("strategy", "kind"), PAIRS)
def test_strategies_carry_attributes(strategy: str, kind: str) -> None:
    model = PyG(target=ROWS, kwargs={"kind": kind}, self_loops=False)
    for case in check(configured("strategy", strategy), {"pyg": model}, worlds=(2,)):
        assert case.passed, case


def test_models_of_pyg_read_what_their_convolutions_read() -> None:
    plain, options = {"hidden_channels": 8, "num_layers": 2}, {"edge_dim": 3, "add_self_loops": False}
    kinds = {"GCN": {"weight"}, "GAT": set(), "GIN": set()}
    for name, kind in kinds.items():
        assert PyG(target=f"torch_geometric.nn.models.{name}", kwargs=plain).edge_data == kind
    gat = PyG(target="torch_geometric.nn.models.GAT", kwargs={**plain, **options})
    for case in check(GraphParallel(), {"pyg": gat}, worlds=(2,)):
        assert case.passed, case
    assert gat.edge_data == {"attr"}


def test_attributes_may_be_optional() -> None:
    for case in check(GraphParallel(), {"pyg": PyG(target="pyg_nets.Optional")}, worlds=(2,)):
        assert case.passed, case


@pytest.mark.parametrize(
    ("fields", "line"),
    [
        ({"target": ROWS, "kwargs": {"edge_dim": 3}}, "forward needs edge_attr, and the edges of the dataset have no"),
        ({"target": "pyg_nets.AddsEdges", "edge_dim": 3}, "the model adds rows of edges to rows of nodes"),
        ({"target": "pyg_nets.EdgesAsNodes", "edge_dim": 3}, "reads rows of edges by numbers of nodes"),
    ],
    ids=lambda value: value["target"] if isinstance(value, dict) else "",
)
def test_what_cannot_run_is_one_clear_line(fields: dict, line: str) -> None:
    with pytest.raises(ValueError, match=line) as caught:
        PyG(**fields).build(6, 3, seed=0)
    assert "\n" not in str(caught.value)


def test_the_width_of_attributes_is_that_of_the_dataset() -> None:
    from gnnpar.folds.edge_data import EdgeSizes

    assert PyG(target=ROWS).on(EdgeSizes(attr=5)).edge_dim == 5
    with pytest.raises(ValueError, match=r"model\.edge_dim=4, and the dataset's edge_attr has width 5"):
        PyG(target=ROWS, edge_dim=4).on(EdgeSizes(attr=5))


def test_a_strategy_that_does_not_carry_them_says_so() -> None:
    from gnnpar.parallel.needs import refuse_edge_data

    model = PyG(target=ROWS, edge_dim=3)
    refuse_edge_data(Single(), model, {"attr"}, None, "g", {})
    with pytest.raises(ValueError, match="g has attributes on edges, which strategy=cofree does not carry"):
        refuse_edge_data(configured("strategy", "cofree"), model, {"attr"}, None, "g", {"strategy": "cofree"})


def arrays() -> dict[str, torch.Tensor]:
    data = small_graph()
    edges = data.edge_index[:, data.edge_index[0] != data.edge_index[1]].unique(dim=1)
    attr = torch.randn(edges.shape[1], 3, generator=torch.Generator().manual_seed(1))
    masks = {"train_mask": data.train_mask, "val_mask": data.val_mask, "test_mask": data.test_mask}
    return {"x": data.x, "y": data.y, "edge_index": edges, "edge_attr": attr, **masks}


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


def test_a_run_from_shards_has_the_losses_of_one_without(run_here: Run, tmp_path: Path) -> None:
    np.savez(tmp_path / "g.npz", **{key: value.numpy() for key, value in arrays().items()})  # type: ignore[arg-type]
    (tmp_path / "net.py").write_text(NET)
    data = ("dataset=npz", "dataset.path=g.npz", "dataset.self_loops=false", "partition=range", "world_size=2")
    done = run_here("partition", *data, "out=cut")
    assert done.returncode == 0, done.stderr
    common = ("train", "model=pyg", "model.target=net.Net", "strategy=graph_parallel", "comm=threads", "epochs=2")
    for options, name in ((data, "whole"), (("shards=cut", "world_size=2"), "cut_run")):
        done = run_here(*common, *options, f"hydra.run.dir={name}")
        assert done.returncode == 0, done.stderr
    losses = [
        [json.loads(line)["loss/train"] for line in (tmp_path / name / "metrics.jsonl").read_text().splitlines()[:2]]
        for name in ("whole", "cut_run")
    ]
    assert losses[0] == losses[1]


def test_the_trained_model_reads_them_and_has_no_program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    data = Data(**arrays())
    further: Any = {"comm": "threads", "epochs": 2, "dataset": {"self_loops": False}}
    trained = gnnpar.train(pyg_nets.Rows, data, strategy="graph_parallel", world_size=2, **further).model
    with torch.no_grad():
        logits = trained(data)
        assert torch.equal(logits, trained(data.x, data.edge_index, edge_attr=data.edge_attr))
        net = trained.model.net
        assert isinstance(net, pyg_nets.Rows)
        untouched = net.eval()(data.x, data.edge_index, data.edge_attr)
        torch.testing.assert_close(logits, untouched)
        with pytest.raises(ValueError, match="trained on edges with edge_attr, and these have none; give it"):
            trained(data.x, data.edge_index)
    (problem,) = export(trained, tmp_path / "export")
    assert "trained on edges with types or attributes" in problem
