"""Parameters that are frozen, or that the loss does not read, move as in a loop of torch: not at all."""

from __future__ import annotations

import copy
from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from composing import configured, names, rest_slow
from engines import Rank, on_ranks
from gnnpar.comm import ThreadWorld
from gnnpar.data.dataset import Dataset
from gnnpar.models.pyg.model import PyG
from gnnpar.parallel.engine import set_gradients, summand
from gnnpar.parallel.halo.strategy import GraphParallel
from gnnpar.parallel.pipeline.strategy import GNNPipe
from gnnpar.training.optim import SGD, Adam, AdamW
from gnnpar.verify.conformance import Job, check, make_job, runs_on, small_graph
from gnnpar.verify.differences import relative_error

EPOCHS = 3
OPTIMIZERS: dict[str, tuple[Any, Any]] = {
    "adam": (Adam(weight_decay=0.1), lambda p: torch.optim.Adam(p, lr=0.01, weight_decay=0.1)),
    "adamw": (AdamW(weight_decay=0.1), lambda p: torch.optim.AdamW(p, lr=0.01, weight_decay=0.1)),
    "sgd": (
        SGD(momentum=0.9, weight_decay=0.1),
        lambda p: torch.optim.SGD(p, lr=0.01, momentum=0.9, weight_decay=0.1),
    ),
}
FROZEN = {
    "part of a layer": ["first.lin_l", "norm"],
    "first layer": ["first"],
    "last layer": ["second"],
    "nothing": ["no such name"],
}


def model_of(frozen: list[str], kind: str = "SAGEConv") -> PyG:
    kwargs = {"frozen": frozen, "spare": True, "kind": kind}
    return PyG(target="pyg_nets.Partly", kwargs=kwargs, self_loops=kind == "GCNConv")


def job_of(strategy: Any, config: PyG, optim: str = "adamw", world: int = 2, data: Dataset | None = None) -> Job:
    data = data or small_graph()
    return make_job(strategy, config, data, world=world, epochs=EPOCHS, optim=OPTIMIZERS[optim][0])


def trained(job: Job) -> list[dict[str, Tensor]]:
    """What each rank holds in the end."""

    def weights(rank: Rank) -> dict[str, Tensor]:
        rank.train(EPOCHS)
        rank.engine.drain()
        return {name: weight.clone() for name, weight in rank.engine.named_weights()}

    return on_ranks(job, weights)


def by_torch(job: Job, optim: str) -> dict[str, Tensor]:
    """A loop of torch over the module that nothing has touched."""
    model, data = copy.deepcopy(job.model).double(), job.dataset
    net: nn.Module = model.net  # type: ignore[assignment]
    net.train()
    optimizer = OPTIMIZERS[optim][1](net.parameters())
    for _ in range(EPOCHS):
        optimizer.zero_grad()
        out = net(data.x.double(), data.edge_index)
        F.cross_entropy(out[data.train_mask], data.y[data.train_mask]).backward()
        optimizer.step()
    return model.state_dict()


def same_as_in_torch(job: Job, optim: str = "adamw") -> None:
    expected, before = by_torch(job, optim), job.model.state_dict()
    moving = {name for name, p in job.model.named_parameters() if p.requires_grad and ".spare." not in name}
    ranks, merged = trained(job), dict[str, Tensor]()
    for mine in ranks:
        for name, weight in mine.items():
            assert relative_error(weight, expected[name]) < 1e-9, name
            assert name not in merged or torch.equal(weight, merged[name]), f"{name} is another one on two ranks"
            assert torch.equal(weight, before[name].double()) == (name not in moving), name
            merged[name] = weight
    assert merged.keys() == before.keys()


@pytest.mark.quick(3)
@pytest.mark.parametrize("strategy", rest_slow(names("strategy")))
def test_frozen_and_unread_parameters_stay_under_every_strategy(strategy: str) -> None:
    config, limit = model_of(FROZEN["part of a layer"]), configured("strategy", strategy).exact_limit()
    if limit.capabilities.no_pyg or strategy == "tag":
        pytest.skip("runs no model of PyG, or plans another strategy")
    world = 2 if runs_on(limit, 2, config, epochs=EPOCHS) else 1
    same_as_in_torch(job_of(limit, config, world=world))


@pytest.mark.quick(2)
@pytest.mark.parametrize(
    ("strategy", "frozen", "optim"),
    product([GraphParallel(), GNNPipe(chunks="one", remat="layer")], FROZEN, OPTIMIZERS),
)
def test_any_part_may_be_frozen_with_any_optimizer(strategy: Any, frozen: str, optim: str) -> None:
    same_as_in_torch(job_of(strategy, model_of(FROZEN[frozen]), optim), optim)


@pytest.mark.parametrize("kind", ["SAGEConv", "GCNConv", "GATConv", "GraphConv", "GINConv"])
def test_a_rank_without_edges_and_training_nodes_moves_what_others_read(kind: str) -> None:
    """What a rank has no gradient of is read on another one, so both move it."""
    data = small_graph()
    job = job_of(GraphParallel(), model_of(["norm"], kind), data=data)
    mine = job.plan.part_of == 0
    edges = data.edge_index[:, mine[data.edge_index].all(0)]
    if kind == "GCNConv":  # whose normalisation is that of graphs with loops
        edges = torch.cat([edges[:, edges[0] != edges[1]], torch.arange(data.num_nodes).expand(2, -1)], 1)
        edges = edges[:, torch.argsort(edges[1] * data.num_nodes + edges[0], stable=True)]
    masks = (data.train_mask & mine, data.val_mask, data.test_mask)
    lone = Dataset.of("lone", x=data.x, y=data.y, edge_index=edges, masks=masks, num_classes=3, task="single_label")
    same_as_in_torch(replace(job, dataset=lone))


def test_a_gradient_of_zeros_is_one_and_none_on_all_ranks_is_none() -> None:
    """Weight decay moves a parameter that has a gradient of zeros."""
    parameters = {name: nn.Parameter(torch.ones(2)) for name in ("read", "unread", "zero", "minus zero")}
    sums = {
        "read": summand(torch.tensor([0.0, 1.0]), parameters["read"]) + summand(None, parameters["read"]),
        "unread": summand(None, parameters["unread"]) + summand(None, parameters["unread"]),
        "zero": summand(torch.zeros(2), parameters["zero"]) + summand(None, parameters["zero"]),
        "minus zero": summand(torch.full((2,), -0.0), parameters["minus zero"]),
    }
    assert set_gradients(parameters, sums) == {"unread"}
    assert [name for name, p in parameters.items() if p.grad is None] == ["unread"]


def test_a_model_with_frozen_parts_passes_a_check() -> None:
    config = PyG(target="pyg_nets.Partly", kwargs={"frozen": ["first", "second.lin_l.weight"]}, self_loops=False)
    cases = check(GraphParallel(), {"partly": config}, worlds=(2,))
    assert [(case.reference, case.error, case.passed) for case in cases] == [
        ("PyG", None, True),
        ("single device", None, True),
    ]


def test_a_strategy_that_moves_frozen_parameters_fails_a_check(monkeypatch: pytest.MonkeyPatch) -> None:
    class Careless(SGD):
        def build(self, parameters: Any, **options: Any) -> Any:
            named = list(parameters)
            with torch.no_grad():
                for _, parameter in named:
                    parameter.mul_(0.9)
            return super().build(named, **options)

    monkeypatch.setattr("gnnpar.verify.conformance.SGD", Careless)
    job = replace(job_of(GraphParallel(), model_of(["first"])), optim=Careless())
    with pytest.raises(ValueError, match=r"net\.first\.\S+ is frozen \(requires_grad_\(False\)\), and has moved"):
        ThreadWorld(2).run(job)
