"""PyG models in the planner: recorded by running them once, priced, listed with what refuses them, and trained."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from composing import configured
from conftest import Run
from gnnpar.__main__ import main
from gnnpar.folds.edge_data import EdgeSizes
from gnnpar.models.pyg.model import PyG
from gnnpar.parallel.strategy import Workload
from gnnpar.partition.partition import Random
from gnnpar.planner.extract import record
from gnnpar.planner.planner import Request, recorded
from gnnpar.planner.pyg import record_pyg
from gnnpar.planner.strategy import TAG
from gnnpar.pricing.ir import ModelIR
from gnnpar.verify.conformance import small_graph, train_in_threads
from outcomes import refused
from planner.machines import machine

MODELS = "torch_geometric.nn.models."
SAME = {"GCN": "gcn", "GAT": "gat"}


def pyg(name: str, hidden: int = 16, **kwargs: object) -> Any:
    return PyG(target=MODELS + name, kwargs={"hidden_channels": hidden, "num_layers": 3, **kwargs}).on(EdgeSizes())


def ir_of(config: Any, degree: float = 8.0) -> ModelIR:
    return record_pyg(config.build(24, 5, seed=0), 24, degree=degree, weighted=False)


@pytest.mark.parametrize("name", SAME)
def test_a_mapped_model_is_recorded_like_the_same_one_of_gnnpar(name: str) -> None:
    heads = {"heads": 2} if name == "GAT" else {}
    overrides = ["model.hidden=16", "model.num_layers=3", *(["model.heads=2"] if heads else [])]
    own = record(configured("model", SAME[name], *overrides).build(24, 5, seed=0), 24)
    ir = ir_of(pyg(name, **heads))
    assert ir.num_layers == own.num_layers and ir.in_dim == own.in_dim and ir.final == own.final
    for layer in range(2):  # the last GAT layers differ: PyG takes the mean over heads
        mine, theirs = ([(f.kind, f.src, f.dst, f.learned) for f in each.folds(layer)] for each in (ir, own))
        assert mine == theirs
    assert ir.cuts == own.cuts


def test_parameters_moments_and_totals_are_counted() -> None:
    config = pyg("GIN", norm="batch")
    ir = ir_of(config)
    assert ir.params == sum(p.numel() for p in config.build(24, 5, seed=0).parameters())
    assert sum(ir.moments) == 2 * 2 * 16 + 5
    attention = PyG(target=MODELS + "SGFormer", kwargs={"hidden_channels": 16}).on(EdgeSizes())
    assert ir_of(attention).totals


def test_work_on_edges_grows_with_the_degree_and_what_has_no_kernel_is_timed() -> None:
    config = pyg("PNA", aggregators=["mean", "max"], scalers=["identity"], deg=[1, 2, 3])
    few, many = (sum(g.elementwise[1] + g.saved for g in ir_of(config, degree).groups) for degree in (2.0, 20.0))
    assert 5 < many / few < 11
    ir = ir_of(config)
    assert all(
        f.kind == "SourceRows" and min(f.times) > 0 and f.times != (1.0, 1.0) for i in range(3) for f in ir.folds(i)
    )
    assert ir.cuts == ((16,), (16,))


def test_a_message_of_its_own_is_timed_where_forward_may_draw_no_noise() -> None:
    config = PyG(target="pyg_nets.gated").on(EdgeSizes())
    ir = ir_of(config)
    assert {f.kind for i in range(ir.num_layers) for f in ir.folds(i)} == {"Generic"}
    assert all(min(f.times) > 0 for i in range(ir.num_layers) for f in ir.folds(i))


@pytest.mark.slow
def test_memory_of_a_message_of_its_own_is_that_of_a_run(
    run_cli: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a process of its own: a peak counts whatever else its process holds."""
    examples = Path(__file__).parents[2] / "examples"
    monkeypatch.syspath_prepend(str(examples))
    graph = ("dataset.num_nodes=6000", "dataset.avg_degree=20", "world_size=1", "strategy=single")
    asked = ("model=pyg", "model.target=own_message.Net", *graph)
    assert main(["estimate", "--json", "--no-measure", *asked]) == 0
    (told,) = json.loads(capsys.readouterr().out)["estimates"]
    quick = ("epochs=6", "threads_per_rank=1", "tracker=jsonl", "checkpoint.keep=0", f"hydra.run.dir={tmp_path}")
    assert run_cli("train", *asked, *quick, cwd=examples).returncode == 0
    peak = json.loads((tmp_path / "result.json").read_text())["memory_bytes"]["peak"][0]
    assert told["predicted"]["peak_bytes"][0] == pytest.approx(peak, rel=0.15)


class Reads(nn.Module):
    """Reads a value of a tensor in a way that differs for a large graph."""

    def __init__(self, in_channels: int, out_channels: int) -> None:
        super().__init__()
        from torch_geometric.nn import GCNConv

        self.conv = GCNConv(in_channels, out_channels)

    def forward(self, x: torch.Tensor, edge_index: torch.Tensor) -> torch.Tensor:
        if x.shape[0] > 1000:
            raise RuntimeError("too many nodes for this one")
        return self.conv(x, edge_index)


def test_what_cannot_be_recorded_is_one_line() -> None:
    config = PyG(target=f"{__name__}.Reads").on(EdgeSizes())
    with refused(r"cannot be traced: module net \(Reads\) raised RuntimeError"):
        ir_of(config)


def workload(config: Any) -> Workload:
    data = small_graph()
    model = config.build(data.num_features, 3, seed=3)
    return Workload(data, Random(), model.num_layers, model=model)


def test_strategies_that_refuse_a_model_are_left_out_with_the_reason() -> None:
    request = Request.of(workload(pyg("PNA", aggregators=["max"], scalers=["identity"], deg=[1, 2])), machine(2), 2)
    families = {c.family for c in request.candidates(2)}
    assert "graph_parallel" in families and not families & {"sar", "feature", "cagnet", "sancus"}
    assert "convs.0 of model=pyg reads whole ones" in request.registry.unpriced()["sar"]


@pytest.mark.quick(1)
@pytest.mark.parametrize("name", ["GCN", "GAT"])
def test_tag_trains_a_pyg_model_and_predicts_its_bytes(name: str) -> None:
    config, data, strategy = pyg(name, hidden=8), small_graph(), TAG(rates="nominal")
    request = Request.of(workload(config), machine(2), 2)
    assert request.problem is not None and recorded(request.problem.model, data).params == request.ir.params
    traffic = strategy.cost(request.problem, machine(2)).traffic
    ran = train_in_threads(strategy, config, data, world=2, dtype=torch.float32).traffic[1]
    assert traffic is not None and traffic.total == sum(ran.values())


class Uncopied(Reads):
    """Holds a tensor that torch does not copy."""

    def __init__(self, in_channels: int, out_channels: int) -> None:
        super().__init__(in_channels, out_channels)
        self.kept = self.conv.lin.weight * 2


def test_a_model_that_cannot_be_copied_is_one_line_and_keeps_no_hook() -> None:
    model: Any = PyG(target=f"{__name__}.Uncopied").on(EdgeSizes()).build(24, 5, seed=0)
    with refused(r"model.target=.*Uncopied cannot be copied, which the planner needs"):
        record_pyg(model, 24, degree=8.0, weighted=False)
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
