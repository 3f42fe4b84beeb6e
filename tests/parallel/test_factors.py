"""strategy.reduce=factors: gradients of dense weights by sufficient factors equal their sum, and are fewer bytes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from composing import configured, settings_of
from gnnpar.cli.main import run
from gnnpar.parallel.factors import FactorEngine, watch
from gnnpar.parallel.halo.strategy import GraphParallel
from gnnpar.verify.conformance import small_graph, train_in_threads

FACTORS = GraphParallel(reduce="factors")


@pytest.fixture
def all_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    """By factors also where these are more bytes."""
    monkeypatch.setattr(FactorEngine, "pays", lambda self, name, rows: self._comm.size > 1 and max(rows) < torch.inf)


def test_they_equal_the_single_device(all_weights: None) -> None:
    words = ["strategy=graph_parallel", "strategy.reduce=factors", "model=gcn,resgcn", "--worlds", "1,3"]
    assert run("check", words) == 0


@pytest.mark.parametrize("model", ["gcn", "sage", "gat", "gin", "transformer", "gcnii"])
def test_every_model_gives_the_gradients_of_the_sum(all_weights: None, model: str) -> None:
    config = configured("model", model, "model.hidden=8", "model.num_layers=3")
    mine, theirs = (train_in_threads(each, config, small_graph(), world=3) for each in (FACTORS, GraphParallel()))
    assert mine.losses == pytest.approx(theirs.losses, rel=1e-12)
    for ours, sums in zip(mine.gradients, theirs.gradients, strict=True):
        assert all(torch.allclose(ours[name], sums[name], rtol=1e-9, atol=1e-12) for name in sums)


def test_in_fp32_wide_weights_take_fewer_bytes() -> None:
    settings = settings_of("model=gcn", "model.hidden=256", "model.num_layers=3")
    mine, theirs = (
        train_in_threads(each, settings.model, small_graph(), world=2, dtype=torch.float32)
        for each in (FACTORS, GraphParallel())
    )
    assert mine.losses == pytest.approx(theirs.losses, rel=1e-5)
    for ours, sums in zip(mine.gradients, theirs.gradients, strict=True):
        assert all(torch.allclose(ours[name], sums[name], rtol=1e-4, atol=1e-6) for name in sums)
    assert mine.traffic[0]["reduce"] < theirs.traffic[0]["reduce"] / 2
    assert mine.traffic[0]["forward"] == theirs.traffic[0]["forward"]


@pytest.mark.parametrize("twice", [False, True])
def test_a_weight_that_two_products_read_has_no_factors(twice: bool) -> None:
    layer: Any = nn.Linear(4, 4)
    x = torch.randn(5, 4)
    out = layer(x).relu()
    loss: Any = (layer(out) if twice else out).square().sum()
    found = watch(loss, {"weight": layer.weight})
    (grad,) = torch.autograd.grad(loss, [layer.weight])
    assert bool(found) is not twice
    for rows, dz in found.values():
        assert torch.allclose(dz.T @ rows, grad)
