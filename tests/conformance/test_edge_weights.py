"""Weights of edges: every strategy equals the single device, and that equals PyG's own model, in fp64."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch_geometric.data import Data
from torch_geometric.nn import GCNConv

import gnnpar
from conftest import Run
from gnnpar.models.gcn import GCN
from gnnpar.models.gcn import GCNConv as OurConv
from gnnpar.models.gcnii import GCNII
from gnnpar.models.gnn import ModelConfig
from gnnpar.parallel.bns.strategy import BoundarySampling
from gnnpar.parallel.cagnet.strategy import Cagnet
from gnnpar.parallel.cofree.strategy import CoFree
from gnnpar.parallel.digest.strategy import Digest
from gnnpar.parallel.feature.strategy import FeatureParallel
from gnnpar.parallel.halo.strategy import GraphParallel
from gnnpar.parallel.needs import refuse_edge_data
from gnnpar.parallel.pipegcn.strategy import PipeGCN
from gnnpar.parallel.pipeline.hybrid import Hybrid
from gnnpar.parallel.pipeline.strategy import GNNPipe
from gnnpar.parallel.sancus.strategy import Sancus
from gnnpar.parallel.sequential.strategy import SAR
from gnnpar.parallel.single.strategy import Single
from gnnpar.training.result.export import export
from gnnpar.verify.conformance import check, make_job, relative_error, small_graph, train_in_threads
from graphs import with_weights
from outcomes import assert_equals_autograd

DATA = with_weights(small_graph())
GCN_3 = GCN(num_layers=3, hidden=8)
STRATEGIES: dict[str, Any] = {
    "single": Single(),
    "halo": GraphParallel(),
    "central": GraphParallel(overlap="central_marginal"),
    "sar": SAR(),
    "out_of_core": SAR(logical_parts=3),
    "gnnpipe": GNNPipe(),
    "hybrid": Hybrid(stages=1, parts=2, chunks=4),
    "bns": BoundarySampling(rate=0.5),
    "feature": FeatureParallel(),
    "pipegcn": PipeGCN(),
    "digest": Digest(),
    "cagnet": Cagnet(),
    "sancus": Sancus(),
    "cofree": CoFree(),
}


def test_the_single_device_equals_pyg() -> None:
    """Losses of two steps of SGD, without dropout, and the logits after them."""
    config = GCN(hidden=8, dropout=0.0)
    ours = train_in_threads(Single(), config, DATA, world=1)

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(GCNConv(a, b, add_self_loops=False) for a, b in ((6, 8), (8, 3)))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            weight = DATA.edges.weight
            assert weight is not None
            for i, layer in enumerate(self.layers):
                x = layer(x if i == 0 else F.relu(x), DATA.edge_index, weight.double())
            return x

    theirs, model = Net().double(), config.build(6, 3, seed=3)
    for a, b in zip(theirs.layers, model.layers, strict=True):
        conv = b.conv
        assert isinstance(a, GCNConv)
        assert isinstance(conv, OurConv)
        a.load_state_dict({"bias": conv.bias, "lin.weight": conv.weight})
    optimizer, losses = torch.optim.SGD(theirs.parameters(), lr=0.1), []
    for _ in range(2):
        optimizer.zero_grad()
        loss = F.cross_entropy(theirs(DATA.x.double())[DATA.train_mask], DATA.y[DATA.train_mask])
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert ours.losses == pytest.approx(losses, rel=1e-12)
    assert relative_error(ours.logits, theirs(DATA.x.double()).detach()) < 1e-12
    bare = train_in_threads(Single(), config, small_graph(), world=1)
    assert abs(bare.losses[0] - losses[0]) > 1e-3, "the weights count"


@pytest.mark.parametrize("name", STRATEGIES)
def test_every_strategy_equals_the_single_device(name: str) -> None:
    """In its exact limit, and where it has an oracle, that; dropout on."""
    cases = check(STRATEGIES[name], {"gcn": GCN_3}, worlds=(1, 2, 4), dataset=DATA)
    assert cases
    for case in cases:
        assert case.passed, case


@pytest.mark.parametrize("name", ["halo", "sar", "bns"])
def test_a_cached_first_layer(name: str) -> None:
    """Messages on halo nodes read their weighted degrees."""
    limit = STRATEGIES[name].exact_limit()
    (case,) = check(limit, {"gcn": GCN_3}, worlds=(3,), dataset=DATA, first_layer="cached")
    assert case.passed, case


@pytest.mark.parametrize(("rules", "fresh", "stale"), [({}, 2.0, 0.0), ({"gradient": "mix", "mixing": 0.3}, 1.7, 0.3)])
@pytest.mark.parametrize("config", [GCN(num_layers=4, hidden=8)])
def test_stale_chunks_equal_autograd(config: ModelConfig, rules: dict, fresh: float, stale: float) -> None:
    strategy = Hybrid(stages=2, parts=2, chunks=8, refresh=2, **rules)
    job = make_job(strategy, config, DATA, world=4, epochs=4)
    assert_equals_autograd(job, refresh=2, fresh=fresh, stale=stale)


def test_gcnii_over_halos() -> None:
    config = GCNII(num_layers=3, hidden=8, encoder="linear", decoder="linear")
    (case,) = check(GraphParallel(), {"gcnii": config}, worlds=(3,), dataset=DATA)
    assert case.passed, case


def test_bytes_are_those_without_weights() -> None:
    weighted, bare = (train_in_threads(GraphParallel(), GCN_3, data, world=3) for data in (DATA, small_graph()))
    assert weighted.traffic == bare.traffic


def arrays(weight: object) -> dict[str, Any]:
    data = small_graph()
    masks = {"train_mask": data.train_mask, "val_mask": data.val_mask, "test_mask": data.test_mask}
    fields = {"x": data.x, "y": data.y, "edge_index": data.edge_index, **masks}
    return {key: value.numpy() for key, value in fields.items()} | {"edge_weight": np.asarray(weight)}


def by_ends() -> torch.Tensor:
    """Weights that are the same for an edge that comes twice."""
    src, dst = small_graph().edge_index
    return (7 * src + 3 * dst) % 11 / 4 + 0.5


def test_what_does_not_read_them_says_so_in_one_line(run_here: Run, tmp_path: Path) -> None:
    edges = small_graph().num_edges
    np.savez(tmp_path / "g.npz", **arrays(np.full(edges, 2.0)))
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


def test_a_run_from_shards_has_the_losses_of_one_without(run_here: Run, tmp_path: Path) -> None:
    np.savez(tmp_path / "g.npz", **arrays(by_ends()))
    data = ("dataset=npz", "dataset.path=g.npz", "partition=range", "world_size=2")
    done = run_here("partition", *data, "out=cut")
    assert done.returncode == 0, done.stderr
    common = ("train", "model=gcn", "strategy=graph_parallel", "comm=threads", "epochs=2")
    for options, name in (((*data,), "whole"), (("shards=cut", "world_size=2"), "cut_run")):
        done = run_here(*common, *options, f"hydra.run.dir={name}")
        assert done.returncode == 0, done.stderr
    losses = [
        [json.loads(line)["loss/train"] for line in (tmp_path / name / "metrics.jsonl").read_text().splitlines()[:2]]
        for name in ("whole", "cut_run")
    ]
    assert losses[0] == losses[1]


def test_the_trained_model_reads_weights_and_has_no_program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    given = {key: torch.from_numpy(value) for key, value in arrays(np.ones(small_graph().num_edges)).items()}
    data = Data(**given | {"edge_weight": by_ends()})
    further: Any = {"comm": "threads", "epochs": 2}
    trained = gnnpar.train("gcn", data, strategy="graph_parallel", world_size=2, **further).model
    with torch.no_grad():
        logits = trained(data)
        assert torch.equal(logits, trained(data.x, data.edge_index, data.edge_weight))
        assert not torch.allclose(logits, trained(data.x, data.edge_index, torch.ones(data.num_edges)))
        with pytest.raises(ValueError, match="trained on edges with edge_weight, and these have none; give it"):
            trained(data.x, data.edge_index)
    assert trained.edges.weighted
    (problem,) = export(trained, tmp_path / "export")
    assert "trained on weighted edges" in problem
    assert sorted(file.name for file in (tmp_path / "export").iterdir()) == ["model.json", "weights.pt"]


def test_a_root_of_a_negative_degree_is_refused() -> None:
    line = r"sum to less than 0 at 2 nodes \(the least is -3\), and model=gcn takes"
    with pytest.raises(ValueError, match=line) as one:
        refuse_edge_data(Single(), GCN(), {"weight"}, torch.tensor([1.0, -3.0, -0.5]), "g", {"model": "gcn"})
    assert "\n" not in str(one.value)
    refuse_edge_data(Single(), GCN(), (), None, "g", {})
