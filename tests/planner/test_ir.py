"""The IR of a model: every model has one, costs and liveness are what the layers say, PyG models are run once for it;
what is recomputed instead of received."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from scipy.optimize import Bounds, LinearConstraint, milp
from torch import Tensor, nn

from composing import READS_ALL_NODES, configured, names
from conftest import Run
from gnnpar.__main__ import main
from gnnpar.folds.edge_data import EdgeSizes
from gnnpar.models.pyg.model import PyG
from gnnpar.parallel.factors import break_even_rows
from gnnpar.parallel.halo.strategy import GraphParallel
from gnnpar.parallel.sequential.strategy import SAR
from gnnpar.parallel.strategy import Workload
from gnnpar.partition.partition import Random
from gnnpar.planner.extract import record
from gnnpar.planner.planner import Request, evaluate, recorded
from gnnpar.planner.pyg import record_pyg
from gnnpar.planner.recompute import decide, duplicated, how_held
from gnnpar.planner.registry import Registry
from gnnpar.planner.search.named import run
from gnnpar.planner.search.points import Points
from gnnpar.planner.strategy import TAG
from gnnpar.pricing.ir import Gemm, ModelIR
from gnnpar.pricing.machine import Machine
from gnnpar.pricing.rates import NOMINAL
from gnnpar.pricing.statistics import GraphStats, PartStats
from gnnpar.pricing.work import Held, Work
from gnnpar.verify.conformance import small_graph, train_in_threads
from outcomes import refused
from planner.conftest import GRAPH, machine


def built(name: str, *overrides: str, in_dim: int = 24, out_dim: int = 5) -> nn.Module:
    return configured("model", name, "model.hidden=16", *overrides).build(in_dim, out_dim, seed=0)


@pytest.mark.parametrize("name", [*names("model"), *READS_ALL_NODES])
def test_every_model_is_recorded(name: str) -> None:
    model = built(name, "model.num_layers=3")
    recorded = record(model, 24)
    assert recorded.num_layers == 3
    assert recorded.params == sum(p.numel() for p in model.parameters())
    assert [len(recorded.folds(i)) for i in range(3)] == [1, 1, 1]


def gemms(ir: ModelIR, layer: int) -> list[Gemm]:
    return [g for group in ir.layer(layer) for g in group.gemms]


def test_gcn_by_hand() -> None:
    ir = record(built("gcn"), 24)  # 24 -> 16 -> 5: both transform first
    assert gemms(ir, 0) == [Gemm(24, 16, False)]
    assert gemms(ir, 1) == [Gemm(16, 5, True)]
    assert [f.width for i in range(2) for f in ir.folds(i)] == [16, 5]
    assert [g.phase for g in ir.layer(0)] == ["transform", "aggregate", "post"]
    assert all(f.linear and f.learned and not f.needs_src for i in range(2) for f in ir.folds(i))
    assert ir.cuts == ((16,),)
    assert (ir.in_dim, ir.final) == (24, 5)
    assert (gemms(ir, 0)[0].flops(100), gemms(ir, 0)[0].numbers(100)) == (2 * 24 * 16 * 100, 24 * 16 + 40 * 100)


def test_relations_widen_the_result_alone() -> None:
    """3 relations of 16 features: one row is read for all of them, and one product takes the three sums."""
    ir = record(built("rgcn", "model.num_relations=3", in_dim=16), 16)
    (fold,) = ir.folds(1)
    assert (fold.kind, fold.width, fold.out, fold.linear) == ("Sum", 16, 48, True)
    assert Gemm(48, 5, True) in gemms(ir, 1)
    plain = record(built("sage", "model.order=aggregate_first", in_dim=16), 16).folds(1)[0]
    rates = NOMINAL.fold_seconds(fold, 900, 100), NOMINAL.fold_seconds(plain, 900, 100)
    assert rates[0] == pytest.approx(NOMINAL.fold_seconds(plain, 900, 300))
    assert rates[0] > rates[1]


def test_aggregate_first_sends_no_gradient_of_features() -> None:
    ir = record(built("gcn", "model.order=aggregate_first"), 24)
    assert [(f.width, f.learned) for i in range(2) for f in ir.folds(i)] == [(24, False), (16, True)]


def test_attention_pulls_rows_and_scores() -> None:
    ir = record(built("gat", "model.heads=4"), 24)
    first = ir.folds(0)[0]
    assert (first.kind, first.src, first.dst, first.pushed) == ("Softmax", (16, 4), (4,), 20 + 8)
    assert first.needs_src
    assert not first.linear


def test_gcnii_carries_two_tensors() -> None:
    ir = record(built("gcnii", "model.num_layers=4"), 24)
    assert ir.cuts == ((16, 16),) * 3  # the rows and the initial residual
    assert record(built("resgcn", "model.num_layers=4"), 24).cuts == ((16,),) * 3


def test_saved_is_what_autograd_keeps() -> None:
    """An MLP of known shape, by hand: inputs of the products and outputs of the activations."""

    class Dense(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList([nn.Linear(8, 6), nn.Linear(6, 3)])

        def forward(self, g: Any, x: Tensor) -> Tensor:
            return self.layers[1](torch.relu(self.layers[0](x)))

    ir = record(Dense(), 8)
    assert ir.saved_of == (6, 0)  # relu's output, which the second product keeps too; the features are there anyway


PYG_MODELS = "torch_geometric.nn.models."
SAME = {"GCN": "gcn", "GAT": "gat"}


def pyg(name: str, hidden: int = 16, **kwargs: object) -> Any:
    return PyG(target=PYG_MODELS + name, kwargs={"hidden_channels": hidden, "num_layers": 3, **kwargs}).on(EdgeSizes())


def ir_of_pyg(config: Any, degree: float = 8.0) -> ModelIR:
    return record_pyg(config.build(24, 5, seed=0), 24, degree=degree, weighted=False)


@pytest.mark.parametrize("name", SAME)
def test_a_mapped_model_is_recorded_like_the_same_one_of_gnnpar(name: str) -> None:
    heads = {"heads": 2} if name == "GAT" else {}
    overrides = ["model.hidden=16", "model.num_layers=3", *(["model.heads=2"] if heads else [])]
    own = record(configured("model", SAME[name], *overrides).build(24, 5, seed=0), 24)
    ir = ir_of_pyg(pyg(name, **heads))
    assert ir.num_layers == own.num_layers and ir.in_dim == own.in_dim and ir.final == own.final
    for layer in range(2):  # the last GAT layers differ: PyG takes the mean over heads
        mine, theirs = ([(f.kind, f.src, f.dst, f.learned) for f in each.folds(layer)] for each in (ir, own))
        assert mine == theirs
    assert ir.cuts == own.cuts


def test_parameters_moments_and_totals_are_counted() -> None:
    config = pyg("GIN", norm="batch")
    ir = ir_of_pyg(config)
    assert ir.params == sum(p.numel() for p in config.build(24, 5, seed=0).parameters())
    assert sum(ir.moments) == 2 * 2 * 16 + 5
    attention = PyG(target=PYG_MODELS + "SGFormer", kwargs={"hidden_channels": 16}).on(EdgeSizes())
    assert ir_of_pyg(attention).totals


def test_work_on_edges_grows_with_the_degree_and_what_has_no_kernel_is_timed() -> None:
    config = pyg("PNA", aggregators=["mean", "max"], scalers=["identity"], deg=[1, 2, 3])
    few, many = (sum(g.elementwise[1] + g.saved for g in ir_of_pyg(config, degree).groups) for degree in (2.0, 20.0))
    assert 5 < many / few < 11
    ir = ir_of_pyg(config)
    assert all(
        f.kind == "SourceRows" and min(f.times) > 0 and f.times != (1.0, 1.0) for i in range(3) for f in ir.folds(i)
    )
    assert ir.cuts == ((16,), (16,))


def test_a_message_of_its_own_is_timed_where_forward_may_draw_no_noise() -> None:
    config = PyG(target="pyg_nets.gated").on(EdgeSizes())
    ir = ir_of_pyg(config)
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
        ir_of_pyg(config)


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


FLAT = Registry({"graph_parallel": GraphParallel(), "sar": SAR()})
PARTS = PartStats.even(GRAPH.nodes, GRAPH.edges, 2, alpha=0.8, cut_share=0.3)


def works(name: str, *, rate: float, parts: PartStats = PARTS, graph: GraphStats = GRAPH) -> tuple[Work, Work, Machine]:
    config = configured("model", name, "model.hidden=16")
    first, twin = (config.build(graph.features, graph.classes, seed=0, cached_first_layer=c) for c in (False, True))
    live, kept = record(first, graph.features), record(twin, graph.features)
    rates = (NOMINAL,) * 2
    held: Held = how_held(twin, kept)
    return Work(live, graph, parts, rates), Work(kept, graph, parts, rates, held), machine(2, rate=rate, latency=1e-5)


@pytest.mark.parametrize(("name", "held"), [("gcn", "result"), ("sage", "result"), ("gat", "rows")])
def test_a_slow_link_makes_layer_0_stay(name: str, held: Held) -> None:
    live, kept, here = works(name, rate=1e7)
    found = decide(live, kept, here)
    assert (found.held, found.layers[0]) == (held, 0)
    assert found.seconds > 0
    assert found.factors[0] == 0  # thousands of rows a rank: a sum of small matrices is always cheaper (5.3)
    assert "halos of 1 of 2 layers" in found.describe(chosen=True)


def test_attention_is_received_over_a_fast_link() -> None:
    """Messages of the halo cost more than their bytes, and nothing of a layer that is not linear can be kept."""
    live, kept, here = works("gat", rate=1e12)
    costly = tuple(replace(r, gemm=replace(r.gemm, number=1e-6), message=0.0, gather=0.0) for r in live.rates)
    found = decide(replace(live, rates=costly), replace(kept, rates=costly), Machine(here.fabric, costly))
    assert (found.held, found.seconds, found.nbytes) == ("no", 0.0, 0.0)
    assert "halos of 0 of 2 layers" in found.describe(chosen=True)


def test_the_planner_takes_it_where_it_is_faster() -> None:
    live, kept, here = works("gcn", rate=1e7)
    request = Request(live.ir, GRAPH, lambda _: PARTS, here, 2, registry=FLAT, held=(kept.ir, kept.held))
    best, plain = (run(each, "enumerate").chosen for each in (request, replace(request, held=None)))
    assert best.candidate.held
    assert best.candidate.label.endswith("first layer held")
    assert best.price.seconds < plain.price.seconds
    assert not plain.candidate.held
    points = Points(request)  # the cut is no name of the space: where it fires, a point is priced with it
    found = points.evaluated(tuple(0 for _ in points.space.choices))
    assert found.candidate.held
    assert found.price == evaluate(found.candidate, kept, request).price


def test_a_first_layer_that_is_cached_is_priced_so() -> None:
    """first_layer=cached of the user: every candidate keeps it, in time and in memory."""
    live, kept, here = works("gcn", rate=1e7)
    plain = Request(live.ir, GRAPH, lambda _: PARTS, here, 2, registry=FLAT)
    cached = replace(plain, ir=kept.ir, kept=kept.held)
    before, after = run(plain, "enumerate").chosen, run(cached, "enumerate").chosen
    assert after.price == evaluate(after.candidate, kept, cached).price
    assert after.price.phases["wire"] < 0.7 * before.price.phases["wire"]
    assert after.price.memory[0].halo > before.price.memory[0].halo


def cost(chosen: Sequence[int], weights: list[float], fetched: list[float]) -> float:
    return sum(weights[i] + (0 if i == 0 or i - 1 in chosen else fetched[i]) for i in chosen)


def by_milp(weights: list[float], fetched: list[float]) -> float:
    """x_i and one b_i a layer: b_i >= x_i - x_(i - 1)."""
    size = len(weights)
    rows = np.zeros((size - 1, 2 * size))
    for i in range(1, size):
        rows[i - 1, [i, i - 1, size + i]] = 1, -1, -1
    found = milp(
        np.array([*weights, *fetched]),
        constraints=LinearConstraint(rows, ub=0),
        bounds=Bounds(0, 1),
        integrality=np.ones(2 * size),
    )
    return float(found.fun)


@pytest.mark.parametrize("seed", range(60))
def test_duplication_of_a_chain_equals_the_integer_program(seed: int) -> None:
    rng = random.Random(seed)
    size = rng.randint(3, 40)
    weights = [rng.uniform(-1, 1.5) for _ in range(size)]
    fetched = [0.0, *(rng.uniform(0, 0.8) for _ in range(size - 1))]
    assert cost(duplicated(weights, fetched), weights, fetched) == pytest.approx(by_milp(weights, fetched), abs=1e-9)


def test_rows_are_fetched_once_for_a_run_of_layers() -> None:
    """Alone neither layer pays for the fetch, together they do; of equal choices the fewest layers."""
    assert duplicated([5.0, -1.0, -1.0], [0.0, 1.5, 1.5]) == (1, 2)
    assert duplicated([5.0, -1.0, 1.0], [0.0, 1.5, 1.5]) == ()
    assert duplicated([0.0, 0.0, 0.0], [0.0, 0.0, 0.0]) == ()
    assert duplicated([-1.0], [0.0]) == (0,)


def seconds_of(rows: float, m: int, n: int, replicas: int, rate: float, flop: float) -> tuple[float, float]:
    """Return the seconds of an all-gather of X and dZ with (P - 1) rows more of dW = X^T dZ, and of a ring sum of
    dW."""
    others = replicas - 1
    factors = others * rows * (m + n) * 4 / rate + others * 2 * rows * m * n * flop
    return factors, 2 * others / replicas * m * n * 4 / rate


def test_sufficient_factors_pay_where_the_formula_says() -> None:
    """Wide layers with few rows gain, hidden layers of full-graph training lose."""
    link, flop = 2.8e9, 1e-13
    for m, n, replicas in ((25088, 4096, 2), (4096, 4096, 4), (256, 256, 4)):
        least = break_even_rows(m, n, replicas=replicas, rate=link, seconds_per_flop=flop)
        for rows, wins in ((0.9 * least, True), (1.1 * least, False)):
            factors, reduced = seconds_of(rows, m, n, replicas, link, flop)
            assert (factors < reduced) == wins
    assert break_even_rows(25088, 4096, replicas=2, rate=link, seconds_per_flop=0) == pytest.approx(3521, rel=1e-3)
    assert break_even_rows(256, 256, replicas=4, rate=link, seconds_per_flop=0) == pytest.approx(64)
    assert break_even_rows(4096, 4096, replicas=4, rate=link, seconds_per_flop=0) == pytest.approx(1024)
