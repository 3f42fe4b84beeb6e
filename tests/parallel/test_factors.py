"""strategy.reduce=factors: gradients of dense weights by sufficient factors equal their sum, and are fewer bytes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from composing import configured, settings_of
from gnnpar.cli.main import run
from gnnpar.models.dense import dense
from gnnpar.models.gnn import ModelSource
from gnnpar.models.pyg.model import PyG
from gnnpar.parallel.factors import FactorEngine, watch
from gnnpar.parallel.halo.strategy import GraphParallel
from gnnpar.verify.conformance import Outcome, small_graph, train_in_threads

FACTORS = GraphParallel(reduce="factors")


@pytest.fixture
def all_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    """By factors also where these are more bytes."""
    monkeypatch.setattr(FactorEngine, "pays", lambda self, name, rows: self._comm.size > 1 and max(rows) < torch.inf)


def test_they_equal_the_single_device(all_weights: None) -> None:
    words = ["strategy=graph_parallel", "strategy.reduce=factors", "model=gcn,resgcn", "--worlds", "1,3"]
    assert run("check", words) == 0


def by_both(config: ModelSource, rel: float, near: dict[str, Any], **options: Any) -> list[Outcome]:
    """Train by factors and by sums: the same losses and gradients."""
    mine, theirs = (train_in_threads(each, config, small_graph(), **options) for each in (FACTORS, GraphParallel()))
    assert mine.losses == pytest.approx(theirs.losses, rel=rel)
    for ours, sums in zip(mine.gradients, theirs.gradients, strict=True):
        assert all(torch.allclose(ours[name], sums[name], **near) for name in sums)
    return [mine, theirs]


OWN = ("gcn", "sage", "gat", "gin", "transformer", "gcnii")
NETS = ("gcn", "gat", "InitialResidual")


@pytest.mark.quick(2)
@pytest.mark.parametrize(("model", "world"), [*((name, 3) for name in OWN), *((f"pyg_nets.{net}", 2) for net in NETS)])
def test_every_model_gives_the_gradients_of_the_sum(all_weights: None, model: str, world: int) -> None:
    own = not model.startswith("pyg_nets")
    config = configured("model", model, "model.hidden=8", "model.num_layers=3") if own else PyG(target=model)
    by_both(config, 1e-12, {"rtol": 1e-9, "atol": 1e-12}, world=world)


def test_in_fp32_wide_weights_take_fewer_bytes() -> None:
    config = settings_of("model=gcn", "model.hidden=256", "model.num_layers=3").model
    mine, theirs = by_both(config, 1e-5, {"rtol": 1e-4, "atol": 1e-6}, world=2, dtype=torch.float32)
    assert mine.traffic[0]["reduce"] < theirs.traffic[0]["reduce"] / 2
    assert mine.traffic[0]["forward"] == theirs.traffic[0]["forward"]


def hooked(x: Tensor, w: Tensor) -> Tensor:
    w.register_hook(lambda grad: grad * 2)
    return F.linear(x, w)


READERS: dict[str, tuple[bool, Callable[[Tensor, Tensor], Tensor]]] = {
    "F.linear": (True, F.linear),
    "F.linear with a bias": (True, lambda x, w: F.linear(x, w, x[0])),
    "gnnpar's dense layer": (True, lambda x, w: dense(x, w)),
    "checkpointed": (True, lambda x, w: cast("Tensor", checkpoint(F.linear, x, w, use_reentrant=False))),
    "x @ w": (False, lambda x, w: x @ w),
    "dense layer of w.t()": (False, lambda x, w: dense(x, w.t())),
    "w @ x": (False, lambda x, w: w @ x),
    "w.t() @ x": (False, lambda x, w: w.t() @ x),
    "alpha": (False, lambda x, w: torch.addmm(x, x, w.t(), alpha=0.5)),
    "addmm of w": (False, lambda x, w: torch.addmm(x, x, w)),  # GCN2Conv
    "twice": (False, lambda x, w: F.linear(F.linear(x, w).relu(), w)),
    "also itself": (False, lambda x, w: F.linear(x, w) + w),
    "hook": (False, hooked),
}


@pytest.mark.parametrize("how", READERS)
def test_only_a_single_product_with_the_transposed_weight_has_factors(how: str) -> None:
    """On square matrices, where the shapes of other products fit as well."""
    expected, read = READERS[how]
    weight, x = nn.Parameter(torch.randn(4, 4)), torch.randn(4, 4, requires_grad=True)
    loss = read(x, weight).square().sum()
    found = watch(loss, {"weight": weight})
    (grad,) = torch.autograd.grad(loss, [weight])
    assert bool(found) is expected
    for rows, dz in found.values():
        assert torch.allclose(dz.T @ rows, grad, rtol=1e-4, atol=1e-5)
