"""`deg` of PyG's PNA: the histogram of the training graph's in-degrees, from memory, shards and checkpoints."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch_geometric.nn.models.basic_gnn import PNA
from torch_geometric.utils import degree

import gnnpar
from checkpoints import last, rows
from gnnpar.cli.partition import run as partition
from gnnpar.cli.train import run_training
from gnnpar.config.compose import compose
from gnnpar.folds.edge_data import EdgeSizes
from gnnpar.models.pyg.model import PyG

GRAPH = ("dataset.num_nodes=60", "dataset.avg_degree=6", "dataset.num_features=12", "dataset.self_loops=false")
MODEL = (
    "model=pyg",
    "model.target=torch_geometric.nn.models.PNA",
    "model.kwargs.hidden_channels=4",
    "model.kwargs.num_layers=1",
    "model.kwargs.aggregators=[mean,max]",
    "model.kwargs.scalers=[amplification,linear]",
)
RUN = (*MODEL, "comm=threads", "world_size=2", "threads_per_rank=1", "epochs=2", "tracker=jsonl", "checkpoint.every=2")


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("pna") / "run"
    folder.mkdir()
    assert run_training(compose([*GRAPH, *RUN]), folder).exit_code == 0
    return folder


def test_a_loaded_model_has_the_degrees_of_the_graph_it_was_trained_on(run: Path) -> None:
    dataset = compose([*GRAPH, *RUN]).load_dataset()
    want = torch.bincount(degree(dataset.edge_index[1], dataset.num_nodes).long())
    assert len(want) > 4
    found = gnnpar.load(run, trust=True).model
    assert isinstance(found.config, PyG)
    assert found.config.kwargs["deg"] == want.tolist()
    kwargs = {"aggregators": ["mean", "max"], "scalers": ["amplification", "linear"], "deg": want}
    theirs = PNA(12, 4, 1, found.out_dim, **kwargs)
    for name, buffer in theirs.named_buffers():
        assert torch.equal(found.get_buffer(f"net.{name}"), buffer)
    theirs.load_state_dict({name.removeprefix("net."): value for name, value in found.state_dict().items()})


def test_shards_give_the_degrees_of_all_parts(run: Path, tmp_path: Path) -> None:
    shards, there = tmp_path / "shards", tmp_path / "there"
    assert partition([*GRAPH, *MODEL, "world_size=2", f"out={shards}"]) == 0
    there.mkdir()
    assert run_training(compose([*RUN, f"shards={shards}", "model.self_loops=false"]), there).exit_code == 0
    assert [row["loss/train"] for row in rows(there)] == [row["loss/train"] for row in rows(run)]
    assert last(there).manifest["run"]["degrees"] == last(run).manifest["run"]["degrees"]


def test_own_histogram_is_taken_and_a_missing_one_refused() -> None:
    kwargs = {"hidden_channels": 4, "num_layers": 1, "aggregators": ["mean"], "scalers": ["linear"]}
    own = PyG(target="torch_geometric.nn.models.PNA", kwargs={**kwargs, "deg": [0, 0, 5]})
    assert float(own.build(6, 3, seed=0).get_buffer("net.convs.0.aggr_module.avg_deg_lin")) == 2.0
    with pytest.raises(ValueError, match="needs deg, and in-degrees were not counted"):
        PyG(target="torch_geometric.nn.models.PNA", kwargs=kwargs).on(EdgeSizes())
