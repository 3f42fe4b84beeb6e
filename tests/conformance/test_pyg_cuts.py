"""PyG models layer by layer: recorded, cut between convolutions, and equal to themselves as a whole; or refused."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch

import gnnpar
from conformance.test_pyg_models import EDGES, LAYERED
from conftest import Run
from gnnpar.config.compose import compose
from gnnpar.models.pyg.cuts import example
from gnnpar.models.pyg.model import PyG, PyGNet
from gnnpar.parallel.pipeline.hybrid import Hybrid
from gnnpar.parallel.pipeline.strategy import GNNPipe
from gnnpar.parallel.sampling.strategy import Minibatch
from gnnpar.training.checks import check_strategy
from gnnpar.verify.conformance import graph_for, make_job, small_graph, train_in_threads
from outcomes import assert_equals_autograd, assert_same_bits

NETS = LAYERED | EDGES


def built(target: str, **kwargs: Any) -> PyGNet:
    return PyG(target=target, kwargs=kwargs).build(6, 3, seed=0)


CHUNKED = [("GCN", 2, 1, 4), ("GAT", 3, 1, 6), ("PNA", 2, 1, 4), ("Jumping", 4, 1, 4), ("EdgeCNN", 1, 2, 6)]
CHUNKED += [("InitialResidual", 2, 2, 6), ("Residual", 2, 1, 4), ("weighted", 2, 1, 4), ("relational", 2, 1, 4)]


@pytest.mark.quick(1)
@pytest.mark.parametrize(("name", "stages", "parts", "chunks"), CHUNKED)
def test_chunks_are_gnnpipe_by_autograd(name, stages, parts, chunks):
    """The oracle runs the model as a whole, slot by slot."""
    strategy, config = Hybrid(stages=stages, parts=parts, chunks=chunks, refresh=2), NETS[name]
    job = make_job(strategy, config, graph_for(strategy, config, small_graph()), world=stages * parts, epochs=3)
    assert_equals_autograd(job, refresh=2, fresh=2.0)


@pytest.mark.quick(1)
@pytest.mark.parametrize("name", ["Residual", "Jumping", "PNA"])
def test_stages_and_remat_do_not_change_a_bit(name):
    """Jumping has 4 layers, as Residual; PNA 3."""
    config = NETS[name]
    data, many = graph_for(GNNPipe(), config, small_graph()), 3 if name == "PNA" else 4
    ways: list[tuple[int, dict[str, Any]]] = [(1, {}), (many, {}), (many, {"remat": "chunk"}), (2, {"remat": "layer"})]
    ways += [] if name == "PNA" else [(2, {"virtual": 2})]
    runs = [train_in_threads(GNNPipe(chunks=4, refresh=1, **more), config, data, world=n, epochs=3) for n, more in ways]
    for other in runs[1:]:
        assert_same_bits(other, runs[0])


def test_sampled_neighbours_are_an_approximation_that_is_drawn_again():
    config, strategy = NETS["PNA"], Minibatch(fanout=(2,), batch_size=None)
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
    assert [jumping.activation_widths(layer) for layer in range(4)] == [(8,), (8,), (8, 8), (8, 8, 8)]
    assert built("pyg_nets.gcn").cut_before(1) == "cut between conv1 and conv2: 8 of conv1"


def test_layers_are_those_that_run_first():
    """Registered the other way round."""
    net = built("pyg_nets.Backwards")
    assert list(net.lowerings) == ["second", "first"]
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
        activations = twin.begin(g, x)
        for i in range(3):
            activations = twin.run_layer(i, g, activations)
        assert torch.equal(twin.end(g, activations), twin(g, x))


def test_more_stages_than_convolutions_are_one_line():
    pyg = ("model=pyg", "model.target=pyg_nets.gcn", "dataset=sbm")
    with pytest.raises(ValueError, match="2 layers cannot fill 3 stages"):
        check_strategy(compose(["strategy=gnnpipe", *pyg]), 3)


@pytest.mark.slow
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
