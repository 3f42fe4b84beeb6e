"""PyG models of dictionaries by type, unchanged: equal to themselves as PyG runs them, and under strategies."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch_geometric.data import HeteroData

import gnnpar
import pyg_nets
from composing import WORLDS
from conftest import Run
from data.samples import hetero
from gnnpar.data.dataset import Dataset
from gnnpar.data.preprocess import prepare
from gnnpar.data.saved import PT, raw_graph
from gnnpar.folds.edge_data import Schema
from gnnpar.models.pyg.model import PyG
from gnnpar.parallel.halo.strategy import GraphParallel
from gnnpar.parallel.local import Pass
from gnnpar.parallel.whole import WholeGraph
from gnnpar.partition.shard import cut
from gnnpar.verify import pyg_reference
from gnnpar.verify.conformance import check, small_graph
from gnnpar.verify.pyg_reference import difference, prepared, typed_dataset
from gnnpar.verify.soundness import find_fault
from gnnpar.verify.typed import Dictionaries, dictionaries, typed_graph
from outcomes import assert_passed, assert_shards_train_alike

NETS: list[tuple[str, dict[str, Any]]] = [
    ("Typed2", {"hidden": 8}),  # SAGE, GAT and GCN in one layer
    ("Typed2", {"hidden": 8, "kind": "gatv2", "aggr": "cat"}),
    ("Typed2", {"hidden": 8, "kind": "graph", "aggr": "max"}),
    ("Typed2", {"hidden": 8, "kind": "max", "aggr": "mean"}),
    ("Typed2", {"hidden": 8, "kind": "transformer"}),
    ("HGTNet", {"hidden": 8}),
    ("hgt", {}),
    ("hetero_of", {}),
    ("hetero_of", {"kind": "gat"}),
    ("TypedWeights", {}),
    ("TypedAttributes", {}),
    ("HardWired", {"hidden": 8}),
]
IDS = [f"{target}-{'-'.join(map(str, kwargs.values()))}" for target, kwargs in NETS]


def config(target: str, **kwargs: Any) -> PyG:
    return PyG(target=f"pyg_nets.{target}", kwargs=kwargs, self_loops=False)


@pytest.mark.quick(3)
@pytest.mark.parametrize(("target", "kwargs"), NETS, ids=IDS)
def test_equals_pyg_and_is_the_same_on_several_ranks(target, kwargs):
    cases = check(GraphParallel(), {"pyg": config(target, **kwargs)}, worlds=WORLDS)
    assert [(c.reference, c.world) for c in cases] == [("PyG", 1), *(("single device", w) for w in WORLDS)]
    assert_passed(cases)


@pytest.mark.quick(1)
@pytest.mark.parametrize(("target", "kwargs"), [NETS[0], NETS[5], NETS[7]], ids=["HeteroConv", "HGTConv", "to_hetero"])
def test_a_relation_that_is_left_out_is_found(target, kwargs, monkeypatch):
    """PyG without the edges of one type is another model, of which the comparison tells."""
    model = config(target, **kwargs)
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


def typed(**how: Any):
    """12 papers of width 3 with labels, 5 authors of width 2, 4 venues without features."""
    return prepare(raw_graph("given", hetero()), PT(self_loops="keep", drop_duplicates=False, **how), seed=0)


@pytest.mark.slow
def test_a_hetero_data_with_a_type_without_features() -> None:
    data = typed()
    model = config("PapersAndAuthors", hidden=8)
    found = difference(model, data, 1e-9)
    assert max(found.loss, found.logits, *found.gradients.values()) < 1e-9
    assert_passed(check(GraphParallel(), {"pyg": model}, worlds=(2, 4), dataset=data))


def test_ranks_without_nodes_of_a_type_and_without_edges_of_a_relation() -> None:
    """16 parts of 21 nodes."""
    assert_passed(check(GraphParallel(), {"pyg": config("PapersAndAuthors", hidden=8)}, worlds=(16,), dataset=typed()))


@pytest.mark.slow
def test_one_type_of_nodes_and_two_of_edges() -> None:
    schema = Schema((("a", 4),), (("a", "to", "a"), ("a", "by", "a")), "a")
    data = typed_graph(schema, (), labelled=("a",))
    assert_passed(check(GraphParallel(), {"pyg": config("Typed2", hidden=8, kind="sage")}, worlds=(2,), dataset=data))


@pytest.mark.parametrize(
    ("target", "kwargs", "line"),
    [
        ("ByName", {}, "forward gives author \\[3\\], and the task needs rows of 3 logits of type paper"),
        ("always_dropping", {}, "drops entries in evaluation, too"),
        ("Mixing", {}, "cannot run on 8 features: TypeError"),
        ("OfOther", {}, "is given rows of type"),
        ("HardWired", {"hidden": 8}, "KeyError"),
    ],
)
def test_what_cannot_run_is_one_line(target, kwargs, line):
    data = typed()
    with pytest.raises(ValueError, match=line) as caught:
        config(target, **kwargs).on(data.edge_sizes).build(data.num_features, 3, seed=0)
    assert "\n" not in str(caught.value)


def test_a_dataset_without_types_is_refused() -> None:
    data = small_graph()
    line = "reads dictionaries by type .* does not say of which types its nodes are; give a HeteroData"
    with pytest.raises(ValueError, match=line):
        config("HGTNet", hidden=8).on(data.edge_sizes)


def test_a_mean_over_the_rows_of_a_type_is_no_fault() -> None:
    assert find_fault(config("CentredByType", hidden=8)) is None


def test_running_statistics_are_those_of_the_rows_of_a_type() -> None:
    """After a pass of training, and the state dict loads into the user's own class, whose widths are not known yet."""
    model = config("hetero_of")
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
