"""Sums over the rows of all nodes: PyG models that read them equal PyG's own loop, on any number of ranks.

Batch normalisation over all ranks: nn.BatchNorm1d on one device, in fp64, running statistics included."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor, nn
from torch_geometric.transforms import VirtualNode

import checkpoints
from composing import READS_ALL_NODES, configured, names, rest_slow
from conformance.plain_loop import CLASSES, WIDTH, graph, plain, train, verdict
from conformance.test_exact import NORMED
from conformance.whole_nets import REFUSED, ROWS
from engines import on_ranks
from gnnpar.comm import MessageTag, ThreadWorld
from gnnpar.folds.sum import Sum
from gnnpar.graph import Graph
from gnnpar.models.gnn import ModelConfig
from gnnpar.models.pyg.model import PyG
from gnnpar.parallel.halo.strategy import GraphParallel
from gnnpar.parallel.needs import refuse
from gnnpar.parallel.single.strategy import Single
from gnnpar.parallel.view import total_of
from gnnpar.planner.extract import record
from gnnpar.training.result.trained import load
from gnnpar.verify.conformance import check, make_job, small_graph, train_in_threads
from gnnpar.verify.soundness import find_fault

DATA, SMALL = graph(seed=1), small_graph()
NET = "conformance.whole_nets.Net"
WHOLE = {
    "SGFormer": ("conformance.whole_nets.sgformer", {"trans_num_heads": 2}),
    "SGFormer, cat": ("conformance.whole_nets.sgformer", {"aggregate": "cat"}),
    "Polynormer": ("conformance.whole_nets.polynormer", {"pre_ln": True, "post_bn": False, "qk_shared": True}),
    "Polynormer, GAT": ("conformance.whole_nets.polynormer", {"local_attn": True}),
}
ELSEWHERE = [("single", 1), ("graph_parallel", 2), ("sar", 2), ("feature", 2), ("cagnet", 2), ("halo=cover", 4)]
QUICK = {"linear attention", "max pool", "columns", "standard", "clusters", "aggregation", "GraphNorm", "InstanceNorm"}
QUICK |= {"attention over a node's hops", "shadowed attention", "equal entries", "each row alone"}


def built(target: str, kwargs: Mapping[str, object]) -> nn.Module:
    """The user's module; attention models get the `batch` that PyG's own loop hands them, in fp64."""
    net = PyG(target=target, kwargs=kwargs, self_loops="keep").build(WIDTH, CLASSES, seed=0).get_submodule("net")
    if target == NET:
        return net

    class Batched(type(net)):
        def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
            before = torch.get_default_dtype()
            torch.set_default_dtype(x.dtype)  # SGFormerAttention makes ones of torch's default
            try:
                return super().forward(x, edge_index, torch.zeros(len(x), dtype=torch.long))
            finally:
                torch.set_default_dtype(before)

    net.__class__ = Batched
    return net


def judged(target: str, kwargs: Mapping[str, object], strategy: str, world: int, **keys: object) -> str:
    due = plain(lambda: built(target, kwargs), DATA)
    return str(verdict(target, kwargs, DATA, strategy, world, due, seed=0, **keys))


@pytest.mark.quick(2)
@pytest.mark.parametrize("step", rest_slow(list(ROWS), *(set(ROWS) - QUICK)))
def test_what_a_forward_makes_of_all_rows_is_pygs(step):
    assert judged(NET, {"step": step}, "graph_parallel", 4) == "equal"


@pytest.mark.quick(1)
@pytest.mark.parametrize(("strategy", "world"), ELSEWHERE)
@pytest.mark.parametrize("step", rest_slow(list(ROWS), *(set(ROWS) - {"GraphNorm"})))
def test_on_every_strategy_that_holds_a_layers_rows(step, strategy, world):
    assert judged(NET, {"step": step}, strategy, world) == "equal"


@pytest.mark.quick(1)
@pytest.mark.parametrize(("strategy", "world"), ELSEWHERE[:3])
@pytest.mark.parametrize("model", rest_slow(list(WHOLE), "SGFormer, cat", "Polynormer, GAT"))
def test_graph_transformers_are_pygs(model, strategy, world):
    target, kwargs = WHOLE[model]
    keys = {"auto": True} if strategy == "sar" else {}  # GCNConv's loops, which sar folds when the dataset has them
    found = judged(target, kwargs, strategy, world, **keys)
    assert found == "equal"


@pytest.mark.slow
def test_check_runs_graph_transformers_as_pyg_does():
    """Its reference hands over `batch`, which their forwards require."""
    model = PyG(target="conformance.whole_nets.sgformer", kwargs={}, self_loops="keep")
    cases = check(GraphParallel(), {"sgformer": model}, worlds=(1, 2))
    assert {case.reference for case in cases} == {"PyG", "single device"}
    assert all(case.passed for case in cases), cases


@pytest.mark.slow
def test_polynormer_with_dropout_is_the_same_on_several_ranks():
    """Masks are keyed by row, and its forward sorts rows by graph."""
    kwargs, data = {"dropout": 0.5, "global_dropout": 0.5}, graph(seed=1, nodes=80)
    one, four = (
        train("conformance.whole_nets.polynormer", kwargs, data, "graph_parallel", world, seed=0) for world in (1, 4)
    )
    assert four.losses == pytest.approx(one.losses, rel=1e-9)


def test_rows_and_columns_of_one_number_are_told_apart():
    data, kwargs = graph(seed=1, nodes=32), {"step": "as many rows as columns"}  # 8 rows on each rank, 8 columns
    due = plain(lambda: built(NET, kwargs), data)
    assert str(verdict(NET, kwargs, data, "graph_parallel", 4, due, seed=0)) == "equal"


def test_virtual_node_is_a_node_like_others():
    data = VirtualNode()(DATA.clone())
    del data.edge_type
    target, kwargs = NET, {"step": "clusters"}
    due = plain(lambda: built(target, kwargs), data)
    assert str(verdict(target, kwargs, data, "graph_parallel", 4, due, seed=0)) == "equal"


@pytest.mark.quick(2)
@pytest.mark.parametrize("step", REFUSED)
def test_what_is_not_carried_is_refused_by_name(step):
    found = judged(NET, {"step": step}, "graph_parallel", 4)
    assert re.match(r"refused model=pyg: (net\S*|the model) .*set world_size=1", found)
    assert REFUSED[step] in found
    assert judged(NET, {"step": step}, "single", 1) == "equal"


def test_check_says_what_reads_the_whole_graph_and_finds_no_fault():
    normed, model = (PyG(target=NET, kwargs={"step": s}, self_loops="keep") for s in ("GraphNorm", "einsum"))
    assert normed.aggregation_paths()[-1] == "net.norm: reads the whole graph"
    assert model.aggregation_paths()[-1] == "net: reads the whole graph"
    assert find_fault(model) is None
    assert PyG(target="pyg_nets.Residual", kwargs={}, self_loops="keep").totals == ()


def test_total_and_its_gradient_are_sums_over_ranks_in_fp32():
    def body(comm):
        part = torch.full((2, 3), 40_000.0, dtype=torch.float16, requires_grad=True)
        total = total_of(part, comm, MessageTag(0, 0, 0, "global"))
        (total * (comm.rank + 1)).sum().backward()
        return total.detach(), part.grad, total_of(total + comm.rank, comm, None, "max"), comm.ledger.drain().bytes

    for total, gradient, largest, sent in ThreadWorld(2).run(body):
        assert bool((total == 80_000).all())  # inf in fp16
        assert bool((gradient == 3).all())
        assert bool((largest == 80_001).all())
        assert sent == {"global": 2 * 6 * 4}  # a ring of two: each rank sends its numbers once, in both directions


class Centring(nn.Module):
    """A model of one's own: rows less their mean over all nodes."""

    def __init__(self, in_dim: int, out_dim: int) -> None:
        super().__init__()
        self.lin, self.own = nn.Linear(in_dim, out_dim), nn.Linear(in_dim, out_dim)

    def forward(self, g: Graph, h: Tensor) -> Tensor:
        out = self.lin(g.aggregate(Sum(), g.source(lambda local, rows: (rows,), h))) + self.own(h)
        return out - g.total(out.sum(0)) / g.num_nodes


@dataclass(frozen=True, kw_only=True)
class Centred(ModelConfig):
    totals = ("the centring",)

    def conv(self, in_dim: int, out_dim: int, *, index: int, aggregate_first: bool) -> nn.Module:
        return Centring(in_dim, out_dim)


def test_own_model_is_equal_on_several_ranks_its_bytes_are_counted_and_planned():
    model, ranks = Centred(hidden=8), 3
    assert find_fault(model) is None
    replicated = configured("strategy", "cagnet", "strategy.replication=2")
    for strategy in (GraphParallel(), configured("strategy", "sar"), replicated):
        assert all(case.passed for case in check(strategy, {"own": model}, worlds=(4,)))
    got = train_in_threads(GraphParallel(), model, SMALL, world=ranks, epochs=1)
    numbers = 8 + 3  # of both layers, once in each direction
    assert got.traffic[0]["global"] == 2 * (ranks - 1) * 8 * 2 * numbers
    ir = record(model.build(SMALL.num_features, 3, seed=0), SMALL.num_features)
    assert (ir.totals, ir.summed_moments) == ((8, 3), 2 * numbers)


OWN = {
    "sgformer": ("model.num_layers=2", "model.heads=2"),
    "sgformer, large": (
        *("model.encoder=linear", "model.norm=batch", "model.residual=true", "model.values=true", "model.alpha=0.5"),
        *("model.global_norm=layer", "model.combine=cat", "model.global_layers=2"),
    ),
    "polynormer": ("model.num_layers=2", "model.heads=2", "model.global_layers=2"),
    "polynormer, fixed": ("model.num_layers=3", "model.heads=4", "model.beta=0.5", "model.pre_norm=true"),
}


def own(name: str) -> ModelConfig:
    return configured("model", name.partition(",")[0], "model.hidden=8", *OWN[name])


@pytest.mark.quick(1)
@pytest.mark.parametrize("name", OWN)
def test_graph_transformers_of_our_own_equal_the_single_device(name):
    worlds = {"graph_parallel": (1, 2), "sar": (2,), "feature": (2,), "cagnet": (2,)}
    for strategy, world in worlds.items():
        cases = check(configured("strategy", strategy), {name: own(name)}, worlds=world)
        assert len(cases) == len(world) and all(case.passed for case in cases), (strategy, cases)
    assert find_fault(own(name)) is None


def test_what_a_graph_transformer_sends_is_recorded_and_its_products_over_rows_are_priced():
    for name, numbers in (("sgformer", 2 + 2 * 8 * 9), ("polynormer", 2 * 2 * 4 * 5)):
        got = train_in_threads(GraphParallel(), own(name), SMALL, world=3, epochs=1)
        assert got.traffic[0]["global"] == 2 * (3 - 1) * 8 * 2 * numbers
        ir = record(own(name).build(SMALL.num_features, 3, seed=0), SMALL.num_features)
        assert sum(ir.totals) == numbers
        gemms = [(gemm.width_in, gemm.width_out) for group in ir.groups for gemm in group.gemms]
        attention = (16, 9) if name == "sgformer" else (8, 5)  # all heads' keys, values and a column of ones
        assert gemms.count(attention) == 2 * (1 if name == "sgformer" else 2)  # K^T V and its product with Q


@pytest.mark.parametrize(
    ("override", "line"),
    [
        ("model.decoder=none", "SGFormer reads rows of model.hidden before its decoder: set model.decoder=linear."),
        ("model.jump=cat", "model.jump=cat: SGFormer has a sum of its own before its decoder. Use jump=none."),
    ],
)
def test_ends_that_a_graph_transformer_does_not_have_are_refused(override, line):
    with pytest.raises(ValueError, match=re.escape(line)):
        configured("model", "sgformer", override).build(6, 3, seed=0)


NEVER = ["gnnpipe", "hybrid", "minibatch", "cofree"]
GRAPH_NORM = PyG(target=NET, kwargs={"step": "GraphNorm"}, self_loops="keep")


AT_ONCE = "never holds all rows of a layer at once, and "
REFUSING = {
    **{f"{s} norm": (s, "pyg", GRAPH_NORM, f"{AT_ONCE}net.norm of model=pyg reads sums over them") for s in NEVER},
    **{f"{s} {n}": (s, n, own(n), f"model={n} .*; choose single, ") for s in NEVER for n in READS_ALL_NODES},
    **{f"{s} batch": (s, "sage", NORMED, f"{AT_ONCE}model.norm=batch of model=sage normalises by") for s in NEVER},
    "cofree net": ("cofree", "pyg", PyG(target="pyg_nets.Normed"), AT_ONCE),
    "cofree gin": ("cofree", "pyg", PyG(target="pyg_nets.normed_gin"), AT_ONCE),
    "out of core": ("sar", "sage", NORMED, AT_ONCE),
}


@pytest.mark.parametrize("case", REFUSING)
def test_strategies_that_never_hold_all_rows_refuse_them_in_one_line(case):
    name, model, config, line = REFUSING[case]
    strategy = configured("strategy", name, *(["strategy.logical_parts=2"] if name == "sar" else []))
    with pytest.raises(ValueError, match=f"strategy={name} .*{line}") as caught:
        refuse(strategy, config, {"strategy": name, "model": model})
    assert "\n" not in str(caught.value)


def test_all_other_strategies_hold_them():
    carries = {name for name in names("strategy") if configured("strategy", name).capabilities.moments}
    assert {*names("strategy")} - carries == {*NEVER}


RESIDUAL = configured("model", "resgcn", "model.hidden=8", "model.num_layers=2", "model.norm=batch")


def torchs_own(norm, moments_of, x):
    return norm.train(moments_of(x) is not None)(x)


@pytest.fixture(scope="module")
def reference():
    """What torch's own module gives, on one device."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("gnnpar.models.norm.batch_norm", torchs_own)
        return {config: train_in_threads(Single(), config, SMALL, world=1, epochs=3) for config in (NORMED, RESIDUAL)}


@pytest.mark.parametrize("config", [NORMED, RESIDUAL], ids=["post", "pre"])
@pytest.mark.parametrize("world", [1, 2, 3])
def test_it_is_torchs_module_on_one_device(reference, config, world):
    wanted, got = reference[config], train_in_threads(GraphParallel(), config, SMALL, world=world, epochs=3)
    assert got.losses == pytest.approx(wanted.losses, rel=1e-9)
    for mine, theirs in zip(got.gradients, wanted.gradients, strict=True):
        scale = max(float(g.abs().max()) for g in theirs.values())
        for name, gradient in theirs.items():
            assert torch.allclose(mine[name], gradient, rtol=0, atol=1e-9 * scale), name
    assert torch.allclose(got.logits, wanted.logits, rtol=1e-9, atol=1e-9)  # of running statistics


def test_bytes_are_two_sums_forwards_and_two_backwards():
    plain = train_in_threads(GraphParallel(), configured("model", "sage", "model.hidden=8"), SMALL, world=3, epochs=1)
    normed = configured("model", "sage", "model.hidden=8", "model.norm=batch")
    got = train_in_threads(GraphParallel(), normed, SMALL, world=3, epochs=1)
    ring, affine = 2 * (3 - 1) * 8, 2 * 8  # bytes of a number; weight and bias
    assert got.traffic[0]["reduce"] - plain.traffic[0]["reduce"] == ring * (4 * 8 + affine)
    ir = record(normed.build(6, 3, seed=0), 6)
    assert (ir.moments, ir.summed_moments) == ((8,), 32)


def test_a_probe_and_an_evaluation_leave_the_running_statistics():
    job = make_job(GraphParallel(), NORMED, SMALL, world=2)

    def look(rank):
        engine, ledger = rank.engine, rank.engine._comm.ledger
        rank.train(1)
        before = {name: tensor.clone() for name, tensor in engine.named_weights()}
        ledger.drain()
        engine.exact_gradient(1)
        engine.predict()
        counted = ledger.drain().bytes
        return before, dict(engine.named_weights()), counted

    for before, after, counted in on_ranks(job, look):
        assert "layers.0.norm.running_mean" in before and "reduce" not in counted
        assert before["layers.1.norm.running_var"].ne(1).all() and before["layers.1.norm.num_batches_tracked"] == 1
        assert all(torch.equal(after[name], tensor) for name, tensor in before.items())


def test_running_statistics_are_part_of_a_trained_model(tmp_path):
    assert checkpoints.train(tmp_path, "strategy=graph_parallel", "model.norm=batch", "epochs=2").exit_code == 0
    found, (saved, _) = load(tmp_path), checkpoints.last(tmp_path).merged(torch.device("cpu"))
    mean = found.model.state_dict()["layers.0.norm.running_mean"]
    assert torch.equal(mean, saved["layers.0.norm.running_mean"]) and mean.any()


def test_norms_of_rows_of_edges_mix_rows():
    """On one device it trains as in PyG (test_met_by_users.py)."""
    (case,) = check(GraphParallel(), {"pyg": PyG(target="pyg_nets.normed_messages")}, worlds=(1, 2))
    assert case.error is not None and case.error.startswith("net.convs.0 mixes rows")
