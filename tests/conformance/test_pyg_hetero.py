"""PyG models of dictionaries by type: what is found of them, their state, and files. Equality: test_pyg_models.py."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import nn
from torch_geometric.data import HeteroData

import gnnpar
import pyg_nets
from conformance.test_pyg_models import PAPERS, id_of, typed
from conftest import Run
from data.samples import hetero
from gnnpar.data.dataset import Dataset
from gnnpar.folds.edge_data import Schema
from gnnpar.parallel.blocks import WholeGraph
from gnnpar.parallel.halo.strategy import GraphParallel
from gnnpar.parallel.local import Pass
from gnnpar.partition.shard import cut
from gnnpar.verify import pyg_reference
from gnnpar.verify.conformance import check, small_graph
from gnnpar.verify.pyg_reference import Dictionaries, dictionaries, difference, prepared, typed_dataset, typed_graph
from gnnpar.verify.soundness import find_fault
from outcomes import assert_passed, assert_shards_train_alike

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
