"""PyG models layer by layer: recorded, cut between convolutions, and equal to themselves as a whole; or refused."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch

import gnnpar
from chunked import ByAutograd
from composing import configured
from conftest import Run
from gnnpar.config.compose import compose
from gnnpar.models.pyg.cuts import example
from gnnpar.models.pyg.model import PyG, PyGNet
from gnnpar.parallel.needs import refuse, refuse_edge_data
from gnnpar.parallel.pipeline.hybrid import Hybrid
from gnnpar.parallel.pipeline.strategy import GNNPipe
from gnnpar.parallel.sampling.strategy import Minibatch
from gnnpar.training.checks import check_strategy
from gnnpar.verify.conformance import (
    check,
    graph_for,
    make_job,
    merge_ranks,
    relative_error,
    small_graph,
    train_in_threads,
)
from worlds import run_world

THREE: dict[str, Any] = {"hidden_channels": 8, "num_layers": 3, "dropout": 0.3}
DEGREES = {"aggregators": ["mean", "max", "std"], "scalers": ["identity", "amplification"]}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "GCN": ("torch_geometric.nn.models.GCN", {**THREE, "norm": "layer_norm", "norm_kwargs": {"mode": "node"}}),
    "GraphSAGE": ("torch_geometric.nn.models.GraphSAGE", {**THREE, "jk": "max"}),
    "GAT": ("torch_geometric.nn.models.GAT", {**THREE, "heads": 2, "jk": "cat", "act": "elu"}),
    "GIN": ("torch_geometric.nn.models.GIN", {**THREE, "jk": "last"}),
    "PNA": ("torch_geometric.nn.models.PNA", {**THREE, **DEGREES}),
    "EdgeCNN": ("torch_geometric.nn.models.EdgeCNN", {**THREE, "act_first": True}),
    "Jumping": ("pyg_nets.Jumping", {}),
    "InitialResidual": ("pyg_nets.InitialResidual", {}),
    "Residual": ("pyg_nets.Residual", {}),
    "gated": ("pyg_nets.Residual", {"kind": "gated"}),
    "Branches": ("pyg_nets.Branches", {}),
    "Smoothed": ("pyg_nets.Smoothed", {}),
}
EDGES = {"weighted": ("pyg_nets.weighted", {"kind": "Scaled"}), "typed": ("pyg_nets.Typed", {"kind": "Shifted"})}
EDGES["relational"] = ("pyg_nets.Typed", {})


def model_of(name: str) -> PyG:
    target, kwargs = (MODELS | EDGES)[name]
    return PyG(target=target, kwargs=kwargs)


def built(target: str, **kwargs: Any) -> PyGNet:
    return PyG(target=target, kwargs=kwargs).build(6, 3, seed=0)


@pytest.mark.parametrize("name", MODELS)
def test_one_chunk_is_the_single_device(name):
    """Which equals the untouched model of PyG, as the first case says."""
    cases = check(configured("strategy", "gnnpipe"), {"pyg": model_of(name)}, worlds=(2, 3))
    assert [(case.reference, case.world) for case in cases] == [("PyG", 1), ("single device", 2), ("single device", 3)]
    for case in cases:
        assert case.passed, case


@pytest.mark.parametrize("name", ["GCN", "PNA", "Jumping", "InitialResidual"])
def test_parts_of_stages_give_whole_neighbourhoods(name):
    cases = check(configured("strategy", "hybrid"), {"pyg": model_of(name)}, worlds=(4,))
    assert [(case.reference, case.world) for case in cases] == [("PyG", 1), ("single device", 4)]
    for case in cases:
        assert case.passed, case


@pytest.mark.parametrize("name", MODELS)
def test_batches_with_all_neighbours_are_the_single_device(name):
    cases = check(configured("strategy", "minibatch"), {"pyg": model_of(name)}, worlds=(1, 3))
    assert len(cases) == 3
    for case in cases:
        assert case.passed, case


@pytest.mark.parametrize("name", EDGES)
def test_chunks_carry_weights_and_types(name):
    cases = check(configured("strategy", "gnnpipe"), {"pyg": model_of(name)}, worlds=(2,))
    assert len(cases) == 2
    for case in cases:
        assert case.passed, case


CHUNKED = [("GCN", 2, 1, 4), ("GAT", 3, 1, 6), ("PNA", 2, 1, 4), ("Jumping", 4, 1, 4), ("EdgeCNN", 1, 2, 6)]
CHUNKED += [("InitialResidual", 2, 2, 6), ("Residual", 2, 1, 4), ("weighted", 2, 1, 4), ("relational", 2, 1, 4)]


@pytest.mark.parametrize(("name", "stages", "parts", "chunks"), CHUNKED)
def test_chunks_are_gnnpipe_by_autograd(name, stages, parts, chunks):
    """The oracle runs the model as a whole, slot by slot."""
    strategy, config = Hybrid(stages=stages, parts=parts, chunks=chunks, refresh=2), model_of(name)
    job = make_job(strategy, config, graph_for(strategy, config, small_graph()), world=stages * parts, epochs=3)
    got = merge_ranks(job, run_world("threads", stages * parts, job))
    losses, gradients = ByAutograd(job, refresh=2, fresh=2.0).train()
    assert got.losses == pytest.approx(losses, rel=1e-10)
    for mine, theirs in zip(got.gradients, gradients, strict=True):
        assert mine.keys() == theirs.keys()
        assert max(relative_error(mine[k], g) for k, g in theirs.items()) < 1e-9


@pytest.mark.parametrize("name", ["Residual", "Jumping", "PNA"])
def test_stages_and_remat_do_not_change_a_bit(name):
    """Jumping has 4 layers, as Residual; PNA 3."""
    config = model_of(name)
    data, many = graph_for(GNNPipe(), config, small_graph()), 3 if name == "PNA" else 4
    ways: list[tuple[int, dict[str, Any]]] = [(1, {}), (many, {}), (many, {"remat": "chunk"}), (2, {"remat": "layer"})]
    ways += [] if name == "PNA" else [(2, {"virtual": 2})]
    runs = [train_in_threads(GNNPipe(chunks=4, refresh=1, **more), config, data, world=n, epochs=3) for n, more in ways]
    for other in runs[1:]:
        assert other.losses == runs[0].losses
        assert torch.equal(other.logits, runs[0].logits)
        for mine, theirs in zip(other.gradients, runs[0].gradients, strict=True):
            assert mine.keys() == theirs.keys()
            assert all(torch.equal(mine[k], g) for k, g in theirs.items())


def test_sampled_neighbours_are_an_approximation_that_is_drawn_again():
    config, strategy = model_of("PNA"), Minibatch(fanout=(2,), batch_size=None)
    data = graph_for(strategy, config, small_graph())
    one, again = (train_in_threads(strategy, config, data, world=1, epochs=2) for _ in range(2))
    exact = train_in_threads(strategy.exact_limit(), config, data, world=1, epochs=2)
    assert one.losses == again.losses
    assert abs(one.losses[0] / exact.losses[0] - 1) > 1e-5
    assert torch.equal(one.logits, again.logits)


def test_the_cut_is_where_the_fewest_columns_are_read_later():
    assert [built("pyg_nets.Residual").cut_before(i) for i in (1, 2, 3)] == [
        f"cut between blocks.{i - 1}.conv and blocks.{i}.conv: 8 of add" for i in (1, 2, 3)
    ]
    assert built("pyg_nets.InitialResidual").cut_before(2) == "cut between convs.1 and convs.2: 8 of relu, 8 of convs.1"
    jumping = built("pyg_nets.Jumping")
    assert [jumping.carry_widths(layer) for layer in range(4)] == [(8,), (8,), (8, 8), (8, 8, 8)]
    assert built("pyg_nets.gcn").cut_before(1) == "cut between conv1 and conv2: 8 of conv1"


def test_layers_are_those_that_run_first():
    """Registered the other way round."""
    net = built("pyg_nets.Backwards")
    assert list(net.ways) == ["second", "first"]
    assert [net.layer_of(f"net.{name}.lin_l.weight") for name in ("second", "first")] == [0, 1]
    assert net.layer_of("net.head.bias") == 1


def test_a_stage_holds_the_parameters_of_its_layers_alone():
    net = built("pyg_nets.Residual")
    net.keep_layers({1, 2}, first=False, last=False)
    names = {name.split(".")[2] for name, _ in net.named_parameters()}
    assert names == {"1", "2"}
    whole = built("pyg_nets.Branches")
    assert {whole.layer_of(f"net.{name}") for name in ("share", "last.lin_rel.weight")} == {1, 2}


def test_a_copy_and_the_other_type_share_the_recording():
    net = built("pyg_nets.Branches")
    cuts = net.cuts
    twin = copy.deepcopy(net).double()
    assert twin.cuts is cuts
    g, x = example(twin, 5, 6, training=False, weighted=False)
    with torch.no_grad():
        carry = twin.begin(g, x)
        for i in range(3):
            carry = twin.run_layer(i, g, carry)
        assert torch.equal(twin.end(g, carry), twin(g, x))


WAVERS = "reads values of tensors (bool)"


@pytest.mark.parametrize(
    ("target", "line"),
    [
        ("Wavering", WAVERS),
        ("Repeated", "its forward calls conv more than once"),
        ("Shared", "act.weight is read in two layers, 0 and 1"),
        ("Outside", "reads a tensor that is made neither of x nor of parameters and buffers; register_buffer it"),
    ],
)
def test_what_has_no_layers_apart_is_one_line(target, line):
    config = PyG(target=f"pyg_nets.{target}")
    for strategy in ("gnnpipe", "hybrid", "minibatch"):
        with pytest.raises(ValueError, match=f"strategy={strategy} runs a model layer by layer") as caught:
            refuse(configured("strategy", strategy), config, {"strategy": strategy, "model": "pyg"})
        assert line in str(caught.value)
        assert "\n" not in str(caught.value)
    refuse(configured("strategy", "graph_parallel"), config, {})


def test_what_pipelines_and_batches_do_not_carry_is_one_line():
    for strategy in ("gnnpipe", "minibatch"):
        found = configured("strategy", strategy)
        with pytest.raises(ValueError, match="norm of model=pyg normalises by their mean and variance"):
            refuse(found, PyG(target="pyg_nets.Normed"), {"model": "pyg"})
        rows = PyG(target="pyg_nets.Rows")
        with pytest.raises(ValueError, match=f"has attributes on edges, which strategy={strategy} does not carry"):
            refuse_edge_data(found, rows, {"attr"}, None, "mine", {"strategy": strategy})
    found, names = configured("strategy", "minibatch"), {"strategy": "minibatch"}
    with pytest.raises(ValueError, match="has weights on edges, which strategy=minibatch does not carry"):
        refuse_edge_data(found, model_of("weighted"), {"weight"}, torch.ones(3), "mine", names)


def test_more_stages_than_convolutions_are_one_line():
    pyg = ("model=pyg", "model.target=pyg_nets.gcn", "dataset=sbm")
    with pytest.raises(ValueError, match="2 layers cannot fill 3 stages"):
        check_strategy(compose(["strategy=gnnpipe", *pyg]), 3)


def test_the_command_says_where_it_is_cut_and_the_weights_are_the_users(run_here: Run, tmp_path: Path):
    (tmp_path / "mynet.py").write_text((Path(__file__).parents[1] / "pyg_nets.py").read_text())
    model = ("model=pyg", "model.target=mynet.Residual", "model.kwargs.hidden=16")
    there = ("dataset=sbm", "world_size=2", "debug=tiny", "comm=threads", "hydra.run.dir=run")
    done = run_here("train", "strategy=gnnpipe", *model, *there)
    assert done.returncode == 0, done.stderr
    assert "cut between blocks.1.conv and blocks.2.conv: 16 of add" in done.stdout + done.stderr
    assert json.loads((tmp_path / "run" / "result.json").read_text())["status"] == "completed"
    import pyg_nets

    weights = gnnpar.load(tmp_path / "run", trust=True).model.state_dict()
    assert all(name.startswith("net.") for name in weights)
    own = pyg_nets.Residual(64, 8, hidden=16)
    own.load_state_dict({name.removeprefix("net."): each for name, each in weights.items()})
    done = run_here("check", "strategy=gnnpipe", *model, "--worlds", "2")
    assert done.returncode == 0, done.stderr
    assert "cut between blocks.2.conv and blocks.3.conv: 16 of add" in done.stdout
